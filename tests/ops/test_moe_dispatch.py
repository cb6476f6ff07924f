"""Experts sharded over ranks: tokens go there, and what they made of them comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    BOTH_PATHS,
    assert_refused,
    aten_path,
    counted,
    on_ranks,
    relative_error,
    sizes_of,
)

from parallel_ext import _C
from parallel_ext.ops import (
    ExchangePlan,
    Group,
    RoutePlan,
    moe_combine,
    moe_dispatch,
    moe_route_plan,
)
from parallel_ext.sharding.layout import split

FP64 = torch.float64
TOP_K = 2


def _ids(kind: str, ranks: int, experts: int) -> list[torch.Tensor]:
    """The choices of every rank's tokens."""
    generator = torch.Generator().manual_seed(13)
    found = []
    for rank in range(ranks):
        count = {"no tokens": 0, "a rank without tokens": 5 * (rank > 0)}.get(kind, 9 + 3 * rank)
        ids = torch.randint(0, experts, (count, TOP_K), generator=generator)
        found.append(torch.full_like(ids, experts - 1) if kind == "one takes all" else ids)
    return found


ID_KINDS = ["usual", "one takes all", "a rank without tokens", "no tokens"]


def _planned(
    ids: list[torch.Tensor], experts: int, row_bytes: int, group: Group
) -> tuple[RoutePlan, ExchangePlan]:
    """Both plans of this rank; those of the others are computed here too."""
    experts_per_rank = sizes_of(experts, group)
    routes = [
        moe_route_plan(own, experts_per_rank, row_bytes, rank) for rank, own in enumerate(ids)
    ]
    messages = [[*route.counts.tolist(), *route.rows_per_rank.tolist()] for route in routes]
    return routes[group.rank], ExchangePlan.of(messages, experts_per_rank, group.rank)


def _labels(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [rank, token, 1, 1], which say where they come from."""
    rows = [[rank, token, 1, 1] for token in range(count)]
    return torch.tensor(rows, dtype=dtype).view(count, 4)


def _brought(group: Group, kind: str, experts: int, dtype: torch.dtype, row_bytes: int) -> int:
    """Rows go to their experts, and back; returns how many were sent to other ranks."""
    ids = _ids(kind, group.size, experts)
    route, plan = _planned(ids, experts, row_bytes, group)
    # Small whole numbers and powers of two, which every dtype adds without rounding.
    weights = [2.0 ** -torch.arange(own.numel()).remainder(3).view(own.shape) for own in ids]
    own_ids, own_weights = ids[group.rank], weights[group.rank].clone().requires_grad_()
    tokens = _labels(group.rank, len(own_ids), dtype).requires_grad_()
    rows, row_weights, origins = moe_dispatch(tokens, own_weights, route, plan, group)
    start, stop = split(experts, group.size)[group.rank]
    expected = [
        (rank, token, expert, weights[rank][token, choice].item())
        for expert in range(start, stop)
        for rank, of_rank in enumerate(ids)
        for token, chosen in enumerate(of_rank.tolist())
        for choice, one in enumerate(chosen)
        if one == expert
    ]
    assert rows.tolist() == [[rank, token, 1, 1] for rank, token, _, _ in expected]
    assert row_weights.tolist() == [weight for *_, weight in expected]
    assert sum(plan.rows_per_expert(group.rank)) == len(expected)
    # Each expert multiplies its rows by its weight and its number.
    factors = torch.tensor([expert + 1 for _, _, expert, _ in expected]).view(-1, 1)
    output = moe_combine(
        rows * (row_weights.unsqueeze(1) * factors).to(dtype), origins, route, plan, group
    )
    total = (weights[group.rank] * (own_ids + 1)).sum(1, keepdim=True)
    assert torch.equal(output, tokens * total.to(dtype))
    output.backward(torch.ones_like(output))
    assert torch.equal(tokens.grad, total.to(dtype).expand(len(own_ids), 4))
    of_rows = tokens.detach().float().sum(1, keepdim=True)
    assert torch.equal(own_weights.grad, of_rows * (own_ids + 1))
    return sum(count for peer, count in enumerate(route.rows_per_rank) if peer != group.rank)


@BOTH_PATHS
@ALL_SIZES
@pytest.mark.parametrize("kind", ID_KINDS)
def test_rows_reach_their_experts_and_return(kind, size, aten):
    on_ranks(size, _brought, kind, 5, torch.float32, 4096, aten=aten)


@BOTH_PATHS
@ALL_DTYPES
def test_rows_of_every_type_travel_as_they_are(dtype, aten):
    on_ranks(2, _brought, "usual", 5, dtype, 4096, aten=aten)


@BOTH_PATHS
def test_tokens_are_sent_once_or_for_each_choice_with_the_same_results(aten):
    once = on_ranks(2, _brought, "usual", 5, torch.float32, 4096, aten=aten)
    for_each = on_ranks(2, _brought, "usual", 5, torch.float32, 0, aten=aten)
    assert all(few < many for few, many in zip(once, for_each, strict=True))


def _through_the_group(group: Group) -> None:
    _C.set_shared_memory(False)
    try:
        for row_bytes in (0, 4096):
            _brought(group, "usual", 5, torch.float32, row_bytes)
    finally:
        _C.set_shared_memory(True)


def test_rows_travel_through_the_group_where_no_memory_is_shared():
    on_ranks(3, _through_the_group)


HIDDEN_OF_BYTES, WEIGHT_BYTES, NUMBER_BYTES = 7, 4, 4


def _bytes_sent(group: Group, row_bytes: int) -> list[dict[str, int]]:
    ids = _ids("usual", group.size, 5)
    route, plan = _planned(ids, 5, row_bytes, group)
    tokens = torch.ones(len(ids[group.rank]), HIDDEN_OF_BYTES, requires_grad=True)
    weights = torch.ones(ids[group.rank].shape, requires_grad=True)
    found = []

    def step(function: Callable[[], Any]) -> Any:
        result, counts = counted(function)
        found.append(counts)
        return result

    rows, row_weights, origins = step(lambda: moe_dispatch(tokens, weights, route, plan, group))
    output = step(lambda: moe_combine(rows, origins, route, plan, group))
    (grad_rows,) = step(lambda: torch.autograd.grad(output.sum(), rows))
    step(lambda: torch.autograd.backward([rows, row_weights], [grad_rows, row_weights.detach()]))
    return found


@BOTH_PATHS
@pytest.mark.parametrize("row_bytes", [0, 4096])
def test_what_is_sent_is_the_least(row_bytes, aten):
    """By hand: the rows that other ranks need, each choice's weight, and its number if needed."""
    ids, kind = _ids("usual", 2, 5), "all_to_all" if aten else "swap"
    ranges = split(5, 2)
    # Of rank r: choices of the other's experts, and tokens that want any of them.
    remote = [((own >= ranges[1 - r][0]) & (own < ranges[1 - r][1])) for r, own in enumerate(ids)]
    choices = [each.sum().item() for each in remote]
    tokens = [each.any(1).sum().item() for each in remote]
    assert all(few < many for few, many in zip(tokens, choices, strict=True))
    rows, number = (tokens, NUMBER_BYTES) if row_bytes else (choices, 0)
    row = HIDDEN_OF_BYTES * 4
    for rank, steps in enumerate(on_ranks(2, _bytes_sent, row_bytes, aten=aten)):
        other = 1 - rank
        there = rows[rank] * row + choices[rank] * (WEIGHT_BYTES + number)
        expected = [
            there,  # tokens and weights
            rows[other] * row,  # results
            rows[rank] * row,  # gradients of the results
            rows[other] * row + choices[other] * WEIGHT_BYTES,  # of tokens and weights
        ]
        assert [counts[f"{kind}_bytes"] for counts in steps] == expected
        assert [counts[kind] for counts in steps] == [1, 1, 1, 1]


@BOTH_PATHS
def test_sums_round_once_on_each_rank(aten):
    ids = torch.tensor([[0, 1, 2, 3]] * 9)
    route = moe_route_plan(ids, [4], 0, 0)
    plan = ExchangePlan.of([[9, 9, 9, 9, 36]], [4], 0)
    with aten_path(aten):
        rows, _, origins = moe_dispatch(torch.zeros(9, 33), torch.ones(9, 4), route, plan)
        values = torch.randn_like(rows).bfloat16()
        sums = moe_combine(values, origins, route, plan)
    expected = values.float().view(4, 9, 33).sum(0)
    assert relative_error(sums, expected) <= 2**-8
    assert sums.dtype == torch.bfloat16


ROUTE = moe_route_plan(torch.tensor([[0, 2], [1, 2], [0, 3]]), [2, 2], 0, 0)
PLAN = ExchangePlan([2, 1, 2, 1, 3, 3], [2, 1, 3, 2, 1, 3], [2, 2])


def _dispatched(group: Group, **numbers: Any) -> Any:
    plan = PLAN._replace(**numbers)
    return moe_dispatch(torch.ones(3, 2), torch.ones(3, 2), ROUTE, plan, group)


def _combined(group: Group, origins: torch.Tensor) -> Any:
    return moe_combine(torch.ones(6, 2), origins, ROUTE, PLAN, group)


REFUSALS = {
    "experts of another group": (
        lambda group: _dispatched(group, experts_per_rank=[4]),
        "ValueError: moe_dispatch: experts_per_rank [4] and rank",
    ),
    "more rows than choices": (
        lambda group: _dispatched(
            group, receive=[2, 1, 4, 2, 1, 3] if group.rank else [2, 1, 3, 2, 1, 4]
        ),
        "ValueError: sends 4 for 3; there cannot be more rows than choices",
    ),
    "rows to itself that do not come": (
        lambda group: _dispatched(group, receive=[1, 2, 3, 1, 2, 3]),
        "ValueError: sends itself [2, 1] in 3 rows, but receives [1, 2] in 3",
    ),
    "origins of other rows": (
        lambda group: _combined(group, origins=torch.arange(1, 7)),
        "IndexError: moe_combine: origins has 1 at 0 where rank 0 has sent [0, 3)",
    ),
    "origins that leave out rows": (
        lambda group: _combined(group, origins=torch.zeros(6, dtype=torch.int64)),
        "IndexError: moe_combine: origins",
    ),
    "origins of the other rank": (
        lambda group: _combined(group, origins=torch.full((6,), 5)),
        "IndexError: moe_combine: origins has 5 at",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case):
    assert_refused(__name__, case)
