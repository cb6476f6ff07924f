"""Initial values of shards: this rank's part of what one process would draw for a whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.slices import shard_views

Init = Callable[[torch.Tensor], object]
"""Fills a tensor in place with random numbers, such as ``torch.nn.init.normal_``."""

Module = TypeVar("Module", bound=ShardedModule)

_ELEMENTS = 2**20  # drawn at once on the CPU
_ROWS = 16  # torch's normal_ draws 16 numbers at a time, so blocks begin at multiples of 16


@torch.no_grad()
def draw(shard: torch.Tensor, layout: TensorLayout, rank: int, init: Init) -> None:
    """Fill a shard with the part of a rank of what ``init`` draws for the full tensor.

    Every rank draws all of it, so that all generators advance as in a single process. On the CPU
    this takes memory for blocks of 4 MiB in fp32 (or of 16 rows, if that is more), since a
    generator there yields one number after the other. On a GPU numbers depend on the whole tensor,
    of which one copy is made for the time of the call.

    Args:
        shard: what ``rank`` holds by ``layout``; on the meta device nothing is drawn.
        layout: sharded along the first or the last dimension, or replicated.
        rank: in the group that the tensor is sharded over.
        init: gets blocks of rows [n, ``layout.shape[-1]``], or [n, 1] for a vector.

    Example:
        >>> from parallel_ext.sharding.layout import shard_along
        >>> layout, shard = shard_along("weight", (5, 3), 0, ((0, 3), (3, 5))), torch.empty(2, 3)
        >>> _ = torch.manual_seed(1)
        >>> draw(shard, layout, 1, nn.init.normal_)
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(shard, torch.empty(5, 3).normal_()[3:])
        True
    """
    if shard.is_meta or layout.numel == 0:
        return
    width = layout.shape[-1] if len(layout.shape) > 1 else 1
    rows = layout.numel // width
    at_once = max(_ROWS, _ELEMENTS // width // _ROWS * _ROWS) if shard.is_cpu else rows
    parts = _parts(shard, layout, rank)
    start = 0
    while start < rows:
        stop = rows if rows - start < 2 * at_once else start + at_once
        block = shard.new_empty(stop - start, width)
        init(block)
        for (first, last), (left, right), own in parts:
            low, high = max(start, first), min(stop, last)
            if low < high:
                own[low - first : high - first].copy_(block[low - start : high - start, left:right])
        start = stop


def _parts(
    shard: torch.Tensor, layout: TensorLayout, rank: int
) -> list[tuple[tuple[int, int], tuple[int, int], torch.Tensor]]:
    """Return of each box its rows and columns in the full tensor as a matrix, and its place."""
    vector = len(layout.shape) == 1
    matrices = math.prod(layout.shape[1:-1])  # rows of one index of the first dimension
    parts = []
    for box, own in shard_views(shard, layout, rank):
        rows = (box[0][0] * matrices, box[0][1] * matrices)
        columns = (0, 1) if vector else box[-1]
        parts.append((rows, columns, own.unsqueeze(-1) if vector else own.flatten(0, -2)))
    return parts


def drawn(module: Module, device: torch.device | str | None, **inits: Init) -> Module:
    """Give a module on the meta device parameters on another one, and draw their values.

    Args:
        module: whose parameters are ``inits``, or None.
        device: where they shall be; None for torch's default.
        inits: by attribute name, in the order in which a single process would draw.

    Returns:
        ``module``.
    """
    module.to_empty(device=torch.get_default_device() if device is None else device)
    for attribute, init in inits.items():
        if (parameter := getattr(module, attribute)) is not None:
            whole = TensorLayout(attribute, tuple(parameter.shape))
            draw(parameter, module.layouts.get(attribute, whole), module.group.rank, init)
    return module


def drawn_linear(module: Module, device: torch.device | str | None) -> Module:
    """Draw the values of a linear layer [out, in] on the meta device as ``nn.Linear`` does."""
    in_features = module.layouts["weight"].shape[1]
    bound = 1 / math.sqrt(in_features) if in_features else 0.0
    return drawn(
        module,
        device,
        weight=linear_weight,
        bias=partial(nn.init.uniform_, a=-bound, b=bound),
    )


def linear_weight(rows: torch.Tensor) -> None:
    """Fill rows of the weight of a linear layer as ``nn.Linear`` does."""
    nn.init.kaiming_uniform_(rows, a=math.sqrt(5))
