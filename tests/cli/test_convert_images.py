"""``parallel-ext convert`` of models of images, whose files have other names than their modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from ranks import pool
from reference import saved_tensors
from reference_images import image_batch, parallel_pair, tiny_model
from reference_mixtral import Layout

import parallel_ext as px
from parallel_ext.cli.main import main

KINDS = ["llava", "tied llava", "paligemma", "qwen2_5_vl", "qwen3_vl_moe", "gemma4 e2b"]


def _convert(*arguments: Any) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def _refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def _check_same(found: Path, expected: Path) -> None:
    ours, theirs = saved_tensors(found), saved_tensors(expected)
    tied = {name for name in ours.keys() - theirs.keys() if name.endswith("lm_head.weight")}
    for name in tied:  # a DCP of torch has both names
        ours.pop(name)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
        found, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    del loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_dcp_of_torch_becomes_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "plain")
    model.config.save_pretrained(tmp_path / "config")
    out = tmp_path / "out"
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _convert(tmp_path / "dcp", out, "--to", "hf", "--config", tmp_path / "config")
    _check_same(out, tmp_path / "plain")


def _save(kind: str, root: Path) -> None:
    mesh = Layout(1, 2, 1).mesh()
    _, model = parallel_pair(kind, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**image_batch(2, kind)).loss.backward()
    optimizer.step()
    px.save_checkpoint(root / "checkpoints", 1, model, optimizer)
    model.save_pretrained(root / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_through_dcp_to_a_model(kind: str, tmp_path: Path) -> None:
    pool(2).run(_save, kind, tmp_path)
    _convert(tmp_path / "checkpoints", tmp_path / "dcp", "--to", "dcp")
    config = ["--config", tmp_path / "saved"]
    for name, more in (("with", config), ("without", [])):
        _convert(tmp_path / "dcp", tmp_path / name, "--to", "hf", *more)
        _check_same(tmp_path / name, tmp_path / "saved")


def test_what_is_no_such_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tiny_model("llava"), tmp_path / "out"
    model.save_pretrained(tmp_path / "plain")
    text = _refused(capsys, tmp_path / "plain", out, "--vocab-size", 90)
    assert "model.resize_token_embeddings(V)" in text
    state = model.state_dict()
    norm = state.pop("model.language_model.norm.weight")
    config = ["--to", "hf", "--config", tmp_path / "plain"]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "lacks", no_dist=True)
    assert "norm.weight of shape (64,) is missing" in _refused(
        capsys, tmp_path / "lacks", out, *config
    )
    both = {"language_model.model.norm.weight": norm, "model.language_model.norm.weight": norm}
    dcp.save({"model": state | both}, checkpoint_id=tmp_path / "both", no_dist=True)
    text = _refused(capsys, tmp_path / "both", out, *config)
    assert f"under two names each, as {', '.join(both)};" in text
    other = json.loads((tmp_path / "plain" / "config.json").read_text())
    other["text_config"]["model_type"] = "bloom"
    (tmp_path / "plain" / "config.json").write_text(json.dumps(other))
    assert "text_config" in _refused(capsys, tmp_path / "lacks", out, *config)
    assert not out.exists()
