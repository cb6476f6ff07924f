"""The factors of PEFT's adapters: each rank holds its shard of values that no layout changes.

``nn/lora.py`` says how the factors of a linear layer are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import xxhash
from torch import nn

from parallel_ext.nn.initial_values import draw
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import TensorLayout

_seed: ContextVar[int | None] = ContextVar("seed of adapters", default=None)


class EmbeddingFactors(ShardedModule, nn.ParameterDict):
    """One factor of an embedding for each adapter, in the place where PEFT keeps them."""

    def __init__(self, group: Group) -> None:
        super().__init__({}, group)

    def add(self, adapter: str, layout: TensorLayout) -> None:
        """Add a factor of zeros for an adapter: this rank's shard by ``layout``."""
        self.layouts[adapter] = layout
        self[adapter] = nn.Parameter(torch.zeros(layout.local_shape(self.group.rank)))

    def __delitem__(self, adapter: str) -> None:
        super().__delitem__(adapter)
        del self.layouts[adapter]


@contextmanager
def seeded_by(seed: int) -> Iterator[None]:
    """Let new adapters draw from ``seed``, on which the ranks agreed, inside the context."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def key_of(name: str) -> int:
    """Return 63 bits that seed the random numbers of ``name``, by the seed in force."""
    seed = torch.initial_seed() if _seed.get() is None else _seed.get()
    return xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1


def draw_by_name(
    parameter: nn.Parameter, layout: TensorLayout, rank: int, spread: tuple[str, float]
) -> None:
    """Fill a shard with its part of random numbers that depend on seed and name alone.

    Args:
        parameter: the shard of ``rank``.
        layout: its layout, whose name counts.
        rank: in the group that the parameter is sharded over.
        spread: ("uniform", bound) or ("normal", standard deviation).
    """
    generator = torch.Generator().manual_seed(key_of(layout.name))
    distribution, size = spread
    if distribution == "uniform":
        init = partial(nn.init.uniform_, a=-size, b=size, generator=generator)
    else:
        init = partial(nn.init.normal_, std=size, generator=generator)
    draw(parameter, layout, rank, init)
