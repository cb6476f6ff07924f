"""DoRA on a parallel model trains as PEFT's in one process, and its files and merges are PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, batch, mesh_of, parallel
from reference_lora import (
    ALL,
    FILE,
    TINY,
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
from test_specs import OfSpec

import parallel_ext as px

DORA: dict[str, Any] = {"use_dora": True}
BIASED = Tiny(bias=True)
INPUTS = batch(BIASED.vocab_size)


def _in_pieces_of_a_sequence(directory: Path) -> dict[str, float]:
    options = {**DORA, "lora_dropout": 0.0}
    model = with_adapter(parallel(BIASED.model(), mesh_of(), sequence_parallel=True), **options)
    model.save_pretrained(directory)
    return training_differences(plain(directory, BIASED), model, mesh_of(), BIASED, 2)


def test_sequence_parallel_trains_as_peft(tmp_path: Path) -> None:
    assert_within(pool(3).run(_in_pieces_of_a_sequence, tmp_path), 1e-9)


def _in_stage(directory: Path, tiny: Any, layout: Layout, zero: int) -> dict[str, float]:
    targets = {"target_modules": ["q_proj", "k_proj", "o_proj"]}
    model = with_adapter(parallel(tiny.model(), layout.mesh()), **DORA, **targets)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.save_pretrained(directory)
    reference = plain(directory, tiny)
    px.data_parallel(model, layout.mesh(), zero)
    differences = training_differences(reference, model, layout.mesh(), tiny, 2)
    for each in (model, reference):
        each.zero_grad()
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    own = px.full_state_dict(merged, writer_only=False)
    whole = expected.state_dict()
    return differences | {
        name: ((value - whole[name]).abs().max() / whole[name].abs().max()).item()
        for name, value in own.items()
        if "self_attn" in name
    }


@pytest.mark.parametrize(("layout", "zero"), [(Layout(2, 2, 2), 3), (Layout(2, 1, 1), 2)], ids=str)
def test_stages_train_as_peft_and_merge(tmp_path: Path, layout: Layout, zero: int) -> None:
    tiny = TinyMixtral(num_experts=5)
    assert_within(pool(layout.world).run(_in_stage, tmp_path, tiny, layout, zero), 1e-9)


def _joined(directory: Path) -> dict[str, float]:
    """On linears that join several matrices, whose rows are not next to each other on a rank."""
    tiny = OfSpec("phi3")
    model = with_adapter(parallel(tiny.model(), mesh_of()), **DORA, target_modules="all-linear")
    model.save_pretrained(directory)
    return training_differences(plain(directory, tiny), model, mesh_of(), tiny, 2)


def test_joined_linears_train_as_peft(tmp_path: Path) -> None:
    assert_within(pool(2).run(_joined, tmp_path), 1e-9)


# Files and merges.


def _save(directory: Path) -> None:
    model = adapted(TINY, **DORA, init_lora_weights=True, base_model_name_or_path="x")
    model.save_pretrained(directory / "first")
    model = adapted(BIASED, **DORA)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1.5
    model.save_pretrained(directory / "second")


def _live(directory: Path) -> dict[str, torch.Tensor]:
    return logits_in_life(parallel(BIASED.model(), mesh_of()), directory, INPUTS)[0]


def test_files_are_those_of_peft_and_merge_at_any_tp(tmp_path: Path) -> None:
    pool(2).run(_save, tmp_path)
    own = peft.LoraConfig(r=5, lora_alpha=7, target_modules=ALL, **DORA)
    peft.get_peft_model(TINY.model(), own).save_pretrained(tmp_path / "peft")
    found, expected = (load_file(tmp_path / each / FILE) for each in ("first", "peft"))
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }
    lengths = [name for name in found if name.endswith("lora_magnitude_vector")]
    assert len(lengths) == len(ALL) * TINY.layers
    for name in lengths:  # which begin as those of the base's rows
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=0)
    logits = logits_of(plain(tmp_path / "second", BIASED), INPUTS)
    for life in pool(3).run(_live, tmp_path / "second"):
        check_life(life, logits, biased=False)


def _lean(directory: Path) -> bool:
    base = parallel(BIASED.model(), mesh_of())
    lean = peft.PeftModel.from_pretrained(base, directory, low_cpu_mem_usage=True)
    logits = logits_of(lean, INPUTS)
    usual = peft.PeftModel.from_pretrained(parallel(BIASED.model(), mesh_of()), directory)
    return torch.equal(logits, logits_of(usual, INPUTS))


def test_it_loads_without_values_of_its_own_first(tmp_path: Path) -> None:
    pool(2).run(_save, tmp_path)
    assert all(pool(2).run(_lean, tmp_path / "second"))


def _in_bf16() -> float:
    """How much the loss changes with lengths that change by less than bf16 tells apart."""
    tiny = Tiny(dtype=torch.bfloat16)
    model = adapted(tiny, **DORA)
    with torch.no_grad():
        before = model(**INPUTS).loss
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                assert parameter.dtype == torch.float32
                parameter *= 1 + 2**-10
        return (model(**INPUTS).loss - before).abs().item()


def test_lengths_count_in_fp32_over_a_base_in_bf16() -> None:
    for change in pool(2).run(_in_bf16):
        assert change > 0


def _merge_broken(target: str) -> None:
    model = adapted(TINY, **DORA, target_modules=[target])
    for name, parameter in model.named_parameters():
        if "magnitude" in name and (target == "o_proj" or mesh_of().tp_rank == 1):
            parameter.data[0] = float("nan")
    model.merge_adapter(safe_merge=True)


@pytest.mark.parametrize("target", ["q_proj", "o_proj"])
def test_safe_merge_refuses_lengths_that_are_not_finite(target: str) -> None:
    pool(2).assert_raises(_merge_broken, target, error="ValueError", words="infinite lengths")


# What is refused.


def _add(changes: dict[str, Any]) -> None:
    adapted(TINY, **{**DORA, **changes})


def _under_invariant() -> None:
    plain_model = Tiny(dtype=torch.float32).model()
    model = px.parallelize(plain_model, mesh_of(), invariant=px.Invariant(4))
    peft.get_peft_model(model, config(**DORA))


def _two() -> peft.PeftModel:
    model = adapted(TINY, **DORA)
    model.add_adapter("second", config(r=2))
    return model


def _active() -> None:
    model = _two()
    model.base_model.set_adapter(["default", "second"])
    model(**INPUTS)


def _merged() -> None:
    _two().base_model.merge_adapter(["default", "second"])


def _combined() -> None:
    _two().add_weighted_adapter(["default", "second"], [1.0, 1.0], "both", "cat")


REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "the head": (_add, ({"target_modules": ["lm_head"]},), "on lm_head is not supported"),
    "the embedding": (_add, ({"target_modules": ["embed_tokens"]},), "embed_tokens is not supp"),
    "Invariant": (_under_invariant, (), "px.Invariant does not serve use_dora=True"),
    "two at once": (_active, (), "default, second together are not supported"),
    "two merged": (_merged, (), "merging default, second together is not supported"),
    "combined": (_combined, (), "does not combine adapters of DoRA"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(case: str) -> None:
    function, arguments, words = REFUSED[case]
    pool(2).assert_raises(function, *arguments, error="NotImplementedError", words=words)
