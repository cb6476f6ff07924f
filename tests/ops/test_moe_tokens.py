"""Tokens that tp ranks share out before the experts and join after them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from reference_ops import (
    ALL_SIZES,
    NOTICED,
    assert_within,
    counted,
    data_bytes,
    grad_outputs,
    on_ranks,
    relative_error,
    worst,
)

from parallel_ext import _C
from parallel_ext.ops import Group, copy_to_region, gather_tokens, moe_take_tokens
from parallel_ext.sharding.layout import split

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
HIDDEN, TOP_K = 7, 3  # odd, so that the gradients of a message lie at odd bytes

SIZES: dict[str, Callable[[int], list[int]]] = {
    "equal": lambda ranks: [3] * ranks,
    "unequal": lambda ranks: [stop - start for start, stop in split(4 * ranks + 1, ranks)],
    "the last has most": lambda ranks: [1 + 2 * rank for rank in range(ranks)],
    "the first has none": lambda ranks: [0] + [2] * (ranks - 1),
    "one token": lambda ranks: [1] + [0] * (ranks - 1),
    "no tokens": lambda ranks: [0] * ranks,
}
ALL_KINDS = pytest.mark.parametrize("kind", SIZES)
PAIRS = [(FP64, FP64), (BF16, FP32), (FP32, BF16)]
NEEDED = [(1, 1), (1, 0), (0, 1), (0, 0)]


def _own(sizes: list[int], group: Group) -> slice:
    start = sum(sizes[: group.rank])
    return slice(start, start + sizes[group.rank])


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return (actual.dtype, actual.shape) == (expected.dtype, expected.shape) and (
        data_bytes(actual.contiguous()) == data_bytes(expected.contiguous())
    )


def _tokens(kind: str, group: Group, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
    sizes = SIZES[kind](group.size)
    input = torch.randn(sum(sizes), HIDDEN, dtype=dtypes[0])
    return sizes, input, torch.randn(TOP_K, sum(sizes), dtype=dtypes[1]).T


def _taken(group: Group, kind: str, dtypes: tuple[torch.dtype, ...]) -> None:
    sizes, input, weights = _tokens(kind, group, dtypes)
    own = _own(sizes, group)
    grads = zip(
        grad_outputs(input.shape, dtypes[0]).items(),
        grad_outputs(weights.shape, dtypes[1]).values(),
        strict=True,
    )
    for (layout, grad_input), grad_weights in grads:
        leaves = [input.requires_grad_(), weights.requires_grad_()]
        outputs = moe_take_tokens(*leaves, sizes, group)
        for output, leaf in zip(outputs, leaves, strict=True):
            assert _same(output, leaf[own])
            storages = {tensor.untyped_storage().data_ptr() for tensor in (output, leaf)}
            assert len(storages) == 2 or leaf.numel() == 0
        found = torch.autograd.grad(outputs, leaves, [grad_input[own], grad_weights[own]])
        assert _same(found[0], grad_input), layout
        assert _same(found[1], grad_weights), layout


def _all_taken(group: Group, shared: bool) -> None:
    _C.set_shared_memory(shared)
    try:
        for kind, dtypes in product(SIZES, PAIRS):
            _taken(group, kind, dtypes)
    finally:
        _C.set_shared_memory(True)


@ALL_SIZES
def test_a_rank_takes_its_rows_and_holds_the_gradients_of_all(size):
    on_ranks(size, _all_taken, True)


def test_rows_travel_through_the_group_where_no_memory_is_shared():
    on_ranks(3, _all_taken, False)


def _joined_by(slice: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
    return gather_tokens(slice, sizes, group, partial_gradient=False)


def _single_numbers(group: Group) -> None:
    """A gradient of one element may have any strides and still count as contiguous."""
    sizes, number = [1] * group.size, torch.full((), 3.0)
    leaves = [torch.ones(group.size, 1, requires_grad=True) for _ in range(2)]
    outputs = moe_take_tokens(*leaves, sizes, group)
    for found in torch.autograd.grad(outputs, leaves, [number.expand(1, 1)] * 2):
        assert _same(found, torch.full((group.size, 1), 3.0))
    assert _same(_joined_by(number.expand(1, 1), sizes, group), found)


@pytest.mark.parametrize("size", [1, 2])
def test_single_numbers_of_any_strides_travel(size):
    on_ranks(size, _single_numbers)


# A layer on slices, against the same on all tokens. The gate sees all of them on every rank.

Take = Callable[..., tuple[torch.Tensor, torch.Tensor]]
BORDERS: dict[str, tuple[Take, Callable[..., torch.Tensor]]] = {
    "whole": (moe_take_tokens, _joined_by),
    "no exchange in backward": (
        lambda input, weights, sizes, group: (
            input[_own(sizes, group)],
            weights[_own(sizes, group)],
        ),
        _joined_by,
    ),
    "gradients summed in backward": (
        lambda input, weights, sizes, group: moe_take_tokens(
            copy_to_region(input, group), copy_to_region(weights, group), sizes, group
        ),
        _joined_by,
    ),
}


def _plain_layer(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows.tanh() * weights.square().sum(-1, keepdim=True)


def _layer_errors(group: Group, kind: str, borders: str) -> dict[str, float]:
    take, join = BORDERS[borders]
    sizes, input, _ = _tokens(kind, group, (FP64, FP64))
    gate, grad = torch.randn(TOP_K, HIDDEN, dtype=FP64), torch.randn(sum(sizes), HIDDEN, dtype=FP64)

    def answers(layer: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [input.detach().requires_grad_(), gate.detach().requires_grad_()]
        output = layer(leaves[0], (leaves[0] @ leaves[1].T).softmax(-1))
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    expected = answers(_plain_layer)
    actual = answers(
        lambda input, weights: join(_plain_layer(*take(input, weights, sizes, group)), sizes, group)
    )
    names = ("output", "gradient of the input", "gradient of the gate")
    return dict(zip(names, map(relative_error, actual, expected), strict=True))


@ALL_SIZES
@ALL_KINDS
def test_a_layer_on_slices_equals_one_on_all_tokens(kind, size):
    assert_within(on_ranks(size, _layer_errors, kind, "whole"))


@pytest.mark.parametrize("borders", [name for name in BORDERS if name != "whole"])
def test_the_comparison_notices_wrong_borders(borders):
    assert worst(on_ranks(2, _layer_errors, "unequal", borders))[0] > NOTICED


# What is sent.


def _sent(group: Group, kind: str, needed: tuple[int, int]) -> list[dict[str, int]]:
    sizes, input, weights = _tokens(kind, group, (BF16, FP32))
    leaves = [input.requires_grad_(needed[0] == 1), weights.requires_grad_(needed[1] == 1)]
    taken, forward = counted(lambda: moe_take_tokens(*leaves, sizes, group))
    assert [output.requires_grad for output in taken] == [bool(on) for on in needed]
    if not any(needed):
        return [forward, {}]
    loss = (2 * taken[0]).sum() + (3 * taken[1]).sum()
    _, backward = counted(loss.backward)
    for leaf, on, value in zip(leaves, needed, (2, 3), strict=True):
        assert _same(leaf.grad, torch.full_like(leaf, value)) if on else leaf.grad is None
    return [forward, backward]


@pytest.mark.parametrize("kind", ["equal", "unequal", "the first has none"])
@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_one_message_brings_the_gradients_that_are_needed(kind, needed):
    bytes_sent = max(SIZES[kind](3)) * (needed[0] * HIDDEN * 2 + needed[1] * TOP_K * 4)
    expected = {"all_gather": 1, "all_gather_bytes": bytes_sent, "in_shared_memory": 1}
    assert on_ranks(3, _sent, kind, needed) == [[{}, expected if any(needed) else {}]] * 3
    assert on_ranks(1, _sent, kind, needed) == [[{}, {}]]


def _one_output_used(group: Group, used: int) -> None:
    sizes, *leaves = _tokens("unequal", group, (BF16, FP32))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    (2 * moe_take_tokens(*leaves, sizes, group)[used]).sum().backward()
    assert _same(leaves[used].grad, torch.full_like(leaves[used], 2.0))
    assert leaves[1 - used].grad is None


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used_gives_no_gradient(used, size):
    on_ranks(size, _one_output_used, used)


def _under_autocast(group: Group) -> None:
    with torch.autocast("cpu", BF16):
        _taken(group, "unequal", (FP32, BF16))


def test_autocast_changes_no_dtype():
    on_ranks(2, _under_autocast)
