"""Rows of tokens trained beside LoRA: PEFT's ``trainable_token_indices`` on a parallel model.

Training at any layout, files and merges by ``parallel-ext merge`` are cases of the tests beside.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, batch, mesh_of, parallel
from reference_lora import (
    FILE,
    adapted,
    check_life,
    config,
    logits_in_life,
    logits_of,
    plain,
    with_adapter,
)
from reference_mixtral import Layout, TinyMixtral, training_differences
from safetensors.torch import load_file
from torch import nn

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn.trained_rows import TrainedRows
from parallel_ext.nn.vocab import VocabParallelEmbedding

IDS = [30, 0, 14, 6]  # of which all but 0, the padding, are in batches
ROWS: dict[str, Any] = {"target_modules": ["k_proj"], "trainable_token_indices": IDS}
BOTH_ENDS: dict[str, Any] = {
    "target_modules": ["k_proj"],
    "trainable_token_indices": {"embed_tokens": IDS, "lm_head": [3, 30]},
}
TIED_COPIES: dict[str, Any] = {
    "target_modules": ["k_proj"],
    "modules_to_save": ["embed_tokens"],
    "ensure_weight_tying": True,
}
INPUTS = batch(Tiny().vocab_size)
KINDS = {
    "tied": (Tiny(tied=True), ROWS),
    "untied": (Tiny(), ROWS),
    "ends": (Tiny(), BOTH_ENDS),
    "copies": (Tiny(tied=True), TIED_COPIES),
}


def _in_pieces_of_a_sequence(directory: Path, kind: str) -> dict[str, float]:
    tiny, changes = KINDS[kind]
    if kind == "tied":  # in the batches, on other ranks than those of their rows
        changes = {**changes, "trainable_token_indices": [94, 0, 23, 49, 81]}
    model = with_adapter(parallel(tiny.model(), mesh_of(), sequence_parallel=True), **changes)
    model.save_pretrained(directory)
    return training_differences(plain(directory, tiny), model, mesh_of(), tiny, 2)


@pytest.mark.parametrize(("kind", "tp"), [("tied", 3), ("ends", 2)])
def test_sequence_parallel_trains_as_peft(kind: str, tp: int, tmp_path: Path) -> None:
    assert_within(pool(tp).run(_in_pieces_of_a_sequence, tmp_path, kind), 1e-9)


def _in_stage(directory: Path, changes: dict[str, Any], zero: int) -> dict[str, float]:
    tiny, layout = TinyMixtral(tied=True), Layout(2, 2, 1)
    model = with_adapter(parallel(tiny.model(), layout.mesh()), **changes)
    model.save_pretrained(directory)
    reference = plain(directory, tiny)
    px.data_parallel(model, layout.mesh(), zero)
    return training_differences(reference, model, layout.mesh(), tiny, 2)


@pytest.mark.parametrize(("changes", "zero"), [(ROWS, 3), (TIED_COPIES, 2), (TIED_COPIES, 3)])
def test_stages_train_as_peft(tmp_path: Path, changes: dict[str, Any], zero: int) -> None:
    assert_within(pool(4).run(_in_stage, tmp_path, changes, zero), 1e-9)


def _looked_up() -> float:
    """How far rows and their gradient are from those of a whole table with a padding id."""
    mesh, ids = mesh_of(), torch.tensor([[9, 3, 0, 9, 5], [3, 10, 2, 0, 3]])
    trained, padding = [9, 3, 0, 7], 3
    torch.manual_seed(5)
    plain = nn.Embedding(11, 4, padding_idx=padding).double()
    values = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(*ids.shape, 4, dtype=torch.float64)
    table = plain.weight.detach().index_copy(0, torch.tensor(trained), values)
    expected = nn.functional.embedding(ids, table, padding_idx=padding)
    (of_values,) = torch.autograd.grad(expected, values, grad)
    ours = VocabParallelEmbedding.from_plain(plain, mesh.tp).requires_grad_(False)
    ordered, places = torch.tensor(trained).sort()
    bounds = torch.tensor(ours.vocab_range)
    own = tuple(torch.searchsorted(ordered, bounds).tolist())
    rows = TrainedRows(ordered, places, values, own, ours.vocab_range[0])
    found = ours(ids, rows)
    (partial,) = torch.autograd.grad(found, values, grad)
    total = ops.reduce_from_region(partial, mesh.tp)
    assert not total[trained.index(padding)].any()
    return max((found - expected).abs().max().item(), (total - of_values).abs().max().item())


@pytest.mark.parametrize("tp", [1, 3])
def test_looked_up_rows_have_the_gradient_of_a_whole_table(tp: int) -> None:
    assert max(pool(tp).run(_looked_up)) < 1e-12


# Files, merges.


def _save(directory: Path, kind: str) -> None:
    tiny, changes = KINDS[kind]
    model = adapted(tiny, **changes, base_model_name_or_path="x")
    model.save_pretrained(directory / "first")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name or "modules_to_save" in name:
                parameter += 0.5
    model.save_pretrained(directory / "second")


def _warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = with_adapter(parallel(Tiny().model(), mesh_of(), sequence_parallel=True), **ROWS)
        model(**INPUTS).loss.backward()
    return [str(each.message) for each in caught]


def test_nobody_is_warned_of_modules_of_ours() -> None:
    for texts in pool(2).run(_warned):
        assert not [text for text in texts if "Unsupported layer" in text or "contiguous" in text]


def _live(directory: Path, kind: str) -> dict[str, torch.Tensor]:
    return logits_in_life(parallel(KINDS[kind][0].model(), mesh_of()), directory, INPUTS)[0]


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_peft_and_merge_at_any_tp(kind: str, tmp_path: Path) -> None:
    tiny, changes = KINDS[kind]
    pool(2).run(_save, tmp_path, kind)
    peft.get_peft_model(
        tiny.model(), peft.LoraConfig(r=5, lora_alpha=7, **changes)
    ).save_pretrained(tmp_path / "peft")
    found, expected = (load_file(tmp_path / each / FILE) for each in ("first", "peft"))
    assert found.keys() == expected.keys()
    rows = [name for name in found if "trainable_tokens_delta" in name]
    assert len(rows) == {"ends": 2, "copies": 0}.get(kind, 1)
    for name in rows:  # which begin as those of the table
        assert torch.equal(found[name], expected[name])
    logits = logits_of(plain(tmp_path / "second", tiny), INPUTS)
    for life in pool(3).run(_live, tmp_path / "second", kind):
        check_life(life, logits, biased=False)


def _several(directory: Path) -> tuple[float, ...]:
    """Differences from PEFT's with a second adapter, after the first is gone, and in a copy."""
    model = adapted(Tiny(tied=True), **ROWS)
    model.add_adapter("second", config(target_modules=["q_proj"], trainable_token_indices=[5, 0]))
    model.save_pretrained(directory)
    reference = plain(directory, Tiny(tied=True))
    reference.load_adapter(directory / "second", "second", is_trainable=True)
    found = []
    for step in ("second", "default", "gone"):
        for each in (model, reference):
            if step == "gone":
                each.delete_adapter("default")
            each.set_adapter("second" if step == "gone" else step)
        found.append((logits_of(model, INPUTS) - logits_of(reference, INPUTS)).abs().max().item())
    return tuple(found)


def test_several_adapters_have_rows_of_their_own(tmp_path: Path) -> None:
    for differences in pool(2).run(_several, tmp_path):
        assert max(differences) < 1e-9


def _without_rows(directory: Path) -> float:
    """How far a model with rows in one adapter of two is from itself, saved and loaded again."""
    model = adapted(Tiny(tied=True), **ROWS)
    both = {"embed_tokens": [5, 2], "lm_head": [5, 2]}  # which stand for one
    model.add_adapter("both", config(target_modules=["q_proj"], trainable_token_indices=both))
    model.add_adapter("second", config(target_modules=["q_proj"]))
    model.save_pretrained(directory)
    base = parallel(Tiny(tied=True).model(), mesh_of())
    again = peft.PeftModel.from_pretrained(base, directory)
    differences = []
    for name in ("both", "second"):
        again.load_adapter(directory / name, name)
        for each in (model, again):
            each.set_adapter(name)
        differences.append((logits_of(again, INPUTS) - logits_of(model, INPUTS)).abs().max())
    return max(differences).item()


def test_an_adapter_without_rows_stands_beside_one_with_them(tmp_path: Path) -> None:
    assert pool(2).run(_without_rows, tmp_path) == [0.0, 0.0]
    found = load_file(tmp_path / "second" / FILE)
    assert all("lora_" in name for name in found)


def _later(directory: Path, zero: int) -> dict[str, float]:
    """Training of a second adapter's rows, which were frozen when ZeRO sharded the model."""
    tiny, mesh = TinyMixtral(tied=True), Layout(2, 2, 1).mesh()
    model = with_adapter(parallel(tiny.model(), mesh), **ROWS)
    model.add_adapter("second", config(target_modules=["q_proj"], trainable_token_indices=[6, 30]))
    model.save_pretrained(directory)
    reference = plain(directory, tiny)
    reference.load_adapter(directory / "second", "second", is_trainable=True)
    px.data_parallel(model, mesh, zero)
    for each in (reference, model):
        each.set_adapter("second")
    return training_differences(reference, model, mesh, tiny, 2)


@pytest.mark.parametrize("zero", [2, 3])
def test_an_adapter_that_zero_found_frozen_trains_as_peft(tmp_path: Path, zero: int) -> None:
    assert_within(pool(4).run(_later, tmp_path, zero), 1e-9)


# What is refused.


def _merge_one_end() -> None:
    indices = {"lm_head": [5]}
    model = adapted(Tiny(tied=True), target_modules=["k_proj"], trainable_token_indices=indices)
    model.merge_and_unload()


def _merge_twice_the_same() -> None:
    model = adapted(**ROWS)
    model.add_adapter("second", config(**ROWS))
    model.base_model.merge_adapter(["default", "second"])


def _head_after_embedding() -> None:
    model = adapted(Tiny(tied=True), **ROWS)
    indices = {"lm_head": [5]}
    model.add_adapter("second", config(target_modules=["k_proj"], trainable_token_indices=indices))


def _beside_tied_head() -> None:
    adapted(Tiny(tied=True), **{**ROWS, "target_modules": ["lm_head"]})


def _add(indices: Any) -> None:
    adapted(**{**ROWS, "trainable_token_indices": indices})


REFUSED: dict[str, tuple[Any, tuple[Any, ...], str, str]] = {
    "no id": (_add, ([101],), "ValueError", "must be ids in [0, 101), got 101"),
    "negative": (_add, ([3, -1],), "ValueError", "got -1"),
    "twice": (_add, ([3, 4, 3],), "ValueError", "name 3 more than once"),
    "a projection": (_add, ({"q_proj": [1]},), "NotImplementedError", "a ColumnParallelLinear"),
    "one end": (_merge_one_end, (), "ValueError", "embedding and head share this weight"),
    "the tied head later": (
        _head_after_embedding,
        (),
        "NotImplementedError",
        "names lm_head, which",
    ),
    "beside a tied head": (
        _beside_tied_head,
        (),
        "NotImplementedError",
        "adapter on lm_head, which",
    ),
    "overlapping": (_merge_twice_the_same, (), "ValueError", "have rows of the same tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(case: str) -> None:
    function, arguments, error, words = REFUSED[case]
    pool(2).assert_raises(function, *arguments, error=error, words=words)
