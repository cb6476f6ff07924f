"""The positions of an image over the ranks of a group, each of which computes its own."""

from __future__ import annotations

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import split


class OwnPositions:
    """How the positions of images are divided over the ranks of a group.

    Args:
        positions: of each image.
        group: the ranks, each of which computes a range of them.

    Attributes:
        first: the first one of this rank.

    Example:
        >>> own = OwnPositions(3, ops.ALONE)
        >>> (hidden,) = own.take(nn.Identity(), (torch.ones(2, 3, 4),))
        >>> own.gather(hidden).shape
        torch.Size([2, 3, 4])
    """

    def __init__(self, positions: int, group: Group) -> None:
        shares = split(positions, group.size)
        self.group, self.first = group, shares[group.rank][0]
        self._sizes = [stop - start for start, stop in shares]

    def take(self, block: nn.Module, args: tuple) -> tuple:
        """Before a module: give it this rank's part of hidden states, [N, positions, width]."""
        return (ops.take_tokens(args[0], self._sizes, self.group), *args[1:])

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all positions; every rank has all of their gradient."""
        return ops.gather_tokens(own, self._sizes, self.group, partial_gradient=False)

    def gather_seen(self, own: torch.Tensor) -> torch.Tensor:
        """Return what each rank's own positions look at; its gradient is the sum of the ranks'."""
        return ops.gather_tokens(own, self._sizes, self.group)
