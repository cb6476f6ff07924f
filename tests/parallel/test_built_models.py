"""What ``from_pretrained`` builds around the weights: buffers, dtypes, configurations, the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool
from reference import Tiny, batch, difference, mesh_of
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import parallel_ext as px

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


def _save(directory: Path, **changes: Any) -> LlamaForCausalLM:
    config = Tiny(dtype=torch.float32).config()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(5)
    model = LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(directory)
    return model


def _differing(directory: Path, dtype: torch.dtype) -> list[str]:
    """What differs from the model that HuggingFace loads from the same directory."""
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model = px.from_pretrained(directory, mesh_of(), dtype=dtype, device="cpu")
    buffers, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    wrong = sorted(buffers.keys() ^ expected.keys())
    for name in expected:
        same = buffers[name].dtype == expected[name].dtype
        if not (same and torch.equal(buffers[name], expected[name])):
            wrong.append(name)
    wrong += [n for n, p in model.named_parameters() if p.dtype != dtype or p.device.type != "cpu"]
    if model.dtype != dtype or model.config.dtype != dtype or model.training:
        wrong.append("model")
    if model.generation_config.to_dict() != plain.generation_config.to_dict():
        wrong.append("generation_config")
    if model.config.to_diff_dict() != plain.config.to_diff_dict():
        wrong.append("config")
    one = batch(101)
    with torch.no_grad():
        error = difference(model(**one).logits, plain(**one).logits)
    if error > (1e-5 if dtype == torch.float32 else 2e-2):
        wrong.append(f"logits differ by {error}")
    return wrong


@pytest.mark.parametrize("rope", ROPES)
def test_buffers_are_those_of_huggingface_bit_for_bit(tmp_path: Path, rope: str) -> None:
    _save(tmp_path, rope_parameters=ROPES[rope])
    assert pool(2).run(_differing, tmp_path, torch.bfloat16) == [[], []]


def test_the_configuration_of_transformers_4_is_understood(tmp_path: Path) -> None:
    _save(tmp_path, rope_parameters=ROPES["llama3"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    assert pool(2).run(_differing, tmp_path, torch.float32) == [[], []]


def test_what_an_older_config_says_of_generation_counts(tmp_path: Path) -> None:
    """Without a generation_config.json; its ids, lengths and flags may stand nowhere else."""
    _save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path, asked = tmp_path / "config.json", {"repetition_penalty": 1.3, "max_length": 25}
    path.write_text(json.dumps(json.loads(path.read_text()) | asked))
    assert pool(2).run(_differing, tmp_path, torch.float32) == [[], []]


def _make_hub_cache(cache: Path, repository: str) -> LlamaForCausalLM:
    """The folders and links that a download of a repository leaves."""
    root = cache / f"models--{repository.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot, blobs = root / "snapshots" / revision, root / "blobs"
    for directory in (snapshot, blobs, root / "refs"):
        directory.mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    model = _save(root / "files")
    for number, path in enumerate((root / "files").iterdir()):
        shutil.move(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    (root / "files").rmdir()
    return model


def _from_hub(cache: Path, repository: str) -> tuple[str, float]:
    model_of = "huggingface_hub.constants.HF_HUB_CACHE"
    with (
        mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        mock.patch(model_of, str(cache)),
        mock.patch("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(cache)),
    ):
        model = px.from_pretrained(repository, mesh_of())
    expected = torch.load(cache / "expected.pt", weights_only=True)
    with torch.no_grad():
        return model.config.name_or_path, difference(model(**batch(101)).logits, expected)


def test_a_hub_id_is_read_from_the_cache_without_network(tmp_path: Path) -> None:
    plain = _make_hub_cache(tmp_path, "someone/tiny-llama")
    with torch.no_grad():
        torch.save(plain.eval()(**batch(101)).logits, tmp_path / "expected.pt")
    for name, error in pool(2).run(_from_hub, tmp_path, "someone/tiny-llama"):
        assert name == "someone/tiny-llama"
        assert error < 1e-5
