"""The factors of an adapter: each rank holds its part of them, drawn alike for every tp."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from parallel_ext import ops
from parallel_ext.layout import TensorLayout
from parallel_ext.ops import Group
from parallel_ext.sharded import ShardedModule, take


class Factor(ShardedModule):
    """One factor of a linear adapter: a weight [out, in], and perhaps a bias [out]; zeros at first.

    Args:
        weight: layout of the weight.
        bias: layout of the bias, or None.
        group: the tensor-parallel group.
    """

    def __init__(self, weight: TensorLayout, bias: TensorLayout | None, group: Group) -> None:
        super().__init__({"weight": weight} | ({"bias": bias} if bias else {}), group)
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(torch.zeros(weight.local_shape(group.rank)))
        self.bias = nn.Parameter(torch.zeros(bias.local_shape(group.rank))) if bias else None


class EmbeddingFactors(ShardedModule, nn.ParameterDict):
    """One factor of an embedding for each adapter, in the place where PEFT keeps them."""

    def __init__(self, group: Group) -> None:
        super().__init__({}, group)

    def add(self, adapter: str, layout: TensorLayout) -> None:
        """A factor of zeros."""
        self.layouts[adapter] = layout
        self[adapter] = nn.Parameter(torch.zeros(layout.local_shape(self.group.rank)))


def common_seed() -> int:
    """Rank 0's seed, so that the ranks need not be seeded alike."""
    seed = torch.tensor([[torch.initial_seed() & (2**62 - 1)]])
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return int(seed)
    everyone = Group.of(dist.group.WORLD)
    if "nccl" in str(dist.get_backend()):
        seed = seed.cuda()
    return int(ops.gather_from_tp(seed, [1] * everyone.size, everyone)[0, 0])


def key_of(seed: int, name: str) -> int:
    """63 bits for the random numbers of what is called ``name``."""
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1


@torch.no_grad()
def draw(
    parameter: nn.Parameter, layout: TensorLayout, rank: int, seed: int, spread: tuple[str, float]
) -> None:
    """Fill a shard with its part of random numbers that depend on seed and name alone.

    Args:
        parameter: the shard of ``rank``.
        layout: its layout, whose name counts.
        rank: tp rank.
        seed: the same on all ranks.
        spread: ("uniform", bound) or ("normal", standard deviation).
    """
    generator = torch.Generator().manual_seed(key_of(seed, layout.name))
    full, (distribution, size) = torch.empty(layout.shape), spread
    if distribution == "uniform":
        full.uniform_(-size, size, generator=generator)
    else:
        full.normal_(0.0, size, generator=generator)
    parameter.copy_(take(full, layout, rank))
