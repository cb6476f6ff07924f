"""Slices of tensors: what a rank has of one, by its layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.ops.group import Group, Range
from parallel_ext.sharding.layout import Box, TensorLayout


def shard_views(
    shard: torch.Tensor, layout: TensorLayout, rank: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes that ``rank`` holds, each with the part of its ``shard`` where it lies."""
    start = 0
    for box in layout.boxes(rank):
        if layout.dim is None:
            yield box, shard
            continue
        size = box[layout.dim][1] - box[layout.dim][0]
        yield box, shard.narrow(layout.dim, start, size)
        start += size


def primary_views(
    shard: torch.Tensor, layout: TensorLayout, rank: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a shard that no lower rank holds, each with the part where it lies."""
    primary = layout.primary_boxes(rank)
    return ((box, view) for box, view in shard_views(shard, layout, rank) if box in primary)


def take(tensor: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor:
    """Copy ``rank``'s shard out of a full tensor; a ValueError if that has another shape."""
    if tuple(tensor.shape) != layout.shape:
        raise ValueError(
            f"{layout.name}: expected the full shape {layout.shape}, got {tuple(tensor.shape)}"
        )
    if layout.dim is None:
        return tensor.clone()
    boxes = [] if tensor.is_meta else layout.boxes(rank)  # meta has nothing to copy
    pieces = [tensor[tuple(slice(*piece) for piece in box)] for box in boxes]
    if not pieces:
        return tensor.new_empty(layout.local_shape(rank))
    return torch.cat(pieces, layout.dim).contiguous()


def take_block(shard: torch.Tensor, layout: TensorLayout, block: Range) -> torch.Tensor:
    """Return a block of a shard, contiguous; ``block`` is as :func:`own_blocks` says it."""
    dim, pieces = layout.dim or 0, []
    for part, size in zip(split_parts(shard, layout), layout.parts, strict=True):
        start, stop = (edge * size // layout.parts[0] for edge in block)
        pieces.append(part.narrow(dim, start, stop - start))
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim)


def split_parts(shard: torch.Tensor, layout: TensorLayout) -> tuple[torch.Tensor, ...]:
    """Split a shard into the parts that it joins: views, or itself where it is one part.

    A bias may be split by the layout of its weight.
    """
    if len(layout.parts) == 1:
        return (shard,)
    dim = layout.dim or 0
    unit = shard.size(dim) // sum(layout.parts)
    return shard.split([unit * size for size in layout.parts], dim)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter or gradient: of a DTensor its local tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, of which it may be a part; 0 if it has none.

    A DTensor has none beside its local tensor's, unless ``.data =`` has given it some.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # such as a sparse one
        return 0


def gather_rows(
    shard: torch.Tensor, layout: TensorLayout, mesh: Mesh
) -> tuple[torch.Tensor, TensorLayout]:
    """Gather the rows of a shard that dp ranks, or edp ranks, share out; all of them call it.

    Args:
        shard: this rank's rows, or a shard that is not shared out, which is returned.

    Returns:
        The shard, and its layout without its name.
    """
    if layout.rows_of is None:
        return shard, layout
    inner = mesh.world_size // layout.sharers
    ranks = range(mesh.rank % inner, mesh.world_size, inner)
    sizes = [math.prod(layout.local_shape(rank)) for rank in ranks]
    group = mesh.group_of_columns(inner)
    rows = ops.gather_from_region(shard.reshape(-1), sizes, group)
    return rows.view(layout.rows_of.local_shape(mesh.rank)), layout.rows_of


def from_each_rank(own: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather a tensor that has one shape on all ranks of a group: [ranks, ...], in order.

    Example:
        >>> from_each_rank(torch.ones(3), ops.ALONE).shape
        torch.Size([1, 3])
    """
    everyone = ops.gather_from_region(own.flatten(), [own.numel()] * group.size, group)
    return everyone.view(group.size, *own.shape)


def like(local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return what a rank holds of a tensor as a DTensor if ``parameter`` is one, else as it is."""
    if not hasattr(parameter, "to_local"):
        return local
    return type(parameter.data).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
