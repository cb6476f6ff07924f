"""Checks of the arguments of an op before C++ sees them."""

from __future__ import annotations

from typing import Any

import torch

from parallel_ext.ops.group import Group, Range


def check_group(op: str, group: Any) -> None:
    """Raise a TypeError that names the op if ``group`` is anything but a :class:`Group`."""
    if not isinstance(group, Group):
        raise TypeError(
            f"{op}: group must be a parallel_ext.ops.Group, such as Group.of(process_group) or "
            f"ALONE, got {group!r}"
        )


def check_whole(op: str, group: Group, vocab_size: int, vocab_range: Range) -> None:
    """Raise a ValueError if one rank alone is given a part of a vocabulary for all of it.

    What several ranks hold is for the op to say. What is no pair is a TypeError.
    """
    if not isinstance(vocab_range, (tuple, list)) or len(vocab_range) != 2:
        raise TypeError(f"{op}: vocab_range must be (start, stop), got {vocab_range!r}")
    start, stop = vocab_range
    if group.size == 1 and 0 <= start <= stop <= vocab_size and stop - start < vocab_size:
        raise ValueError(
            f"{op}: the shard [{start}, {stop}) is not all of the vocabulary [0, {vocab_size}), "
            "but the group has one rank; pass group= of those with the other ids"
        )


def check_tensors(op: str, **arguments: Any) -> None:
    """Raise a TypeError that names op and argument if one of them is no tensor.

    The dispatcher takes None for a tensor, and autograd then fails with words of its own.
    """
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {value!r}")


def check_arguments(op: str, group: Any, **tensors: Any) -> None:
    """Raise as :func:`check_group` and :func:`check_tensors`."""
    check_group(op, group)
    check_tensors(op, **tensors)
