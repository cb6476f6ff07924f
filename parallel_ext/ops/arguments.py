"""Checks of the arguments of an op before C++ sees them."""

from __future__ import annotations

from typing import Any

import torch

from parallel_ext.ops.group import Group


def check_group(op: str, group: Any) -> None:
    """Raise a TypeError that names the op if ``group`` is anything but a :class:`Group`."""
    if not isinstance(group, Group):
        raise TypeError(
            f"{op}: group must be a parallel_ext.ops.Group, such as Group.of(process_group) or "
            f"ALONE, got {group!r}"
        )


def check_tensors(op: str, **arguments: Any) -> None:
    """Raise a TypeError that names op and argument if one of them is no tensor.

    The dispatcher takes None for a tensor, and autograd then fails with words of its own.
    """
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {value!r}")
