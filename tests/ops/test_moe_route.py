"""Where the choices of a router go: the plan of a rank's slots and of the rows in its messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_ops import BOTH_PATHS, aten_path

from parallel_ext.ops import RoutePlan, moe_route_plan

ROW_NUMBER_BYTES = 4


def plain_plan(
    ids: torch.Tensor, experts_per_rank: list[int], row_bytes: int, rank: int
) -> RoutePlan:
    """The plan by Python's own stable sort and by dictionaries."""
    flat, top_k = ids.flatten().tolist(), ids.size(1)
    sources = sorted(range(len(flat)), key=flat.__getitem__)
    rank_of = [peer for peer, own in enumerate(experts_per_rank) for _ in range(own)]
    rows, tokens, per_rank = {}, [], []
    for peer in range(len(experts_per_rank)):
        block = [source for source in sources if rank_of[flat[source]] == peer]
        distinct = {source // top_k for source in block}
        saved = (len(block) - len(distinct)) * row_bytes
        once = peer != rank and saved > len(block) * ROW_NUMBER_BYTES
        seen: dict[int, int] = {}
        first = len(tokens)
        for source in block:
            token = source // top_k
            if not once or token not in seen:
                seen[token] = len(tokens)
                tokens.append(token)
            rows[source] = seen[token]
        per_rank.append(len(tokens) - first)
    tokens += [0] * (len(flat) - len(tokens))
    counts = [flat.count(expert) for expert in range(len(rank_of))]
    of_choices = torch.tensor([rows[i] for i in range(len(flat))], dtype=torch.int64)
    numbers = (torch.tensor(each, dtype=torch.int64) for each in (counts, per_rank))
    lists = (torch.tensor(each, dtype=torch.int64) for each in (sources, tokens))
    return RoutePlan(*numbers, of_choices.view(ids.shape), *lists)


@BOTH_PATHS
@given(data=st.data(), experts_per_rank=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_the_plan_is_a_stable_sort_and_sends_tokens_once(aten, data, experts_per_rank):
    top_k = data.draw(st.integers(1, 4))
    choice = st.integers(0, sum(experts_per_rank) - 1)
    rows = st.lists(choice, min_size=top_k, max_size=top_k)
    ids = torch.tensor(data.draw(st.lists(rows, max_size=9)), dtype=torch.int64).view(-1, top_k)
    row_bytes = data.draw(st.sampled_from([0, 7, 8, 9, 4096]))
    rank = data.draw(st.integers(0, len(experts_per_rank) - 1))
    with aten_path(aten):
        plan = moe_route_plan(ids, experts_per_rank, row_bytes, rank)
    for name, ours, theirs in zip(
        RoutePlan._fields,
        plan,
        plain_plan(ids, experts_per_rank, row_bytes, rank),
        strict=True,
    ):
        assert torch.equal(ours, theirs), name


@BOTH_PATHS
@pytest.mark.parametrize("experts", [2, 8, 513])
@pytest.mark.parametrize("kind", ["random", "zipf", "one takes all"])
def test_the_plan_of_many_tokens(kind, experts, aten):
    generator = torch.Generator().manual_seed(0)
    odds = torch.ones(experts) if kind == "random" else 1 / torch.arange(1, experts + 1)
    ids = torch.multinomial(odds, 6000, replacement=True, generator=generator).view(3000, 2)
    if kind == "one takes all":
        ids = torch.full_like(ids, experts - 1)
    with aten_path(aten):
        plan = moe_route_plan(ids.T.contiguous().T, [1, experts - 1], 4096, 0)
    assert torch.equal(plan.counts, torch.bincount(ids.flatten(), minlength=experts))
    assert torch.equal(plan.sources, torch.sort(ids.flatten(), stable=True).indices)
    own, sent = (ids == 0).sum().item(), (ids > 0).any(1).sum().item()
    assert plan.rows_per_rank.tolist() == [own, sent]
    of_choices = plan.tokens[plan.rows_of_choices]
    assert torch.equal(of_choices, torch.arange(3000).unsqueeze(1).expand(3000, 2))


@pytest.mark.parametrize(
    ("row_bytes", "sent"), [(8, 2), (9, 1), (4096, 1)], ids=["as much", "less", "much less"]
)
def test_a_token_is_sent_once_only_where_that_saves_bytes(row_bytes, sent):
    """Two choices of a token cost a row more, or two numbers of 4 bytes."""
    plan = moe_route_plan(torch.tensor([[1, 2]]), [1, 2], row_bytes, 0)
    assert plan.rows_per_rank.tolist() == [0, sent]
    at_home = moe_route_plan(torch.tensor([[1, 2]]), [1, 2], row_bytes, 1)
    assert at_home.rows_per_rank.tolist() == [0, 2]


@BOTH_PATHS
def test_the_tensors_of_a_plan_without_choices_are_different_ones(aten):
    with aten_path(aten):
        plan = moe_route_plan(torch.zeros(3, 0, dtype=torch.int64), [5], 4096, 0)
    assert plan.sources is not plan.tokens
