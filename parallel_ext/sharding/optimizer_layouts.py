"""Where the states of an optimizer lie: as their parameter, or as its rows or columns."""

from __future__ import annotations

from dataclasses import replace

import torch

from parallel_ext.sharding.layout import Box, TensorLayout

ROWS, COLUMNS = -2, -1
"""Dimensions of a matrix, or of the matrices of a stack."""

_REDUCED = {"row_var": COLUMNS, "col_var": ROWS}  # states of Adafactor


def is_reduced(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Return whether an optimizer's state of this name has one number for all of a dimension."""
    return isinstance(optimizer, torch.optim.Adafactor) and key in _REDUCED


def layout_of_state(
    optimizer: torch.optim.Optimizer, key: str, parameter: TensorLayout
) -> TensorLayout:
    """Return where an optimizer's state of a parameter lies: as that, or as its rows or columns.

    The latter of an Adafactor that knows the whole parameter, as torch's does where every rank
    holds all of it.

    Example:
        >>> optimizer = torch.optim.Adafactor([torch.ones(5, 4, requires_grad=True)])
        >>> layout_of_state(optimizer, "row_var", TensorLayout("weight", (5, 4))).shape
        (5, 1)
        >>> layout_of_state(optimizer, "variance", TensorLayout("weight", (5, 4))).shape
        (5, 4)
    """
    known = len(parameter.shape) >= 2 and knows_whole(optimizer, parameter)
    return reduced(parameter, _REDUCED[key]) if known and is_reduced(optimizer, key) else parameter


def knows_whole(optimizer: torch.optim.Optimizer, parameter: TensorLayout) -> bool:
    """Return whether an optimizer's means are those of the whole parameter on every rank."""
    return parameter.is_replicated or getattr(optimizer, "of_whole_tensors", False)


def is_sharded_along(layout: TensorLayout, dim: int) -> bool:
    """Return whether some rank holds only a part of dimension ``dim``."""
    return any(box[dim] != (0, layout.shape[dim]) for boxes in layout.held for box in boxes)


def reduced(layout: TensorLayout, dim: int) -> TensorLayout:
    """Return the layout of a tensor with one number for all of ``dim``, such as the mean over it.

    On ranks that hold different parts of ``dim`` this number is replicated.

    Example:
        >>> layout = TensorLayout("weight", (5, 4), 0, ((((0, 3), (0, 4)),), (((3, 5), (0, 4)),)))
        >>> reduced(layout, 1).local_shape(1), reduced(layout, 0).local_shape(1)
        ((2, 1), (1, 4))
    """
    dim %= len(layout.shape)

    def one_of(box: Box) -> Box:
        return (*box[:dim], (0, 1), *box[dim + 1 :])

    shape = (*layout.shape[:dim], 1, *layout.shape[dim + 1 :])
    whole = TensorLayout(layout.name, shape)
    held = tuple(tuple(dict.fromkeys(map(one_of, boxes))) for boxes in layout.held)
    if all(box == whole.whole for boxes in held for box in boxes):
        return whole
    # What is sharded along two dimensions is so along the first, too: FSDP shards rows.
    return replace(whole, dim=0 if dim == layout.dim else layout.dim, held=held)
