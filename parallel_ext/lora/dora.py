"""DoRA: the length of each row of an adapted weight is trained apart from its direction.

With the base W [out, in], factors A and B and the lengths m [out] an adapted layer multiplies by
``m / ||W + s B A|| * (W + s B A)``, where the norms are of rows, and no gradient goes through them.

Source: DoRA (arXiv 2402.09353), equation 5 and section 4.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.grad_sync import for_use
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import TensorLayout


class Magnitude(ShardedModule):
    """The trained lengths of rows, [out]: sharded with the rows, or replicated."""

    def __init__(self, layout: TensorLayout, values: torch.Tensor, group: Group) -> None:
        super().__init__({"weight": layout}, group)
        self.weight = nn.Parameter(values)

    def over(self, norms: torch.Tensor, base: Any) -> torch.Tensor:
        """Return the trained lengths over ``norms``: what this rank's outputs are multiplied by.

        Where ``base`` is sharded by columns these are its addends of all outputs.
        """
        by_columns = base.layouts["weight"].dim == 1
        group = base.group if by_columns else base.replicas
        return for_use(self.weight, self.layouts["weight"].name, group, base.partials) / norms


@torch.no_grad()
def row_norms(
    base: Any, weight: torch.Tensor, factor_a: torch.Tensor, factor_b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the lengths of the rows of W + scale B A, in fp32 or wider, without that matrix.

    Of a base that is sharded by columns all ranks of its group call it: one sum of [out].

    Args:
        base: a linear layer sharded by rows or by columns.
        weight: [R, K], this rank's part of it.
        factor_a: [r, K], this rank's part.
        factor_b: [R, r], this rank's part.
        scale: of the adapter.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (each.to(weight.device, wide) for each in (factor_a, factor_b))
    b = b * scale
    crossed = (weight @ a.to(weight.dtype).T).to(wide)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    squares += ((2 * crossed + b @ (a @ a.T)) * b).sum(1)
    if base.layouts["weight"].dim == 1:
        squares = ops.reduce_from_region(squares, base.group)
    return squares.clamp_min(0).sqrt()
