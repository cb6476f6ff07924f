"""The borders between which each rank keeps its own tokens: take, gather, and sum them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    BOTH_PATHS,
    MUTATIONS,
    NOTICED,
    TOLERANCE,
    assert_refused,
    assert_within,
    counted,
    data_bytes,
    grad_outputs,
    on_ranks,
    relative_error,
    sizes_of,
    with_gradients,
    worst,
)
from torch.profiler import ProfilerActivity, profile, record_function

from parallel_ext import _C
from parallel_ext.ops import ALONE, Group, gather_tokens, sum_tokens, take_tokens
from parallel_ext.sharding.layout import split
from parallel_ext.training.step_events import sort_events

FP64 = torch.float64
# How many tokens each rank has.
SHARES: dict[str, Callable[[int], list[int]]] = {
    "balanced": lambda ranks: [stop - start for start, stop in split(10, ranks)],
    "the last has most": lambda ranks: [1 + 2 * rank for rank in range(ranks)],
    "the first has none": lambda ranks: [0] + [2] * (ranks - 1),
    "one token": lambda ranks: [1] + [0] * (ranks - 1),
    "no tokens": lambda ranks: [0] * ranks,
}


def _inputs(tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same numbers on every rank in the memory layouts that users bring."""
    return {
        "one sequence": torch.randn(1, tokens, 3, dtype=dtype),
        "sequences": torch.randn(2, tokens, 3, dtype=dtype),
        "no sequence dimension": torch.randn(tokens, 5, dtype=dtype),
        "transposed": torch.randn(2, 3, tokens, dtype=dtype).mT,
        "stride 0": torch.randn(3, dtype=dtype).expand(2, tokens, 3),
        "no sequences": torch.randn(0, tokens, 3, dtype=dtype),
        "no features": torch.randn(2, tokens, 0, dtype=dtype),
    }


def _errors(group: Group, shares: str, dtype: torch.dtype, shared: bool = True) -> dict[str, float]:
    """Of all three ops and their gradients, from what one process would compute."""
    _C.set_shared_memory(shared)
    try:
        return _errors_of_shares(group, SHARES[shares](group.size), dtype)
    finally:
        _C.set_shared_memory(True)


def _errors_of_shares(group: Group, sizes: list[int], dtype: torch.dtype) -> dict[str, float]:
    tokens, start = sum(sizes), sum(sizes[: group.rank])
    own, errors = (..., slice(start, start + sizes[group.rank]), slice(None)), {}
    times = group.rank + 1
    total = sum(range(1, group.size + 1))
    for name, full in _inputs(tokens, dtype).items():
        calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
            "take": (lambda x: take_tokens(x, sizes, group), full),
            "gather": (lambda x: gather_tokens(x, sizes, group), full[own]),
            "gather, whole gradient": (
                lambda x: gather_tokens(x, sizes, group, partial_gradient=False),
                full[own],
            ),
            "sum": (lambda x: sum_tokens(x, sizes, group), full * times),
        }
        for kind, grad in grad_outputs(full.shape, dtype).items():
            expected = {
                "take": (grad[own], full[own], grad),
                "gather": (grad * times, full, grad[own] * total),
                "gather, whole gradient": (grad, full, grad[own]),
                "sum": (grad[own], full[own] * total, grad),
            }
            for op, (call, argument) in calls.items():
                given, output, gradient = expected[op]
                found = with_gradients(call, [argument], given)
                errors[f"{op} of {name}"] = relative_error(found[0], output)
                errors[f"{kind} gradient of {op} of {name}"] = relative_error(found[1], gradient)
    return errors


@BOTH_PATHS
@ALL_SIZES
def test_outputs_and_gradients_are_those_of_one_process(size: int, aten: bool) -> None:
    for shares in ("balanced", "the first has none"):
        assert_within(on_ranks(size, _errors, shares, FP64, aten=aten))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shares", SHARES)
def test_shares_of_any_sizes_travel_with_and_without_shared_memory(
    shares: str, shared: bool
) -> None:
    assert_within(on_ranks(3, _errors, shares, FP64, shared))


@BOTH_PATHS
@ALL_DTYPES
def test_dtypes_err_by_their_rounding(dtype: torch.dtype, aten: bool) -> None:
    assert_within(on_ranks(3, _errors, "balanced", dtype, aten=aten), TOLERANCE[dtype])


def _large(group: Group) -> dict[str, float]:
    """Messages of several pieces, whose sums have the bits of a sum in rank order."""
    tokens = 1501
    sizes, (start, stop) = sizes_of(tokens, group), split(tokens, group.size)[group.rank]
    addends = [torch.randn(2, tokens, 700) for _ in range(group.size)]
    found = sum_tokens(addends[group.rank], sizes, group)
    expected = addends[0]
    for addend in addends[1:]:
        expected = expected + addend
    everyone = gather_tokens(found, sizes, group)
    return {
        "sum": float(data_bytes(found) != data_bytes(expected[:, start:stop].contiguous())),
        "gather": float(data_bytes(everyone) != data_bytes(expected)),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_large_sums_are_those_in_rank_order_bit_for_bit(size: int) -> None:
    assert worst(on_ranks(size, _large))[0] == 0


def _broken(group: Group, broken: str) -> dict[str, float]:
    used, rank = MUTATIONS[broken](group)
    full = torch.randn(2, 6, 3, dtype=FP64)
    sizes = sizes_of(6, used)
    own = full[:, slice(*split(6, group.size)[rank])]
    shard = own if used.size > 1 else full[:, :6]
    if used.size == 1:
        return {"sum": relative_error(sum_tokens(full, sizes, used), full * group.size)}
    return {"gather": relative_error(gather_tokens(shard, sizes, used), full)}


@pytest.mark.parametrize("broken", ["no exchange", "swapped shards"])
def test_the_comparison_notices(broken: str) -> None:
    assert worst(on_ranks(2, _broken, "none"))[0] <= TOLERANCE[FP64]
    assert worst(on_ranks(2, _broken, broken))[0] >= NOTICED


def _sent(group: Group) -> list[dict[str, int]]:
    sizes = sizes_of(5, group)
    own = torch.ones(2, sizes[group.rank], 3, requires_grad=True)
    gathered, first = counted(lambda: gather_tokens(own, sizes, group))
    _, second = counted(lambda: sum_tokens(gathered, sizes, group))
    return [first, second, counted(gathered.sum().backward)[1]]


def test_two_of_them_send_what_one_all_reduce_does() -> None:
    for rank, (gather, sums, backward) in enumerate(on_ranks(2, _sent)):
        own, others = (3, 2) if rank == 0 else (2, 3)
        assert gather["swap"] == sums["swap"] == backward["swap"] == 1
        assert gather["swap_bytes"] == 2 * own * 3 * 4
        assert sums["swap_bytes"] == backward["swap_bytes"] == 2 * others * 3 * 4


def _most_bytes(group: Group) -> float:
    """The memory that a sum takes at its peak, relative to what it sums."""
    partial, sizes = torch.ones(2, 60, 50), sizes_of(60, group)
    sum_tokens(partial, sizes, group)
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True)
    with profiler, record_function("sum"):
        sum_tokens(partial, sizes, group)
    seen = sort_events(profiler.profiler.kineto_results.events(), "sum", [], "cpu")
    return seen.peak / partial.nbytes


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_takes_no_more_memory_than_what_it_sums(size: int) -> None:
    assert on_ranks(size, _most_bytes) == [1.0] * size


REFUSALS = {
    "other tokens": (
        lambda group: sum_tokens(torch.ones(2, 5, 3), [2, 2], group),
        "ValueError: sum_tokens: partial must hold 4 tokens in its dimension before the last, got "
        "shape",
    ),
    "other own tokens": (
        lambda group: gather_tokens(torch.ones(2, 3, 3), [2, 2], group),
        "ValueError: gather_tokens: shard must hold 2 tokens",
    ),
    "a vector": (
        lambda group: take_tokens(torch.ones(4), [2, 2], group),
        "ValueError: take_tokens: input must hold 4 tokens",
    ),
    "sizes of other ranks": (
        lambda group: take_tokens(torch.ones(2, 4, 3), [4], group),
        "ValueError: take_tokens: 1 sizes were given for a group of 2 ranks",
    ),
    "negative sizes": (
        lambda group: gather_tokens(torch.ones(2, 2, 3), [5, -1], group),
        "ValueError: gather_tokens: sizes [5, -1] has a negative number",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_misuse_is_refused(case: str) -> None:
    assert_refused(__name__, case)


def test_a_group_of_one_keeps_all_tokens() -> None:
    full = torch.randn(2, 3, 4)
    for op in (take_tokens, gather_tokens, sum_tokens):
        found = op(full, [3], ALONE)
        assert torch.equal(found, full)
        assert found.data_ptr() != full.data_ptr()
