"""The modules that PEFT puts around experts, one for each of their tensors that has an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import peft
import torch
from peft.tuners.lora import layer
from torch import nn

from parallel_ext.lora.layers import Adapted
from parallel_ext.nn.blocks import BlockExperts, BlockFactor
from parallel_ext.nn.grad_sync import for_use
from parallel_ext.nn.lora import Factor
from parallel_ext.nn.moe import LowRank
from parallel_ext.sharding.layout import TensorLayout, scaled, shard_ranges


def expert_factor_layouts(
    tensor: TensorLayout, name_a: str, name_b: str, r: int
) -> tuple[TensorLayout, TensorLayout]:
    """Return the layouts of an adapter's factors for a tensor of experts [E, out, in].

    As in PEFT the factors of all experts lie in two matrices: A [r * E, in] has the rows of one
    expert side by side, B [out, r * E] the columns of one r side by side. Each rank holds those of
    its experts, which again lie so.

    Args:
        tensor: sharded along dimension 0, one range of experts a rank.

    Example:
        >>> from parallel_ext.sharding.layout import shard_along
        >>> experts = shard_along("experts.down_proj", (5, 8, 4), 0, ((0, 3), (3, 5)))
        >>> lora_a, lora_b = expert_factor_layouts(experts, "A", "B", 2)
        >>> lora_a.ranges(1), lora_b.ranges(1)
        (((6, 10),), ((3, 5), (8, 10)))
    """
    num_experts, out_features, in_features = tensor.shape
    own = tensor.first_ranges
    rows = ([each] for each in scaled(own, r))
    columns = (
        [(index * num_experts + start, index * num_experts + stop) for index in range(r)]
        for start, stop in own
    )
    lora_a = shard_ranges(name_a, (r * num_experts, in_features), 0, rows)
    lora_b = shard_ranges(name_b, (out_features, r * num_experts), 1, columns)
    return (
        replace(lora_a, blocks=scaled(tensor.blocks, r)),
        replace(lora_b, blocks=tensor.blocks, parts=(1,) * r),
    )


def per_expert(
    lora_a: torch.Tensor, lora_b: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r * e, in] and B [out, r * e] of ``e`` experts as [e, r, in] and [e, out, r]."""
    of_experts = lora_b.view(len(lora_b), -1, experts).permute(2, 0, 1)
    return lora_a.view(experts, -1, lora_a.size(1)), of_experts.contiguous()


class ParamWrapper(Adapted, layer.ParamWrapper):
    """An adapter on one tensor of the experts; each rank holds the factors of its own experts.

    PEFT knows such modules by this name as well as by their class. Where both tensors have an
    adapter, one module is around the other: its factors go down to the experts with the call.
    """

    def __init__(
        self, base_layer: nn.Module, *args: Any, parameter_name: str, **kwargs: Any
    ) -> None:
        self.parameter_name = parameter_name  # says the sizes, for which the base is asked
        super().__init__(base_layer, *args, **kwargs)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        _, out_features, in_features = module.layouts[self.parameter_name].shape
        return in_features, out_features

    def _add_factors(self, adapter: str, target: str, r: int, config: peft.LoraConfig) -> None:
        base = self.get_base_layer()
        layout_a, layout_b = expert_factor_layouts(
            base.layouts[self.parameter_name],
            f"{target}.lora_A.{adapter}.weight",
            f"{target}.lora_B.{adapter}.weight",
            r,
        )
        factor_a, factor_b = (
            BlockFactor(layout, base)
            if isinstance(base, BlockExperts)
            else Factor(layout, None, base.group)
            for layout in (layout_a, layout_b)
        )
        self.lora_A[adapter], self.lora_B[adapter] = factor_a, factor_b
        self._draw_factors(config, r, (factor_a, factor_b))

    def _factor_pair(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's A [e, r, in] and B [e, out, r]."""
        lora_a, lora_b = super()._factor_pair(adapter)
        return per_expert(lora_a, lora_b, len(lora_a) // self.r[adapter])

    def _for_use(self, factor: Factor) -> tuple[torch.Tensor, ...]:
        """Return a factor for a forward, once for each dp rank whose leaf meets at the experts."""
        if isinstance(factor, BlockFactor):
            return factor.copies("weight").unbind()
        base, name = self.get_base_layer(), factor.layouts["weight"].name
        return (for_use(factor.weight, name, base.replicas, base.partials),)

    def _low_rank(self, active: list[str]) -> LowRank:
        """Join all active adapters in one, whose gradients are summed where they are partial."""
        pairs = []
        for name in active:
            copies = zip(*map(self._for_use, (self.lora_A[name], self.lora_B[name])), strict=True)
            of_copies = (per_expert(a, b, len(a) // self.r[name]) for a, b in copies)
            pairs.append(tuple(map(_side_by_side, zip(*of_copies, strict=True))))
        if len(active) == 1:
            return LowRank(*pairs[0], self.scaling[active[0]])
        scaled = [b * self.scaling[name] for name, (_, b) in zip(active, pairs, strict=True)]
        return LowRank(torch.cat([a for a, _ in pairs], dim=1), torch.cat(scaled, dim=2), 1.0)

    def _adapted_forward(
        self,
        x: torch.Tensor,
        active: list[str],
        *args: Any,
        adapters: Mapping[str, LowRank] | None = None,
    ) -> torch.Tensor:
        own = {self.parameter_name: self._low_rank(active)}
        return self.base_layer(x, *args, adapters={**(adapters or {}), **own})

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the experts, with the adapters on both tensors merged into them if ``merge``."""
        if isinstance(self.base_layer, ParamWrapper):
            self.base_layer.unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        return super().unload_and_optionally_merge_module(merge, safe_merge, adapter_names)


def _side_by_side(copies: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return copies of [e, ...] as one tensor in which those of an expert are neighbours."""
    return copies[0] if len(copies) == 1 else torch.stack(copies, 1).flatten(0, 1)
