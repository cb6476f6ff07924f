"""The files of a parallel Mixtral are those of the single-process one, whatever the layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import pool
from reference import batch, refusal, saved_tensors, shard_differences, worst
from reference_mixtral import Layout, TinyMixtral, load_and_save

import parallel_ext as px

TINY = TinyMixtral(num_experts=5, dtype=torch.float32)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        *((Layout(1, 1, 1), False), (Layout(2, 1, 2), True), (Layout(1, 3, 3), False)),
        *((Layout(2, 2, 1), True), (Layout(1, 4, 2), False)),
    ],
    ids=str,
)
def test_a_saved_mixtral_is_that_of_the_hub(layout: Layout, tied: bool, tmp_path: Path) -> None:
    tiny = replace(TINY, tied=tied)
    whole, ours = tmp_path / "whole", tmp_path / "ours"
    tiny.model().save_pretrained(whole)
    for error, name in pool(layout.world).run(load_and_save, layout, whole, ours, tiny):
        assert error == 0, name
    expected, found = saved_tensors(whole), saved_tensors(ours)
    assert "model.layers.1.block_sparse_moe.experts.4.w3.weight" in found
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    again = transformers.AutoModelForCausalLM.from_pretrained(ours, experts_implementation="eager")
    again.train()
    one = batch(tiny.vocab_size)
    assert torch.equal(again(**one).logits, tiny.model()(**one).logits)
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(expected)


def _full(layout: Layout) -> dict[str, Any]:
    mesh = layout.mesh()
    model = px.data_parallel(px.parallelize(TINY.model(), mesh), mesh)
    state = px.full_state_dict(model)
    return {name: tensor.numpy() for name, tensor in state.items()}


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(1, 2, 2)], ids=str)
def test_the_full_state_dict_has_the_names_of_the_model(layout: Layout) -> None:
    first, second = pool(2).run(_full, layout)
    expected = TINY.model().state_dict()
    assert not second
    assert first.keys() == expected.keys()
    assert all(torch.equal(torch.from_numpy(first[n]), t) for n, t in expected.items())


def _loaded_state(layout: Layout) -> tuple[tuple[float, str], str]:
    mesh = layout.mesh()
    model = px.parallelize(TINY.model(seed=7), mesh)
    reference = TINY.model()
    model.load_state_dict(reference.state_dict(), strict=False)
    errors = worst(shard_differences(model, dict(reference.named_parameters()), False))
    return errors, refusal(lambda: TINY.model().load_state_dict(model.state_dict()))


def test_a_state_dict_is_cut_and_shards_are_refused_elsewhere() -> None:
    for (error, name), text in pool(2).run(_loaded_state, Layout(1, 2, 2)):
        assert error == 0, name
        assert "parallel_ext_local_shards" in text


def _loaded_from(path: Path) -> None:
    px.from_pretrained(path, Layout(1, 2, 2).mesh())


def _edit(directory: Path, change: Any) -> None:
    from safetensors.torch import save_file

    tensors = saved_tensors(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


EXPERT = "model.layers.0.block_sparse_moe.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{EXPERT}.4.w2.weight"),
            f"{EXPERT}.4.w2.weight of shape (32, 13) is mis",
        ),
        (
            lambda t: t.update({f"{EXPERT}.5.w2.weight": torch.zeros(32, 13)}),
            f"{EXPERT}.5.w2.weight in model.safetensors of shape (32, 13) does not belong",
        ),
        (
            lambda t: t.update({f"{EXPERT}.0.w1.weight": torch.zeros(12, 32)}),
            "has the shape (12, 32), but by the configuration it must be (13, 32)",
        ),
    ],
)
def test_files_with_other_experts_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    TINY.model().save_pretrained(tmp_path)
    _edit(tmp_path, change)
    pool(2).assert_raises(_loaded_from, tmp_path, words=message)
