"""A parallel Llama trains exactly as the single process does."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    assert_at_most_twice,
    assert_within,
    batch,
    gradient_differences,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from reference_mixtral import Layout, accumulated_differences, errors_in, parity, spread
from reference_ops import counted, counted_both_ways

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.parallel.state import state_of

CASES: dict[str, tuple[int, Tiny, dict[str, Any]]] = {
    "one rank, tied": (1, Tiny(tied=True), {}),
    "two ranks": (2, Tiny(), {}),
    "three ranks, tied": (3, Tiny(tied=True), {}),
    "four ranks": (4, Tiny(), {}),
    "five ids on two ranks, tied": (2, Tiny(vocab_size=5, tied=True), {}),
    "five ids on four ranks": (4, Tiny(vocab_size=5), {}),
    "65535 ids": (3, Tiny(vocab_size=65535, heads=4, key_value_heads=2), {}),
    "key-value heads replicated unevenly": (3, Tiny(heads=8, key_value_heads=2, inner=30), {}),
    "one key-value head for all ranks": (4, Tiny(heads=4, key_value_heads=1, inner=30), {}),
    "mlp smaller than tp": (4, Tiny(inner=3), {}),
    "aligned vocabulary shards": (3, Tiny(), {"vocab_multiple_of": 32}),
    "a rank without vocabulary, tied": (4, Tiny(tied=True), {"vocab_multiple_of": 64}),
    "biases, no agreement": (2, Tiny(bias=True), {"agreement": False}),
    "biases, key-value heads replicated": (4, Tiny(bias=True, heads=8, key_value_heads=2), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str) -> None:
    tp, tiny, options = CASES[case]
    assert_within(pool(tp).run(parity, tiny, Layout(1, tp, 1), 2, options))


@pytest.mark.parametrize(
    ("dtype", "tp", "attention"),
    [
        *((torch.float32, 4, "sdpa"), (torch.bfloat16, 4, "sdpa")),
        *((torch.bfloat16, 2, "eager"), (torch.float16, 2, "sdpa")),
    ],
    ids=str,
)
def test_low_precision_errs_at_most_twice_as_much_as_one_process(
    dtype: torch.dtype, tp: int, attention: str
) -> None:
    tiny = Tiny(heads=8, key_value_heads=2, attention=attention)
    found = pool(tp).run(errors_in, tiny, Layout(1, tp, 1), dtype, None, range(3))
    assert_at_most_twice(found, FLOOR[dtype])


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_errs_at_most_twice_as_much_as_one_process(lower: torch.dtype) -> None:
    tiny = Tiny(heads=8, key_value_heads=2)
    found = pool(2).run(errors_in, tiny, Layout(1, 2, 1), torch.float32, lower, range(3))
    assert_at_most_twice(found, FLOOR[lower] / 2)


def _checkpointed(tiny: Tiny, reentrant: bool, copied: bool) -> tuple[float, str]:
    reference = tiny.model()
    model = parallel(reference, mesh_of())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if copied:
        model = copy.deepcopy(model)
    return worst(gradient_differences(reference, model, batch(tiny.vocab_size)))


@pytest.mark.parametrize(("reentrant", "copied"), [(False, True), (True, False)])
def test_gradient_checkpointing_keeps_the_gradients(reentrant: bool, copied: bool) -> None:
    tiny = Tiny(heads=4, key_value_heads=1)
    assert_within(pool(3).run(_checkpointed, tiny, reentrant, copied), FLOOR[tiny.dtype])


def _counts(tiny: Tiny, checkpointing: bool | None) -> tuple[dict[str, int], dict[str, int]]:
    model = parallel(tiny.model(), mesh_of())
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return counted_both_ways(lambda: model(**batch(tiny.vocab_size)).loss)


def test_collectives_are_two_a_layer_each_way() -> None:
    layers = 3
    for forward, backward in pool(2).run(_counts, Tiny(layers=layers), None):
        assert forward["all_gather"] == 2  # agreement, cross entropy records
        assert forward["all_reduce"] == 2 * layers
        assert forward["swap"] == 1  # rows of the embedding
        assert backward["all_reduce"] == 2 * layers + 1  # and the head
        assert "all_gather" not in backward


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_replicated_key_value_heads_add_one_collective_a_backward(reentrant: bool | None) -> None:
    tiny = Tiny(layers=3, heads=4, key_value_heads=1)
    for _, backward in pool(2).run(_counts, tiny, reentrant):
        recomputed = 0 if reentrant is None else 2 * 3  # the row linears of the recomputation
        assert backward["all_reduce"] - recomputed == 2 * 3 + 1 + 1


def _without(broken: str, tiny: Tiny) -> float:
    """The largest difference when one part of the machinery is taken out."""
    reference = tiny.model()
    model = parallel(reference, mesh_of(), training_logits=broken == "head gradient sum")
    layer = model.model.layers[0]
    if broken == "input gradient sum":
        layer.mlp._forward_pre_hooks.clear()
        layer.mlp._forward_pre_hooks_with_kwargs.clear()
    elif broken == "output sum":
        layer.mlp.down_proj.summed_over = ops.ALONE
    elif broken == "replicated gradient sum":
        layer.self_attn.k_proj.replicas = ops.ALONE
    elif broken == "embedding exchange":
        model.model.embed_tokens.group = ops.ALONE
    elif broken == "head gradient sum":  # of the head by itself
        model.lm_head.group = model.lm_head.group._replace(size=1, name="")
    elif broken == "record exchange":  # of the head with its loss
        alone = object.__new__(px.Mesh)
        vars(alone).update(vars(mesh_of()), tp=ops.ALONE)
        state_of(model).mesh = alone
    return worst(gradient_differences(reference, model, batch(tiny.vocab_size)))[0]


@pytest.mark.parametrize(
    "broken",
    [
        "input gradient sum",
        "output sum",
        "replicated gradient sum",
        "embedding exchange",
        "head gradient sum",
    ],
)
def test_parity_notices_a_missing(broken: str) -> None:
    assert max(pool(2).run(_without, broken, Tiny(heads=4, key_value_heads=1))) > 1e-3


def test_a_loss_without_the_exchange_of_records_is_refused() -> None:
    words = "is not all of the vocabulary [0, 101), but the group has one rank"
    pool(2).assert_raises(_without, "record exchange", Tiny(), words=words)


def _accumulated(tiny: Tiny, synchronize_each: bool) -> tuple[float, str, int]:
    """Two micro-batches with ``no_sync`` on the first, and the sums that they take."""
    reference, model, mesh = spread(tiny, Layout(1, 2, 1))
    errors, counts = counted(
        lambda: accumulated_differences(reference, model, mesh, tiny, synchronize_each)
    )
    return *worst(errors), counts["all_reduce"]


def test_no_sync_sums_partial_gradients_once_for_all_micro_batches() -> None:
    tiny = Tiny(heads=4, key_value_heads=1)
    each = pool(2).run(_accumulated, tiny, True)
    once = pool(2).run(_accumulated, tiny, False)
    for (error, name, count), (_, _, count_each) in zip(once, each, strict=True):
        assert error <= FLOOR[tiny.dtype], name
        assert count == count_each - 1


def _after_an_exception(tiny: Tiny) -> tuple[float, str]:
    """A backward that raises half way must leave nothing for the next one."""
    reference = tiny.model()
    model = parallel(reference, mesh_of())

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    one = batch(tiny.vocab_size)
    layer = model.model.layers[0].input_layernorm.weight
    handle = layer.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(**one).loss.backward()
    handle.remove()
    model.zero_grad()
    return worst(gradient_differences(reference, model, one))


def test_a_backward_that_raised_leaves_nothing_for_the_next() -> None:
    tiny = Tiny(heads=4, key_value_heads=1)
    assert_within(pool(2).run(_after_an_exception, tiny), FLOOR[tiny.dtype])


def _dropped(how: str) -> tuple[float, str]:
    """A backward under no_sync that is thrown away must not reach the next step."""
    tiny = Tiny(heads=4, key_value_heads=1)
    reference = tiny.model()
    model = parallel(reference, mesh_of())
    first, second = (batch(tiny.vocab_size, seed=seed) for seed in (3, 4))
    with suppress(ArithmeticError), px.no_sync(model):
        model(**first).loss.backward()
        if how == "exception":
            raise ArithmeticError("on purpose")
    model.zero_grad(set_to_none=how != "zero_grad in place")
    if how == "check_gradients between":
        with px.no_sync(model):
            model(**first).loss.backward()
        report = px.check_gradients(model, second)
        if report.worst[1] > 1e-6:
            raise AssertionError(str(report))
        reference(**first).loss.backward()
    model(**second).loss.backward()
    reference(**second).loss.backward()
    return worst(shard_differences(model, gradients_of(reference), gradients=True))


@pytest.mark.parametrize(
    "how", ["zero_grad", "zero_grad in place", "exception", "check_gradients between"]
)
def test_gradients_dropped_under_no_sync_stay_dropped(how: str) -> None:
    assert_within(pool(2).run(_dropped, how))


def _evaluated_unevenly() -> None:
    tiny = Tiny()
    mesh = mesh_of(tp=1)
    model = px.no_data_parallel(parallel(tiny.model(), mesh))
    one = batch(tiny.vocab_size)
    with torch.no_grad():
        for _ in range(2 + mesh.dp_rank):
            model(**one)
    model(**one)


def test_dp_ranks_that_evaluate_unevenly_raise() -> None:
    pool(2).assert_raises(_evaluated_unevenly, words="must make equally many forwards with labels")
