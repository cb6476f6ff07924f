"""Linear modules for ``px.Invariant``, whose bits do not depend on how many ranks share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.moe import ExpertParallelExperts, LowRank
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.ops import Blocks, ExchangePlan, Group
from parallel_ext.sharding.blocks import own_blocks
from parallel_ext.sharding.layout import TensorLayout


class BlockColumnLinear(ShardedModule):
    """``nn.Linear`` of which each rank holds blocks of output features (rows of the weight).

    Args:
        weight: [F, K], the rows of this rank.
        bias: [F], of the same rows, or None.
        layouts: of both, with blocks.
        group: the tensor-parallel group.
        copies: that many consecutive blocks hold the same rows.
        head_dim: features of a head, where heads are repeated.
        repeats: how often each head is returned, one behind the other.

    It is computed together with the other layers that read the same input, by
    :class:`ComputedTogether`, and returns this rank's [..., the width of its blocks * repeats].
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: dict[str, TensorLayout],
        group: Group,
        copies: int = 1,
        head_dim: int = 1,
        repeats: int = 1,
    ) -> None:
        super().__init__(layouts, group)
        self.out_features, self.in_features = layouts["weight"].shape
        self.weight, self.bias = weight, bias
        self.blocks = own_blocks(layouts["weight"], group.rank)
        self.copies, self.head_dim, self.repeats = copies, head_dim, repeats
        self.computed: tuple[torch.Tensor, torch.Tensor] | None = None  # input and output

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        computed, self.computed = self.computed, None
        if computed is None or computed[0] is not input:
            raise RuntimeError(
                "under px.Invariant a layer is computed together with those that read the same "
                "input, which must be that of the attention or MLP around it, unchanged"
            )
        output = computed[1]
        if self.bias is not None:
            output = ops.block_bias(output, self.bias, self.blocks, self.copies, self.group)
        return self._repeated(output)

    def like_weight(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply another weight [F, K], of which this rank holds the same rows.

        Args:
            input: [..., K], replicated.
            weight: this rank's rows.
        """
        # Only of the second weight may consecutive blocks share rows: the first one is empty.
        empty = weight[:0], Blocks(((0, 0),) * len(self.blocks.own), self.blocks.count)
        weights, blocks = zip(empty, (weight, self.blocks), strict=True)
        _, output = ops.block_linears(input, weights, blocks, self.copies, self.group)
        return self._repeated(output)

    def _repeated(self, heads: torch.Tensor) -> torch.Tensor:
        if self.repeats == 1:
            return heads
        return ops.repeat_heads(heads, self.head_dim, self.repeats)


class ComputedTogether:
    """A forward pre-hook of an attention or MLP: computes all layers that read its input.

    Args:
        layers: at most three :class:`BlockColumnLinear` inside the module.
    """

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = tuple(layers)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        input = args[0] if args else kwargs["hidden_states"]
        layers = [module.get_submodule(name) for name in self.layers]
        layers = [getattr(layer, "base_layer", layer) for layer in layers]  # of an adapter
        outputs = ops.block_linears(
            input,
            [layer.weight for layer in layers],
            [layer.blocks for layer in layers],
            layers[-1].copies,
            layers[0].group,
        )
        for layer, output in zip(layers, outputs, strict=True):
            layer.computed = input, output


class BlockRowLinear(ShardedModule):
    """``nn.Linear`` of which each rank holds blocks of input features (columns of the weight).

    Args:
        weight: [F, K], the columns of this rank.
        bias: [F], replicated, or None.
        layouts: of ``weight``, with blocks.
        group: the tensor-parallel group.

    Called with this rank's features [..., K] it returns the replicated [..., F].
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: dict[str, TensorLayout],
        group: Group,
    ) -> None:
        super().__init__(layouts, group)
        self.out_features, self.in_features = layouts["weight"].shape
        self.weight, self.bias = weight, bias
        self.blocks = own_blocks(layouts["weight"], group.rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.block_row_linear(input, self.weight, self.blocks, self.bias, self.group)

    def like_weight(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply another weight [F, K], of which this rank holds the same columns.

        Args:
            input: [..., K], this rank's features.
            weight: this rank's columns.
        """
        return ops.block_row_linear(input, weight, self.blocks, None, self.group)


def replicated_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Apply a weight [F, K] that every rank holds to a replicated input [..., K].

    Its products have the same bits wherever the tensors lie in memory, which small ones of torch
    have not.
    """
    (output,) = ops.block_linears(input, [weight], [Blocks(((0, len(weight)),), 1)])
    return output


class BlockExperts(ExpertParallelExperts):
    """Experts, each a block, of which each tp rank holds some: the ep ranks are the tp ranks.

    The rows of an expert are those of one process, in the order of the tokens, and a token sums its
    choices in their order.
    """

    joins_choices = False  # a rank would sum its choices before those of others

    def _linear(
        self,
        rows: torch.Tensor,
        attribute: str,
        plan: ExchangePlan,
        adapters: Mapping[str, LowRank],
    ) -> torch.Tensor:
        of_experts = rows.split(plan.rows_per_expert(self.group.rank))
        weights = getattr(self, attribute).unbind()
        return torch.cat([*map(replicated_linear, of_experts, weights)])


class BlockHeadNorm(nn.Module):
    """RMSNorm of single heads, of which each rank holds some.

    Args:
        weight: [head_dim], replicated.
        eps: added to the mean of the squares.
        blocks: of the heads.
        group: the tensor-parallel group.

    Called with this rank's heads [..., heads, head_dim] it returns them normalised, in the same
    dtype; computed in fp32, or in fp64 for fp64.
    """

    def __init__(self, weight: nn.Parameter, eps: float, blocks: Blocks, group: Group) -> None:
        super().__init__()
        self.weight, self.eps, self.blocks, self.group = weight, eps, blocks, group

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        heads, weight = normalized.to(input.dtype).to(dtype), self.weight.to(dtype)
        return ops.block_scale(heads, weight, self.blocks, self.group)


class FixedSilu(nn.Module):
    """``nn.SiLU`` with bits that depend on nothing but the element."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.fixed_silu(input)
