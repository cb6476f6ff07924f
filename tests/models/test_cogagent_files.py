"""Files of a CogAgent: read and written at any tp, the buffers that belong to them included."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import difference, saved_tensors, shard_differences, worst
from reference_cogagent import DATA, batches_of, picture, text
from reference_lora import logits_of
from reference_mixtral import Layout
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import parallel_ext as px
from parallel_ext.models.cogagent import CogAgentForCausalLM

INPUTS = {n: v for n, v in batches_of([[picture(6), text(9)]])[0].items() if n != "labels"}
_logits = partial(logits_of, inputs=INPUTS)
PUBLISHED = load_file(DATA / "model.safetensors")
ROPE = [name for name in PUBLISHED if ".rope.freqs_" in name]


def _load(source: Path, layout: Layout, **options: Any) -> tuple[Any, px.Mesh]:
    mesh = layout.mesh()
    return px.from_pretrained(source, mesh, **options), mesh


def _load_and_save(source: Path, layout: Layout, target: Path) -> tuple[float, torch.Tensor]:
    """How far the parameters are from the published ones, and the logits."""
    model, mesh = _load(source, layout)
    differences = shard_differences(model, PUBLISHED, False)
    px.data_parallel(model, mesh)
    logits = _logits(model)
    model.save_pretrained(target, max_shard_size=100_000)
    return worst(differences)[0], logits


LAYOUTS = [Layout(1, 1, 1), Layout(1, 2, 1), Layout(1, 4, 1), Layout(2, 2, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_read_is_written_bit_for_bit(layout: Layout, tmp_path: Path) -> None:
    expected = _logits(CogAgentForCausalLM.from_pretrained(DATA))
    for error, logits in pool(layout.world).run(_load_and_save, DATA, layout, tmp_path / "out"):
        assert error == 0
        assert difference(logits, expected) < 1e-5
    saved = saved_tensors(tmp_path / "out")
    assert saved.keys() == PUBLISHED.keys()
    assert all(torch.equal(saved[name], PUBLISHED[name]) for name in saved)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(_logits(model), expected)


def _published(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Files as the hub has them: a configuration without a ``model_type``."""
    directory.mkdir()
    fields = json.loads((DATA / "config.json").read_text())
    del fields["model_type"]
    fields |= {"auto_map": {"AutoConfig": "configuration_cogagent.CogAgentConfig"}}
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "model.safetensors")
    return directory


def _of(source: Path) -> torch.Tensor:
    return _logits(_load(source, Layout(1, 2, 1))[0])


def test_buffers_that_files_lack_are_computed_and_others_are_taken(tmp_path: Path) -> None:
    assert len(ROPE) == 2 * (1 + 3)  # once for the tower and once for each of its blocks
    without = {n: t for n, t in PUBLISHED.items() if n not in ROPE and "inv_freq" not in n}
    turned = {
        name: tensor.flip(0) if name in ROPE else tensor for name, tensor in PUBLISHED.items()
    }
    answers = {}
    for name, tensors in (("without", without), ("turned", turned)):
        directory = _published(tmp_path / name, tensors)
        answers[name] = pool(2).run(_of, directory)[0]
        plain = CogAgentForCausalLM.from_pretrained(directory)
        assert difference(answers[name], _logits(plain)) < 1e-5
    assert difference(answers["without"], _logits(CogAgentForCausalLM.from_pretrained(DATA))) < 1e-5
    assert difference(answers["turned"], answers["without"]) > 1e-3


def _read_in_bf16(source: Path) -> tuple[torch.Tensor, list[torch.dtype]]:
    model, _ = _load(source, Layout(1, 2, 1), dtype=torch.bfloat16)
    return _logits(model), [buffer.dtype for buffer in model.buffers()]


def test_in_bf16_buffers_keep_the_dtype_that_transformers_gives_them() -> None:
    plain = CogAgentForCausalLM.from_pretrained(DATA, dtype=torch.bfloat16)
    truth = _logits(CogAgentForCausalLM.from_pretrained(DATA))
    own_error = difference(_logits(plain).float(), truth)
    for logits, dtypes in pool(2).run(_read_in_bf16, DATA):
        assert dtypes == [buffer.dtype for buffer in plain.buffers()]
        assert difference(logits.float(), truth) <= 2 * own_error


def _whole_state(source: Path) -> dict[str, torch.Tensor]:
    return px.full_state_dict(_load(source, Layout(1, dist.get_world_size(), 1))[0])


def test_the_whole_state_is_that_of_the_plain_model() -> None:
    first, second = pool(2).run(_whole_state, DATA)
    assert not second
    expected = CogAgentForCausalLM.from_pretrained(DATA).state_dict()
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in first)


def _wrong_rope(tensors: dict[str, torch.Tensor]) -> None:
    tensors[ROPE[0]] = tensors[ROPE[0]][:-1].clone()


def _wrong_rows(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.cross_attn.dense.weight"
    tensors[name] = tensors[name][:, :16].clone()


def _surplus(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.cross_attn.bias"] = torch.zeros(3)


WRONG = {
    "rope.freqs_cos in model.safetensors has the shape (15, 8)": _wrong_rope,
    "cross_attn.dense.weight in model.safetensors has the shape (64, 16)": _wrong_rows,
    "cross_attn.bias in model.safetensors of shape (3,) does not belong": _surplus,
}


@pytest.mark.parametrize("message", WRONG)
def test_files_that_do_not_fit_are_refused_on_all_ranks(message: str, tmp_path: Path) -> None:
    tensors = dict(PUBLISHED)
    WRONG[message](tensors)
    directory = _published(tmp_path / "wrong", tensors)
    pool(2).assert_raises(_of, directory, error="CheckpointError", words=message)


def test_an_unknown_field_of_the_configuration_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "model", ignore=shutil.ignore_patterns("case-*"))
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_multi_query_heads": 2}))
    pool(2).assert_raises(_of, tmp_path / "model", words="unknown fields ['num_multi_query_heads']")
