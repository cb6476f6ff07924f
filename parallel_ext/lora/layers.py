"""The modules that PEFT puts around parallel linears, embedding and head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.errors import warn_user
from parallel_ext.lora._peft_private import move_to_base
from parallel_ext.lora.dora import Magnitude, row_norms
from parallel_ext.lora.merge import Mergeable, rows_here
from parallel_ext.lora.seeds import draw_by_name, key_of
from parallel_ext.nn.blocks import replicated_linear
from parallel_ext.nn.forward_counter import ForwardCounter
from parallel_ext.nn.fused_loss import current_loss_call
from parallel_ext.nn.grad_sync import for_use
from parallel_ext.nn.lora import Factor, factor_layouts, factors_for_use, input_dropout
from parallel_ext.nn.region import entered
from parallel_ext.nn.sharded_module import ShardedModule
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import TensorLayout, shard_along, shard_like
from parallel_ext.sharding.slices import local_part


class Adapted(Mergeable):
    """The base of all modules with an adapter: PEFT's bookkeeping.

    Attributes:
        reads_weights_inside: True, since a forward reads weights of modules that it does not call.
    """

    reads_weights_inside = True

    def __init__(
        self,
        base_layer: ShardedModule,
        adapter_name: str,
        config: peft.LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self._mask_keys: dict[str, int] = {}
        self._forwards = ForwardCounter()
        self._prepare(base_layer)
        self.update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _prepare(self, base: Any) -> None:
        """Set up what a kind of module needs before its first adapter; nothing by default."""

    def update_layer(
        self,
        adapter_name: str,
        r: int,
        lora_alpha: int,
        config: peft.LoraConfig,
        target_name: str = "",
        **kwargs: Any,
    ) -> None:
        """Add an adapter: called by PEFT for each target module."""
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name] = config.use_rslora
        self.use_dora[adapter_name] = config.use_dora
        self.lora_bias[adapter_name] = config.lora_bias
        self._mask_keys[adapter_name] = key_of(f"{target_name} {adapter_name} dropout")
        self.lora_dropout[adapter_name] = (
            nn.Dropout(config.lora_dropout) if config.lora_dropout > 0 else nn.Identity()
        )
        self._add_factors(adapter_name, target_name, r, config)
        move_to_base(self, adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _add_factors(self, adapter: str, target: str, r: int, config: peft.LoraConfig) -> None:
        raise NotImplementedError

    def _draw_factors(
        self, config: peft.LoraConfig, r: int, factors: tuple[Factor, Factor]
    ) -> None:
        """Draw A as ``nn.Linear`` draws, by the global fan-in, or as ``init_lora_weights`` says.

        B stays zero unless that is False, which changes the model at once.
        """
        factor_a, factor_b = factors
        gaussian = config.init_lora_weights == "gaussian"
        spread_a = ("normal", 1 / r) if gaussian else ("uniform", factor_a.in_features**-0.5)
        drawn = [(factor_a, "weight", spread_a)]
        if config.init_lora_weights is False:
            spread_b = ("uniform", factor_b.in_features**-0.5)
            drawn += [(factor_b, attribute, spread_b) for attribute in factor_b.layouts]
        for factor, attribute, spread in drawn:
            layout = factor.layouts[attribute]
            draw_by_name(getattr(factor, attribute), layout, factor.group.rank, spread)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        out_features, in_features = module.layouts["weight"].shape
        return in_features, out_features

    def for_agreement(self) -> str:
        """Return what must be equal on all tp ranks before a forward, as text."""
        active = self.here(self.active_adapters)
        if self.disable_adapters:
            return "disabled"
        if self.merged:
            return f"merged {', '.join(self.merged_adapters)}"
        states = [
            f"{name} times {self.scaling[name]:g}, {self.lora_dropout[name]}" for name in active
        ]
        return f"{'; '.join(states) or 'none'} (forwards with dropout: {self._forwards.count})"

    def dropout_masks(self, adapter: str) -> dict[str, int]:
        """Return what the next forward's dropout masks depend on, beside places of elements."""
        return {"key": self._mask_keys[adapter], "forwards": self._forwards.count}

    def restore_dropout_masks(self, adapter: str, key: int, forwards: int) -> None:
        """Let the next forward draw the dropout masks that ``key`` and ``forwards`` stand for."""
        self._mask_keys[adapter] = key
        self._forwards.count = forwards

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Apply the base and its active adapters."""
        if kwargs.pop("adapter_names", None) is not None:
            raise NotImplementedError(
                "adapter_names=: batches of several adapters are not supported on a parallel "
                "model; run the rows of each adapter by themselves, after model.set_adapter"
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = self.here(self.active_adapters)
        if self.disable_adapters or self.merged or not active:
            return self.base_layer(x, *args, **kwargs)
        return self._adapted_forward(x, active, *args, **kwargs)

    def _adapted_forward(self, x: torch.Tensor, active: list[str]) -> torch.Tensor:
        raise NotImplementedError


class AdaptedLinear(Adapted):
    """An adapter in the product of a linear layer, sharded by output or by input features."""

    def _add_factors(self, adapter: str, target: str, r: int, config: peft.LoraConfig) -> None:
        base = self.get_base_layer()
        layout_a, layout_b = factor_layouts(
            base, f"{target}.lora_A.{adapter}.weight", f"{target}.lora_B.{adapter}.weight", r
        )
        bias = None
        if config.lora_bias:
            if base.bias is None:
                warn_user(
                    f"lora_bias=True, but {target} has no bias, so the adapter cannot be merged"
                )
            bias = shard_like(layout_b, f"{target}.lora_B.{adapter}.bias", (base.out_features,))
        factor_a = self.lora_A[adapter] = Factor(layout_a, None, base.group)
        factor_b = self.lora_B[adapter] = Factor(layout_b, bias, base.group)
        self._draw_factors(config, r, (factor_a, factor_b))
        if config.use_dora:
            if not self.lora_magnitude_vector:
                self.adapter_layer_names = (*self.adapter_layer_names, "lora_magnitude_vector")
            name = f"{target}.lora_magnitude_vector.{adapter}.weight"
            weight = base.weight.detach()
            if factor_a.weight.is_meta:  # low_cpu_mem_usage: to be loaded
                lengths = weight.new_empty(len(weight), device="meta")
            else:
                lengths = self._row_norms(adapter, weight).to(weight.dtype)
            self.lora_magnitude_vector[adapter] = Magnitude(
                shard_like(layout_b, name, (base.out_features,)), lengths, base.group
            )

    def _row_norms(self, adapter: str, weight: torch.Tensor) -> torch.Tensor:
        factor_a, factor_b = self._factor_pair(adapter)
        return row_norms(self.get_base_layer(), weight, factor_a, factor_b, self.scaling[adapter])

    def _dropout(self, adapter: str, x: torch.Tensor) -> ops.Dropout | None:
        """Return the dropout of the adapter's input in the current forward; None without one."""
        layer = self.lora_dropout[adapter]
        if not isinstance(layer, nn.Dropout) or not layer.training:
            return None
        masks = layer.p, self._mask_keys[adapter], self._forwards
        return input_dropout(self.get_base_layer(), x, *masks)

    def _dropped(self, adapter: str, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's input after its dropout."""
        dropout = self._dropout(adapter, x)
        return x if dropout is None else ops.seeded_dropout(x, dropout)

    def _adapted_forward(self, x: torch.Tensor, active: list[str]) -> torch.Tensor:
        base = self.get_base_layer()
        if any(self.use_dora[name] for name in active):
            return self._with_lengths(x, active)
        return self._product(x, *base.for_use(), active, base.summed_over)

    def _with_lengths(self, x: torch.Tensor, active: list[str]) -> torch.Tensor:
        """Compute the output with an adapter of DoRA."""
        if len(active) > 1:
            raise NotImplementedError(
                f"{', '.join(active)} together are not supported, since one is of DoRA; activate "
                "one at a time by set_adapter"
            )
        (name,), base = active, self.get_base_layer()
        weight, bias = base.for_use()
        factor_a, factor_b, _ = factors_for_use(base, self.lora_A[name], self.lora_B[name])
        dropped = self._dropped(name, x)
        output = ops.lora_linear(dropped, weight, factor_a, factor_b, scale=self.scaling[name])
        factor = self.lora_magnitude_vector[name].over(self._row_norms(name, weight), base)
        output = (output * factor).to(output.dtype)
        if dropped is not x:  # dropout is the adapter's alone: the base has the rest of its input
            output = output + nn.functional.linear(x - dropped, weight)
        if base.summed_over.size > 1:
            output = ops.reduce_from_region(output, base.summed_over)
        return output if bias is None else output + bias.to(output.dtype)

    def check_merge(self, safe_merge: bool, adapter_names: list[str] | None, keep: bool) -> None:
        super().check_merge(safe_merge, adapter_names, keep)
        names = self.here(check_adapters_to_merge(self, adapter_names))
        for name in names if safe_merge else ():
            if self.use_dora[name] and not self._lengths(name).isfinite().all():
                raise ValueError(f"NaN or infinite lengths of rows: {name} seems broken")

    def _lengths(self, adapter: str) -> torch.Tensor:
        return local_part(self.lora_magnitude_vector[adapter].weight.detach())

    def _written(self, names: list[str], safe_merge: bool) -> dict[str, torch.Tensor]:
        if not any(self.use_dora[name] for name in names):
            return super()._written(names, safe_merge)
        (name,), base = names, self.get_base_layer()
        weight = base.weight.detach()
        factor_a, factor_b = (local_part(each.detach()) for each in self._factor_pair(name))
        factor_b, lengths = (rows_here(each, weight) for each in (factor_b, self._lengths(name)))
        norms = row_norms(base, local_part(weight), factor_a, factor_b, self.scaling[name])
        merged = local_part(weight) + rows_here(self._delta(name), weight)
        merged *= (lengths / norms).unsqueeze(1)
        return {"weight": merged.to(weight.dtype)}

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        active: list[str],
        group: Group = ops.ALONE,
    ) -> torch.Tensor:
        """Compute the product of the base plus those of the active adapters."""
        base = self.get_base_layer()
        factors = {
            name: factors_for_use(base, self.lora_A[name], self.lora_B[name]) for name in active
        }
        for name, (_, _, lora_bias) in factors.items():
            if lora_bias is not None:
                added = (lora_bias * self.scaling[name]).to(weight.dtype)
                bias = added if bias is None else bias + added
        dropouts = {name: self._dropout(name, x) for name in active}
        if len(active) == 1:
            (factor_a, factor_b, _), scale = factors[active[0]], self.scaling[active[0]]
        elif any(dropouts.values()):
            raise NotImplementedError(
                f"training {', '.join(active)} together with lora_dropout is not supported: their "
                "masks differ; train one at a time, or without dropout"
            )
        else:
            factor_a = torch.cat([a for a, _, _ in factors.values()])
            scaled = [b * self.scaling[name] for name, (_, b, _) in factors.items()]
            factor_b, scale = torch.cat(scaled, dim=1), 1.0
        return ops.lora_linear(
            x,
            weight,
            factor_a,
            factor_b,
            bias,
            scale=scale,
            dropout=dropouts[active[0]],
            group=group,
        )


class AdaptedBlocks(AdaptedLinear):
    """An adapter on a linear layer of blocks, with the same bits on any number of ranks.

    The base and each factor are products of their own. What flows between the factors, [T, r], is
    replicated: where the base is sharded by input features it is summed over the tree of blocks,
    and where by output features its gradient is.
    """

    def _adapted_forward(self, x: torch.Tensor, active: list[str]) -> torch.Tensor:
        base = self.get_base_layer()
        output = base(x)
        first, second = base.like_weight, replicated_linear
        if base.layouts["weight"].dim == 0:
            first, second = second, first
        for name in active:
            scale, bias = self.scaling[name], self.lora_B[name].bias
            factor_a, factor_b = (each.to(x.dtype) for each in self._factor_pair(name))
            low = first(self._dropped(name, x), factor_a) * scale
            added = second(low, factor_b, None if bias is None else (bias * scale).to(x.dtype))
            output += added.to(output.dtype)
        return output


class LoraVocabHead(AdaptedLinear):
    """An adapter on the output head: A is replicated, B sharded by vocabulary."""

    makes_logits = True

    def _low_rank(self, x: torch.Tensor, active: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the active adapters add to the logits as a product: [..., R] and [V, R]."""
        low, rows = [], []
        for name in active:
            scale, bias = self.scaling[name], self.lora_B[name].bias
            factor_a, factor_b = (each.to(x.dtype) for each in self._factor_pair(name))
            low.append(replicated_linear(self._dropped(name, x), factor_a) * scale)
            rows.append(factor_b)
            if bias is not None:
                low.append(torch.full_like(low[-1][..., :1], scale))
                rows.append(bias.to(x.dtype).unsqueeze(1))
        return torch.cat(low, -1), torch.cat(rows, -1)

    def _adapted_forward(self, x: torch.Tensor, active: list[str]) -> torch.Tensor:
        base, call = self.get_base_layer(), current_loss_call()
        if base.blocks is not None:
            factors = self._low_rank(x, active)
            if call is not None and call.fused:
                return call.hand_over(base, x, base.weight, factors)
            logits = base.in_blocks(x, base.weight)
            return base.leave(logits + base.in_blocks(*factors))
        x = base.enter(x)
        if call is None or call.tokens is None:
            x = entered(x, base.group, unchanged=True)
        else:
            x = ops.gather_tokens(x, call.tokens, base.group)
        return base.leave(self._product(x, base.weight, base.bias, active))


class OfAdapters(ShardedModule, nn.ParameterDict):
    """One parameter of an embedding for each adapter, in the place where PEFT keeps them."""

    def __init__(self, group: Group) -> None:
        super().__init__({}, group)

    def add(self, adapter: str, layout: TensorLayout, values: torch.Tensor | None = None) -> None:
        """Add a factor for an adapter, this rank's shard by ``layout``; zeros without values."""
        self.layouts[adapter] = layout
        if values is None:
            values = torch.zeros(layout.local_shape(self.group.rank))
        self[adapter] = nn.Parameter(values)

    def __delitem__(self, adapter: str) -> None:
        super().__delitem__(adapter)
        del self.layouts[adapter]


class LoraVocabEmbedding(Adapted):
    """An adapter on the embedding: A [r, V] is sharded by vocabulary, B [H, r] replicated.

    Both products are added to the partial rows before the base's one all-reduce, or reduce-scatter
    where each rank keeps its tokens. As in PEFT there is no dropout here.
    """

    def _prepare(self, base: Any) -> None:
        self.lora_embedding_A = OfAdapters(base.group)
        self.lora_embedding_B = OfAdapters(base.group)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.num_embeddings, module.embedding_dim

    def _add_factors(self, adapter: str, target: str, r: int, config: peft.LoraConfig) -> None:
        if config.lora_bias:
            raise ValueError(f"{target}: lora_bias=True is not supported on an embedding")
        base = self.get_base_layer()
        rows = base.layouts["weight"]
        columns = shard_along(
            f"{target}.lora_embedding_A.{adapter}",
            (r, rows.shape[0]),
            1,
            rows.first_ranges,
        )
        columns = replace(columns, blocks=rows.blocks)
        full = TensorLayout(f"{target}.lora_embedding_B.{adapter}", (rows.shape[1], r))
        self.lora_embedding_A.add(adapter, columns)
        self.lora_embedding_B.add(adapter, full)
        factors = [(self.lora_embedding_B[adapter], full)]
        if config.init_lora_weights is False:
            factors.append((self.lora_embedding_A[adapter], columns))
        for parameter, layout in factors:
            draw_by_name(parameter, layout, base.group.rank, ("normal", 1.0))

    def _factor_pair(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lora_embedding_A[adapter], self.lora_embedding_B[adapter]

    def _delta(self, adapter: str) -> torch.Tensor:
        return super()._delta(adapter).T

    def _adapted_forward(self, x: torch.Tensor, active: list[str]) -> torch.Tensor:
        base, ids = self.get_base_layer(), x.long()
        if base.layouts["weight"].blocks:
            return self._adapted_rows(ids, active)
        partial, tokens = base.rows(ids, base.weight), base.tokens(ids)
        for adapter in active:
            columns, factor_b = self._factor_pair(adapter)
            name = self.lora_embedding_B.layouts[adapter].name
            factor_b = for_use(factor_b, name, base.group, base.partials)
            low = base.rows(ids, columns.T.contiguous())
            partial = partial + ((low @ factor_b.T) * self.scaling[adapter]).to(partial.dtype)
        if tokens is None:
            return base.finished(ops.reduce_from_region(partial, base.group))
        return base.finished(ops.sum_tokens(partial, tokens, base.group), tokens)

    def _adapted_rows(self, ids: torch.Tensor, active: list[str]) -> torch.Tensor:
        """Return rows under ``px.Invariant``: those of A are looked up whole, and then times B."""
        base = self.get_base_layer()
        rows = base(ids)
        for adapter in active:
            columns, factor_b = self._factor_pair(adapter)
            low = base.rows(ids, columns.T.contiguous(), sizes=base.sizes, group=base.group)
            added = replicated_linear(low, factor_b) * self.scaling[adapter]
            rows = rows + base.finished(added.to(rows.dtype))
        return rows
