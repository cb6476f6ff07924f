"""A norm over features that are sharded over the ranks, as those of all heads of an attention."""

from __future__ import annotations

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.grad_sync import PartialGradients, for_use
from parallel_ext.nn.region import entered
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import TensorLayout


class RMSNormOfShards(ShardedModule):
    """RMSNorm of the full last dimension, of which each rank holds some features.

    Args:
        weight: [F], of this rank's features.
        layouts: of ``weight``.
        eps: added to the mean of the squares.
        group: the tensor-parallel group.
        replicas: the ranks that hold the same features, when several do.
        partials: sums the gradients of such features at the end of a backward.
        rounds_first: whether the norm is rounded to the input's dtype before it is multiplied by
            the weight, and not after it.

    Called with this rank's features [..., F] it returns them normalised, in the same dtype;
    computed in fp32 or wider. The sums of squares are all-reduced, in forward and in backward.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        layouts: dict[str, TensorLayout],
        eps: float,
        group: Group,
        replicas: Group = ops.ALONE,
        partials: PartialGradients | None = None,
        rounds_first: bool = False,
    ) -> None:
        super().__init__(layouts, group)
        self.weight, self.eps, self.rounds_first = weight, eps, rounds_first
        self.replicas, self.partials = replicas, partials

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layout = self.layouts["weight"]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        own = wide.square().sum(-1, keepdim=True) / self.replicas.size  # which each of them adds
        # Every rank uses the sum, so its gradient is a sum over them as well.
        total = entered(ops.reduce_from_region(own, self.group), self.group, unchanged=True)
        weight = for_use(self.weight, layout.name, self.replicas, self.partials)
        normalized = wide * torch.rsqrt(total / layout.shape[0] + self.eps)
        if self.rounds_first:
            return weight * normalized.to(input.dtype)
        return (weight * normalized).to(input.dtype)
