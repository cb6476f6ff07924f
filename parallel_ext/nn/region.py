"""Where hidden states enter a tensor-parallel region, with as few copies as may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.ops import Group


class _Entered(torch.autograd.Function):
    """:func:`parallel_ext.ops.copy_to_region` as a view, which an op may not return."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if grad is None else ops.reduce_from_region(grad, ctx.group), None


def entered(hidden: torch.Tensor, group: Group, unchanged: bool = False) -> torch.Tensor:
    """Let hidden states enter a region: their gradient is summed over the ranks.

    Args:
        hidden: replicated.
        group: the ranks of the region.
        unchanged: whether nothing in the region changes them in place. Autograd would refuse it.

    Returns:
        The same numbers: a copy where there is a gradient and they may be changed, else a view of
        ``hidden``, or itself.
    """
    if not (hidden.requires_grad and torch.is_grad_enabled()):
        return hidden
    return _Entered.apply(hidden, group) if unchanged else ops.copy_to_region(hidden, group)


class ChangeOutput:
    """A forward hook: changes what a module returns, or the first of it.

    Args:
        change: returns another tensor for the one that it is given.
    """

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change

    def __call__(
        self, module: nn.Module, args: tuple, output: torch.Tensor | tuple
    ) -> torch.Tensor | tuple:
        if isinstance(output, tuple):
            return (self.change(output[0]), *output[1:])
        return self.change(output)
