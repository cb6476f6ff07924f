"""Random numbers of adapters, which depend on a seed and a name alone, and so on no layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import xxhash
from torch import nn

from parallel_ext.nn.initial_values import draw
from parallel_ext.sharding.layout import TensorLayout

_seed: ContextVar[int | None] = ContextVar("seed of adapters", default=None)


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

    The name is that of ``layout``; ``rank`` is the one in the group that the parameter is sharded
    over; ``spread`` is ("uniform", bound) or ("normal", standard deviation).
    """
    generator = torch.Generator().manual_seed(key_of(layout.name))
    distribution, size = spread

    # Not by torch.nn.init, which asks all parallel models whether it fills a shard of theirs.
    def init(block: torch.Tensor) -> None:
        if distribution == "uniform":
            block.uniform_(-size, size, generator=generator)
        else:
            block.normal_(std=size, generator=generator)

    draw(parameter, layout, rank, init)
