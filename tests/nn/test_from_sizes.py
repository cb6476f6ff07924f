"""Modules of parallel_ext.nn built from sizes: the initial values of the plain modules, sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ext import ops
from parallel_ext.nn import (
    ColumnParallelLinear,
    ExpertParallelExperts,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.sharding.slices import take


def _plain_experts(
    num_experts: int, hidden: int, inner: int, std: float = 0.02, **options: Any
) -> nn.Module:
    """HuggingFace's experts, initialised as its ``_init_weights`` does."""
    plain = nn.Module()
    plain.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden, **options))
    plain.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner, **options))
    nn.init.normal_(plain.gate_up_proj, 0.0, std)
    nn.init.normal_(plain.down_proj, 0.0, std)
    return plain


CASES: dict[str, tuple[Any, Any, tuple[int, ...], dict[str, Any]]] = {
    "column": (nn.Linear, ColumnParallelLinear, (13, 101), {}),
    "column without bias": (nn.Linear, ColumnParallelLinear, (7, 127), {"bias": False}),
    "column of many blocks": (nn.Linear, ColumnParallelLinear, (1301, 2503), {}),
    "column of fewer features than ranks": (nn.Linear, ColumnParallelLinear, (5, 1), {}),
    "row": (nn.Linear, RowParallelLinear, (127, 13), {}),
    "row of many blocks": (nn.Linear, RowParallelLinear, (1301, 2503), {}),
    "embedding": (nn.Embedding, VocabParallelEmbedding, (101, 7), {"padding_idx": -3}),
    "embedding of many blocks": (nn.Embedding, VocabParallelEmbedding, (4099, 701), {}),
    "small embedding": (nn.Embedding, VocabParallelEmbedding, (7, 2), {"padding_idx": 0}),
    "head": (nn.Linear, VocabParallelHead, (13, 127), {}),
    "experts": (_plain_experts, ExpertParallelExperts, (5, 13, 7), {"std": 0.3}),
    "experts of many blocks": (_plain_experts, ExpertParallelExperts, (3, 701, 509), {}),
}


def _after(seed: int, build: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """Build a module after seeding; also returns the state of the generator then."""
    torch.manual_seed(seed)
    return build(), torch.get_rng_state()


def _equal(case: str, dtype: torch.dtype, other_rank: bool) -> list[bool]:
    plain_class, own_class, sizes, options = CASES[case]
    group = dist.group.WORLD
    plain, expected_state = _after(9, lambda: plain_class(*sizes, dtype=dtype, **options))
    own, state = _after(9, lambda: own_class.from_sizes(*sizes, group, dtype=dtype, **options))
    rank = (group.rank() + other_rank) % group.size()
    equal = [torch.equal(state, expected_state)]
    for name, parameter in own.named_parameters():
        full = plain.get_parameter(name).detach()
        expected = take(full, own.layouts[name], rank) if name in own.layouts else full
        equal.append(torch.equal(parameter, expected) and parameter.requires_grad)
    assert own.state_dict().keys() == {name for name, _ in plain.named_parameters()}
    return equal


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_plain_module(case: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for ranks, dtype in [*((3, dtype) for dtype in dtypes), (1, torch.float32)]:
        for equal in pool(ranks).run(_equal, case, dtype, False):
            assert all(equal)


def test_another_ranks_values_are_noticed() -> None:
    for equal in pool(2).run(_equal, "row of many blocks", torch.float32, True):
        assert equal == [True, False, True]  # generator, weight, replicated bias


def _draws(case: str) -> int:
    """The most elements that one draw has filled."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            draws = func.overloadpacket in (torch.ops.aten.uniform_, torch.ops.aten.normal_)
            if draws and not args[0].is_meta:
                largest = max(largest, args[0].numel())
            return func(*args, **(kwargs or {}))

    _, own_class, sizes, options = CASES[case]
    with Watch():
        own_class.from_sizes(*sizes, dist.group.WORLD, **options)
    return largest


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("many blocks")])
def test_no_rank_draws_a_large_tensor_at_once_on_the_cpu(case: str) -> None:
    for largest in pool(2).run(_draws, case):
        assert 2**19 < largest <= 2**21  # a block, or two at the end


@pytest.mark.parametrize("case", ["row", "embedding", "experts"])
def test_nothing_is_drawn_on_the_meta_device(case: str) -> None:
    _, own_class, sizes, options = CASES[case]
    before = torch.get_rng_state()
    module: ShardedModule = own_class.from_sizes(*sizes, ops.ALONE, device="meta", **options)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
