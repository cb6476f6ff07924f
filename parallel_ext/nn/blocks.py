"""Linear modules for ``px.Invariant``, whose bits do not depend on how many ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.linear import ComputedAhead, ComputingHook
from parallel_ext.nn.lora import Factor
from parallel_ext.nn.moe import ExpertParallelExperts, LowRank
from parallel_ext.nn.sharded_module import ShardedLinear, ShardedModule
from parallel_ext.nn.transposed_experts import ExpertsOfWeighedTokens
from parallel_ext.ops import Blocks, ExchangePlan, Group, RoutePlan
from parallel_ext.sharding.blocks import own_blocks
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.slices import split_parts

TakeGradients = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class BlockColumnLinear(ComputedAhead, ShardedLinear):
    """``nn.Linear`` of which each rank holds blocks of output features (rows of the weight).

    Args:
        weight: [F, K], the rows of this rank.
        bias: [F], of the same rows, or None.
        layouts: of both, with blocks; the weight may join several parts.
        group: the tensor-parallel group.
        copies: that many consecutive blocks hold the same rows.
        head_dim: features of a head, where heads are repeated.
        repeats: how often each head of each part is returned, one behind the other; once if empty.
        alone: whether it is computed by itself, and not together with the other layers that read
            the same input, by :class:`ComputedTogether`.

    It returns this rank's [..., features], those of the parts one behind the other.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: dict[str, TensorLayout],
        group: Group,
        copies: int = 1,
        head_dim: int = 1,
        repeats: tuple[int, ...] = (),
        alone: bool = False,
    ) -> None:
        super().__init__(weight, bias, layouts, group)
        self.alone = alone
        layout = layouts["weight"]
        own, count = own_blocks(layout, group.rank)
        first, *_ = layout.parts
        self.blocks = [
            Blocks(tuple((a * size // first, b * size // first) for a, b in own), count)
            for size in layout.parts
        ]
        self.copies, self.head_dim = copies, head_dim
        self.repeats = repeats or (1,) * len(layout.parts)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.mark.is_set = True
        if self.alone:
            return self.like_weight(input, self.weight, self.bias)
        products = self.take_computed(input)
        if products is None:
            raise RuntimeError(
                "under px.Invariant a layer is computed together with those that read the same "
                "input, which must be that of the attention or MLP around it, unchanged"
            )
        return self._finished(products, self.bias)

    def parts_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split rows as those of the weight, or of its bias, into the parts that these join."""
        return split_parts(rows, self.layouts["weight"])

    def like_weight(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply another weight [F, K] and bias [F], this rank's rows, to a replicated [..., K]."""
        weights, blocks = [*self.parts_of(weight)], [*self.blocks]
        if self.copies > 1:
            # Blocks may share rows of the second weight only, so the first weight is empty.
            own, count = blocks[0]
            weights.insert(0, weight[:0])
            blocks.insert(0, Blocks(((0, 0),) * len(own), count))
        products = ops.block_linears(input, weights, blocks, self.copies, self.group)
        return self._finished(products[-len(self.blocks) :], bias)

    def _finished(
        self, products: Sequence[torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the bias to the products of the parts, repeat their heads, and join them."""
        biases = [None] * len(products) if bias is None else self.parts_of(bias)
        parts = []
        for part, of_part, blocks, times in zip(
            products, biases, self.blocks, self.repeats, strict=True
        ):
            if of_part is not None:
                part = ops.block_bias(part, of_part, blocks, self.copies, self.group)
            if times > 1:
                part = ops.repeat_heads(part, self.head_dim, times)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class ComputedTogether(ComputingHook):
    """A forward pre-hook of an attention or MLP: computes all layers that read its input.

    Args:
        layers: :class:`BlockColumnLinear` inside the module, of at most three parts in all.
    """

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        input = args[0] if args else kwargs["hidden_states"]
        layers = [module.get_submodule(name) for name in self.layers]
        layers = [getattr(layer, "base_layer", layer) for layer in layers]  # of an adapter
        products = ops.block_linears(
            input,
            [part for layer in layers for part in layer.parts_of(layer.weight)],
            [blocks for layer in layers for blocks in layer.blocks],
            layers[-1].copies,
            layers[0].group,
        )
        rest = iter(products)
        self.serve(layers, input, [[*islice(rest, len(layer.blocks))] for layer in layers])


class BlockRowLinear(ShardedLinear):
    """``nn.Linear`` of which each rank holds blocks of input features (columns of the weight).

    Args:
        weight: [F, K], the columns of this rank.
        bias: [F], replicated, or None.
        layouts: of ``weight``, with blocks.
        group: the tensor-parallel group.

    Called with this rank's features [..., K] it returns the replicated [..., F].
    """

    def set_layouts(self, layouts: Mapping[str, TensorLayout]) -> None:
        super().set_layouts(layouts)
        self.blocks = own_blocks(layouts["weight"], self.group.rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.mark.is_set = True
        return ops.block_row_linear(input, self.weight, self.blocks, self.bias, self.group)

    def like_weight(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply another weight [F, K], this rank's columns, to this rank's features [..., K]."""
        return ops.block_row_linear(input, weight, self.blocks, None, self.group)


def replicated_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply a weight [F, K] and bias [F] that every rank holds to a replicated input [..., K].

    Its products have the same bits wherever the tensors lie in memory, which small ones of torch
    have not.
    """
    block = Blocks(((0, len(weight)),), 1)
    (output,) = ops.block_linears(input, [weight], [block])
    return output if bias is None else ops.block_bias(output, bias, block)


class _Apart(torch.autograd.Function):
    """A weight once for each of several dp ranks, whose gradients are found each by itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, count: int, take: TakeGradients) -> torch.Tensor:
        ctx.take = take
        return weight.expand(count, *weight.shape)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.take(gradients.unbind()), None, None


class UsedApart:
    """A module whose parameters are used for leaves of several dp ranks, with a gradient for each.

    Attributes:
        dp_ranks: whose leaves meet here.
        take_gradients: while leaves run, by the names of the trained parameters what takes their
            gradients of the leaf of each of these dp ranks, and returns that of the parameter.
    """

    dp_ranks: int
    take_gradients: dict[str, TakeGradients]

    def _meet(self, dp_ranks: int) -> None:
        self.dp_ranks, self.take_gradients = dp_ranks, {}

    def copies(self, attribute: str) -> torch.Tensor:
        """Return a parameter by its name, [dp_ranks, ...]: once for each whose leaf meets here."""
        parameter = getattr(self, attribute)
        if attribute in self.take_gradients:
            return _Apart.apply(parameter, self.dp_ranks, self.take_gradients[attribute])
        if self.dp_ranks == 1:  # expand would copy its gradient to sum it over one
            return parameter.unsqueeze(0)
        return parameter.expand(self.dp_ranks, *parameter.shape)


class BlockFactor(UsedApart, Factor):
    """One factor of an adapter on :class:`BlockExperts`.

    Args:
        weight: layout of the weight, sharded as the experts.
        experts: that it is on.
    """

    def __init__(self, weight: TensorLayout, experts: BlockExperts) -> None:
        super().__init__(weight, None, experts.group)
        self._meet(experts.dp_ranks)


class BlockExperts(UsedApart, ExpertParallelExperts):
    """Experts, each a block, of which each ep rank holds some.

    An expert has one product for the rows of each leaf, in the order of its tokens, and a token
    sums its choices in their order. With more ep than tp ranks, those of several dp ranks meet
    here, each with a leaf of its own; an adapter then has its factors once for each dp rank, those
    of an expert side by side.

    Attributes:
        has_leaf: whether this rank runs a leaf; one without takes part with no tokens, and returns
            its input.
    """

    joins_choices = False  # a rank would sum its choices before those of others
    reads_counts = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._meet(self.group.size // self.tp.size)
        self.has_leaf = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, LowRank] | None = None,
    ) -> torch.Tensor:
        tokens = (hidden_states, top_k_index, top_k_weights)
        if self.has_leaf:
            return super().forward(*tokens, adapters)
        none = super().forward(*(each[:0] for each in tokens), adapters)
        return torch.cat([none, hidden_states])

    def _linear(
        self,
        rows: torch.Tensor,
        attribute: str,
        route: RoutePlan,
        plan: ExchangePlan,
        adapters: Mapping[str, LowRank],
    ) -> torch.Tensor:
        own = plan.experts_per_rank[self.group.rank]
        received = [
            plan.receive[first : first + own] for first in range(0, len(plan.receive), own + 1)
        ]
        counts = [
            sum(of_rank[expert] for of_rank in received[first : first + self.tp.size])
            for expert in range(own)
            for first in range(0, len(received), self.tp.size)
        ]
        products = ops.block_experts(rows, self.copies(attribute), counts)
        if attribute in adapters:
            lora_a, lora_b, scale = adapters[attribute]
            factor_a, factor_b = (each.to(rows.dtype).unsqueeze(0) for each in (lora_a, lora_b))
            low = ops.block_experts(rows, factor_a, counts) * scale
            products = products + ops.block_experts(low, factor_b, counts)
        return products


class BlockExpertsOfWeighedTokens(BlockExperts, ExpertsOfWeighedTokens):
    """Experts as Llama 4's, each a block, of which each ep rank holds some."""

    def copies(self, attribute: str) -> torch.Tensor:
        return super().copies(attribute).transpose(-1, -2)


class BlockHeadNorm(nn.Module):
    """RMSNorm of single heads, of which each rank holds some.

    Args:
        weight: [head_dim], replicated.
        eps: added to the mean of the squares.
        blocks: of the heads.
        group: the tensor-parallel group.
        transposed: whether the heads come as [..., heads, tokens, head_dim].
        plus: heads are multiplied by this + weight, and then rounded, as Gemma's; with None they
            are rounded before.

    Called with this rank's heads [..., heads, head_dim], or transposed, it returns them normalised,
    in the same dtype; computed in fp32, or in fp64 for fp64.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        eps: float,
        blocks: Blocks,
        group: Group,
        *,
        transposed: bool = False,
        plus: float | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.blocks, self.group = weight, eps, blocks, group
        self.transposed, self.plus = transposed, plus

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.transposed:
            return self._scaled(input.transpose(-2, -3)).transpose(-2, -3)
        return self._scaled(input)

    def _scaled(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus is not None:
            weight = self.plus + self.weight.to(wide.dtype)
            return ops.block_scale(normalized, weight, self.blocks, self.group).to(heads.dtype)
        dtype = torch.promote_types(heads.dtype, self.weight.dtype)
        rounded, weight = normalized.to(heads.dtype).to(dtype), self.weight.to(dtype)
        return ops.block_scale(rounded, weight, self.blocks, self.group)


class BlockNorm(ShardedModule):
    """RMSNorm over features of which each rank holds blocks, as those of all heads.

    Args:
        weight: [F], of this rank's features.
        layouts: of ``weight``, with blocks.
        eps: added to the mean of the squares.
        group: the tensor-parallel group.

    Called with this rank's features [..., F] it returns them normalised, in the same dtype;
    computed in fp32 or wider. The sum of the squares is one over the tree of blocks, and so is its
    gradient.
    """

    def __init__(
        self, weight: nn.Parameter, layouts: dict[str, TensorLayout], eps: float, group: Group
    ) -> None:
        super().__init__(layouts, group)
        self.weight, self.eps = weight, eps
        self.blocks = own_blocks(layouts["weight"], group.rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input.device.type, enabled=False):
            wide = input.to(torch.promote_types(input.dtype, torch.float32))
            ones = wide.new_ones(1, wide.size(-1))
            total = ops.block_row_linear(wide.square(), ones, self.blocks, None, self.group)
            scale = torch.rsqrt(total / self.layouts["weight"].shape[0] + self.eps)
            # The scale of a token is brought to each feature by a product of each block with ones.
            (scale,) = ops.block_linears(scale, [ones.T], [self.blocks], 1, self.group)
            weight = self.weight.to(wide.dtype)
            weight = ops.block_bias(torch.zeros_like(wide), weight, self.blocks, 1, self.group)
            return (weight * (wide * scale)).to(input.dtype)


class FixedErfGelu(nn.Module):
    """``nn.GELU`` with bits that depend on nothing but the element, in fp32 or wider.

    Each of its steps has such bits, which torch's one op has not.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        return (wide * (0.5 + 0.5 * torch.erf(wide * 0.5**0.5))).to(input.dtype)


class FixedGelu(nn.Module):
    """GELU by tanh with bits that depend on nothing but the element."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.fixed_gelu(input)


class FixedSilu(nn.Module):
    """``nn.SiLU`` with bits that depend on nothing but the element."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.fixed_silu(input)
