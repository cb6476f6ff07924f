"""Routing, dispatch and combine of a mixture of experts on one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_ops import (
    ALL_DTYPES,
    BOTH_PATHS,
    NOTICED,
    TOLERANCE,
    assert_refused,
    aten_path,
    data_bytes,
    doubles,
    grad_outputs,
    relative_error,
    threads,
    with_gradients,
)

from parallel_ext.ops import moe_combine, moe_dispatch, moe_route_plan

FP64 = torch.float64
# Tokens, choices, experts, hidden size.
SIZES = pytest.mark.parametrize(
    "sizes",
    [(0, 2, 3, 5), (1, 1, 1, 1), (7, 2, 3, 5), (50, 4, 8, 37), (9, 3, 2, 0), (4, 0, 2, 3)],
    ids=str,
)


def _choices(tokens: int, top_k: int, experts: int, kind: str = "random") -> torch.Tensor:
    if kind == "one takes all":
        return torch.full((tokens, top_k), experts - 1)
    if kind == "zipf":
        weights = 1 / torch.arange(1, experts + 1).double()
        ids = torch.multinomial(weights, max(1, tokens * top_k), replacement=True)
        return ids[: tokens * top_k].view(tokens, top_k)
    return torch.randint(0, experts, (tokens, top_k))


def _plain_plan(ids: torch.Tensor, experts: int) -> tuple[list[int], list[int], list[int]]:
    """Counts, slots and sources by Python's own stable sort."""
    flat = ids.flatten().tolist()
    sources = sorted(range(len(flat)), key=flat.__getitem__)
    slots = [0] * len(flat)
    for place, source in enumerate(sources):
        slots[source] = place
    return [flat.count(expert) for expert in range(experts)], slots, sources


@BOTH_PATHS
@given(data=st.data(), experts=st.integers(1, 9), top_k=st.integers(1, 4))
def test_the_plan_is_a_stable_sort(aten, data, experts, top_k):
    rows = st.lists(st.integers(0, experts - 1), min_size=top_k, max_size=top_k)
    ids = torch.tensor(data.draw(st.lists(rows, max_size=12)), dtype=torch.int64).view(-1, top_k)
    with aten_path(aten):
        counts, slots, sources = moe_route_plan(ids, experts)
    assert slots.shape == ids.shape
    assert (counts.tolist(), slots.flatten().tolist(), sources.tolist()) == _plain_plan(
        ids, experts
    )


@BOTH_PATHS
@pytest.mark.parametrize("experts", [1, 8, 513])
@pytest.mark.parametrize("kind", ["random", "zipf", "one takes all"])
def test_the_plan_of_many_tokens(kind, experts, aten):
    ids = _choices(3000, 2, experts, kind)
    with aten_path(aten):
        counts, slots, sources = moe_route_plan(ids.T.contiguous().T, experts)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts))
    assert torch.equal(sources, torch.sort(ids.flatten(), stable=True).indices)
    assert torch.equal(slots.flatten()[sources], torch.arange(6000))


def _expert_layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Dispatch, something for each expert that tells them apart, and combine: plain torch."""
    scaled = x.unsqueeze(1) * (ids.unsqueeze(-1) + 1).to(x.dtype)
    return (scaled.tanh() * weights.unsqueeze(-1)).sum(1)


def _our_layer(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    _, slots, sources = moe_route_plan(ids, 16)
    rows = moe_dispatch(x, slots)
    expert = ids.flatten()[sources].unsqueeze(-1)
    return moe_combine((rows * (expert + 1).to(x.dtype)).tanh(), slots, weights)


@BOTH_PATHS
@SIZES
@pytest.mark.parametrize("kind", ["random", "zipf", "one takes all"])
def test_dispatch_and_combine_equal_the_plain_layer(kind, sizes, aten):
    tokens, top_k, experts, hidden = sizes
    ids = _choices(tokens, top_k, experts, kind)
    tensors = [torch.randn(tokens, hidden, dtype=FP64), torch.rand(tokens, top_k, dtype=FP64)]
    for name, grad in grad_outputs((tokens, hidden), FP64).items():
        expected = with_gradients(lambda x, w: _expert_layer(x, w, ids), tensors, grad)
        with aten_path(aten):
            actual = with_gradients(lambda x, w: _our_layer(x, w, ids), tensors, grad)
        for ours, theirs in zip(actual, expected, strict=True):
            assert relative_error(ours, theirs) <= TOLERANCE[FP64], name


@BOTH_PATHS
@ALL_DTYPES
@pytest.mark.parametrize("weights_dtype", [None, torch.float32])
def test_combine_rounds_once(dtype, weights_dtype, aten):
    ids = _choices(40, 4, 6)
    slots = moe_route_plan(ids, 6).slots
    tensors = [torch.randn(160, 33).to(dtype), torch.rand(40, 4).to(weights_dtype or dtype)]
    grad = torch.randn(40, 33).to(dtype)

    def combine(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_combine(rows, slots, weights)

    expected = with_gradients(
        lambda rows, weights: (rows[slots.flatten()].view(40, 4, 33) * weights.unsqueeze(-1)).sum(
            1
        ),
        doubles(tensors),
        grad.double(),
    )
    with aten_path(aten):
        actual = with_gradients(combine, tensors, grad)
    assert [t.dtype for t in actual] == [dtype, dtype, weights_dtype or dtype]
    one_rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
    for ours, theirs in zip(actual, expected, strict=True):
        allowed = one_rounding.get(ours.dtype, TOLERANCE[ours.dtype])
        assert relative_error(ours, theirs) <= allowed


@BOTH_PATHS
def test_the_bits_depend_neither_on_threads_nor_on_the_run(aten):
    ids = _choices(900, 4, 6)
    tensors = [torch.randn(900, 70), torch.rand(900, 4)]
    grad = torch.randn(900, 70)
    found = set()
    for count in (1, 2, 3, 1):
        with threads(count), aten_path(aten):
            results = with_gradients(lambda x, w: _our_layer(x, w, ids), tensors, grad)
        found.add(b"".join(map(data_bytes, results)))
    assert len(found) == 1


def test_dispatch_leaves_no_row_uninitialised_and_reads_none():
    slots = moe_route_plan(_choices(30, 3, 5), 5).slots
    x = torch.arange(30.0).unsqueeze(1).expand(30, 8)
    rows = moe_dispatch(x, slots)
    assert torch.equal(rows[slots.flatten(), 0], torch.arange(30.0).repeat_interleave(3))
    poisoned = torch.full((30, 8), float("nan"))
    poisoned[7] = 1
    assert moe_dispatch(poisoned, slots).isfinite().all(1).sum() == 3


@pytest.mark.parametrize("top_k", [1, 3])
def test_dispatch_and_combine_pass_gradcheck(top_k):
    ids = _choices(5, top_k, 3)
    tensors = [
        torch.randn(5, 4, dtype=FP64, requires_grad=True),
        torch.rand(5, top_k, dtype=FP64, requires_grad=True),
    ]
    assert torch.autograd.gradcheck(lambda x, w: _our_layer(x, w, ids), tensors)


def test_the_comparison_notices_swapped_choices():
    ids = _choices(20, 2, 4)
    x, weights = torch.randn(20, 6, dtype=FP64), torch.rand(20, 2, dtype=FP64)
    slots = moe_route_plan(ids, 4).slots
    expected = (x.unsqueeze(1).expand(20, 2, 6) * weights.unsqueeze(-1)).sum(1)
    rows = moe_dispatch(x, slots)
    assert relative_error(moe_combine(rows, slots, weights), expected) <= TOLERANCE[FP64]
    wrong = moe_combine(rows, slots.roll(1, 0), weights)
    assert relative_error(wrong, expected) > NOTICED


@pytest.mark.parametrize("frozen", ["rows", "weights"])
def test_what_is_frozen_gets_no_gradient_and_changes_nothing(frozen):
    slots = moe_route_plan(_choices(6, 2, 3), 3).slots
    tensors = {"rows": torch.randn(12, 4), "weights": torch.rand(6, 2)}
    both = with_gradients(
        lambda r, w: moe_combine(r, slots, w), list(tensors.values()), torch.ones(6, 4)
    )[1:]
    for name, tensor in tensors.items():
        tensor.requires_grad_(name != frozen)
    moe_combine(tensors["rows"], slots, tensors["weights"]).sum().backward()
    for gradient, (name, tensor) in zip(both, tensors.items(), strict=True):
        assert tensor.grad is None if name == frozen else torch.equal(tensor.grad, gradient)


def test_a_second_derivative_is_right_or_refused():
    slots = moe_route_plan(_choices(4, 2, 3), 3).slots
    x = torch.randn(4, 3, dtype=FP64, requires_grad=True)
    (first,) = torch.autograd.grad(moe_dispatch(x, slots).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert relative_error(second, 2 * 6 * x) <= TOLERANCE[FP64]
    weights = torch.rand(4, 2, dtype=FP64, requires_grad=True)
    output = moe_combine(moe_dispatch(x, slots), slots, weights)
    with pytest.raises(NotImplementedError, match="moe_combine: second derivatives"):
        torch.autograd.grad(output.pow(2).sum(), weights, create_graph=True)


SLOTS = torch.tensor([[0, 1], [2, 3]])
REFUSALS = {
    "an expert too many": (
        lambda group: moe_route_plan(torch.tensor([[0, 1], [1, 4]]), 4),
        "IndexError",
        "moe_route_plan: choice 1 of token 1 is expert 4, outside of [0, 4)",
    ),
    "a negative expert": (
        lambda group: moe_route_plan(torch.tensor([[-1, 1]]), 4),
        "IndexError",
        "moe_route_plan: choice 0 of token 0 is expert -1, outside of [0, 4)",
    ),
    "no experts": (
        lambda group: moe_route_plan(torch.zeros(0, 1, dtype=torch.int64), 0),
        "ValueError",
        "moe_route_plan: num_experts must be at least 1, got 0",
    ),
    "ids of another type": (
        lambda group: moe_route_plan(torch.zeros(2, 1, dtype=torch.int32), 4),
        "TypeError",
        "moe_route_plan: expert_ids must be int64 (Long), got Int",
    ),
    "a slot twice": (
        lambda group: moe_dispatch(torch.ones(2, 3), torch.tensor([[0, 1], [1, 3]])),
        "IndexError",
        "moe_dispatch: slot 1 of token 1 is taken already or outside of [0, 4)",
    ),
    "a slot too far": (
        lambda group: moe_combine(torch.ones(4, 3), torch.tensor([[0, 1], [2, 4]])),
        "IndexError",
        "moe_combine: slot 4 of token 1 is taken already or outside of [0, 4)",
    ),
    "slots of other tokens": (
        lambda group: moe_dispatch(torch.ones(3, 3), SLOTS),
        "ValueError",
        "moe_dispatch: slots of shape [2, 2] are not for the 3 tokens of the input",
    ),
    "rows of other slots": (
        lambda group: moe_combine(torch.ones(3, 3), SLOTS),
        "ValueError",
        "moe_combine: 3 rows do not fit the 4 slots",
    ),
    "weights of another shape": (
        lambda group: moe_combine(torch.ones(4, 3), SLOTS, torch.ones(4)),
        "ValueError",
        "moe_combine: weights of shape [4] do not fit slots of shape [2, 2]",
    ),
    "whole numbers": (
        lambda group: moe_dispatch(torch.ones(2, 3, dtype=torch.int64), SLOTS),
        "TypeError",
        "moe_dispatch: input must be floating point, got Long",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case):
    assert_refused(__name__, case)
