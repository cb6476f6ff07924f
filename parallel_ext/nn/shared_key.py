"""Keys of which all heads share some features, for ``px.Invariant``: those of DeepSeek."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.ops import Blocks, Group


class _Summed(torch.autograd.Function):
    """Keys whose gradient in the shared features is that of all heads, in the first of them."""

    @staticmethod
    def forward(ctx: Any, keys: torch.Tensor, shared: SharedKey) -> torch.Tensor:
        ctx.shared = shared
        return keys.view_as(keys)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        of_heads = gradient[..., -ctx.shared.features :]
        total = ctx.shared.sum_heads(of_heads)
        of_heads.zero_()[:, 0] = total
        return gradient, None


class SharedKey(nn.Module):
    """The last features of a key, one vector for all heads, of which each rank has blocks.

    Args:
        features: how many they are.
        heads: blocks of the heads.
        group: the tensor-parallel group.

    Called with this rank's keys [B, heads, T, D], into which the vector was expanded, it returns
    them. In backward the first head gets the gradients of all heads of all ranks, summed over the
    tree of blocks, and the others zeros: so the vector's gradient has the same bits on any number
    of ranks, and is whole on each.
    """

    def __init__(self, features: int, heads: Blocks, group: Group) -> None:
        super().__init__()
        self.features, self.group = features, group
        own = tuple((start * features, stop * features) for start, stop in heads.own)
        self.blocks = Blocks(own, heads.count)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(keys, self)

    def sum_heads(self, gradients: torch.Tensor) -> torch.Tensor:
        """Sum gradients [B, heads, T, features] over all heads to [B, T, features].

        In fp32 or wider, by a product of each block with ones where features are equal.
        """
        with torch.autocast(gradients.device.type, enabled=False):
            wide = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
            side_by_side = wide.transpose(1, 2).flatten(2)
            ones = torch.eye(self.features, dtype=wide.dtype, device=wide.device)
            ones = ones.repeat(1, gradients.size(1))
            total = ops.block_row_linear(side_by_side, ones, self.blocks, None, self.group)
            return total.to(gradients.dtype)
