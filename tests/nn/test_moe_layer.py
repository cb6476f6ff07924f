"""Experts sharded over ranks: the whole layer against HuggingFace's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_ops import (
    BOTH_PATHS,
    NOTICED,
    assert_within,
    counted_both_ways,
    data_bytes,
    on_ranks,
    relative_error,
    worst,
)
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import shard_along, split
from parallel_ext.sharding.slices import take

FP64 = torch.float64
HIDDEN, INNER, TOP_K = 6, 5, 2

# The layer, against HuggingFace's on all tokens in one process.


def _tokens(kind: str, ranks: int, experts: int, rank: int, top_k: int) -> tuple[Any, ...]:
    """Hidden states, choices and weights of one rank's tokens."""
    generator = torch.Generator().manual_seed(100 + rank)
    count = {"a rank without tokens": 0 if rank == 0 else 6, "one token": 1}.get(kind, 4 + 3 * rank)
    ids = torch.stack(
        [torch.randperm(experts, generator=generator)[:top_k] for _ in range(count)]
        or [torch.zeros(top_k, dtype=torch.int64)]
    )[:count]
    if kind == "idle expert":
        ids = ids.clamp(max=max(0, experts - 2))
    elif kind == "one takes all":
        ids = torch.full_like(ids, experts - 1)
    elif kind == "idle rank":
        ids = ids.clamp(max=split(experts, ranks)[0][1] - 1)
    weights = torch.rand(count, top_k, generator=generator, dtype=FP64)
    return torch.randn(count, HIDDEN, generator=generator, dtype=FP64), ids, weights


def _whole_experts(experts: int) -> MixtralExperts:
    torch.manual_seed(3)
    config = MixtralConfig(
        num_local_experts=experts, hidden_size=HIDDEN, intermediate_size=INNER, hidden_act="silu"
    )
    module = MixtralExperts(config).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _own_experts(whole: MixtralExperts, group: Group, swapped: bool) -> ExpertParallelExperts:
    ranges = split(whole.num_experts, group.size)
    layouts = {
        name: shard_along(name, tuple(parameter.shape), 0, ranges)
        for name, parameter in whole.named_parameters()
    }
    held = group.size - 1 - group.rank if swapped else group.rank
    shards = {
        name: nn.Parameter(take(parameter.data, layouts[name], held))
        for name, parameter in whole.named_parameters()
    }
    return ExpertParallelExperts(
        shards["gate_up_proj"], shards["down_proj"], layouts, whole.act_fn, group
    )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _layer_errors(
    group: Group, kind: str, experts: int, top_k: int = TOP_K, swapped: bool = False
) -> dict[str, float]:
    """This rank's outputs and gradients, in two steps, against the whole layer's on all tokens."""
    whole = _whole_experts(experts)
    ours = _own_experts(whole, group, swapped)
    tokens = [_tokens(kind, group.size, experts, rank, top_k) for rank in range(group.size)]
    errors = {}
    for step in range(2):  # the second would see what the first left behind
        x, ids, weights = tokens[group.rank]
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        output = ours(x, ids, weights)
        (output * (step + 1)).sin().sum().backward()
        # One process, all tokens.
        all_x = torch.cat([t[0] for t in tokens]).requires_grad_()
        all_weights = torch.cat([t[2] for t in tokens]).requires_grad_()
        expected = whole(all_x, torch.cat([t[1] for t in tokens]), all_weights)
        if expected.requires_grad:  # HuggingFace's own skips all experts where no token is
            (expected * (step + 1)).sin().sum().backward()
        first = sum(len(t[0]) for t in tokens[: group.rank])
        mine = slice(first, first + len(x))
        errors |= {
            f"step {step}: output": relative_error(output, expected, mine),
            f"step {step}: input": relative_error(x.grad, _gradient(all_x), mine),
            f"step {step}: weights": relative_error(weights.grad, _gradient(all_weights), mine),
        }
        for name, parameter in whole.named_parameters():
            gradient = _gradient(parameter)
            own = getattr(ours, name).grad
            errors[f"step {step}: {name}"] = relative_error(
                own, gradient, slice(*split(experts, group.size)[group.rank])
            )
    return errors


KINDS = ["usual", "idle expert", "one takes all", "idle rank", "a rank without tokens", "one token"]


@BOTH_PATHS
@pytest.mark.parametrize(
    ("kind", "size", "experts"),
    [
        *(("usual", size, experts) for size, experts in [(1, 4), (2, 5), (4, 5), (3, 2)]),
        *((kind, 3, 8) for kind in KINDS),
        *(("idle expert", 1, 4), ("one token", 4, 5)),
    ],
)
def test_experts_on_ranks_equal_those_of_one_process(kind, size, experts, aten):
    assert_within(on_ranks(size, _layer_errors, kind, experts, aten=aten))


@pytest.mark.parametrize("top_k", [1, 4])
def test_other_numbers_of_choices(top_k):
    assert_within(on_ranks(2, _layer_errors, "usual", 5, top_k))


def test_the_comparison_notices_swapped_experts():
    found = on_ranks(2, _layer_errors, "usual", 4, TOP_K, True)
    assert worst(found)[0] > NOTICED


def _counted(group: Group) -> tuple[dict[str, int], dict[str, int]]:
    ours = _own_experts(_whole_experts(5), group, False)
    x, ids, weights = _tokens("usual", group.size, 5, group.rank, TOP_K)
    return counted_both_ways(lambda: ours(x.requires_grad_(), ids, weights))


def test_a_layer_exchanges_counts_once_and_rows_twice_each_way():
    for forward, backward in on_ranks(2, _counted):
        assert (forward["all_gather"], forward["swap"]) == (1, 2)
        assert forward["all_gather_bytes"] == (8 + 5 + 2) * 8  # what must agree, choices, rows
        assert backward["swap"] == 2
        assert "all_gather" not in backward


def _bits(group: Group) -> bytes:
    ours = _own_experts(_whole_experts(5), group, False)
    x, ids, weights = _tokens("usual", group.size, 5, group.rank, TOP_K)
    output = ours(x, ids, weights)
    output.sum().backward()
    return data_bytes(output) + data_bytes(ours.gate_up_proj.grad)


def test_the_bits_are_the_same_in_every_run():
    assert on_ranks(2, _bits) == on_ranks(2, _bits)
