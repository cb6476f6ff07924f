"""LoRA on parallel linears: PEFT's configuration, names and files; factors cut like their base.

Import this module (or use ``px.LoraConfig``) before PEFT loads an adapter into a parallel model.
"""

from __future__ import annotations

import dataclasses
import math
from functools import wraps
from typing import Any

import peft
import torch
import torch.distributed as dist
import xxhash
from peft.tuners.lora.layer import Linear as PeftLoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from parallel_ext import ops
from parallel_ext.checkpoint import gather_in_step
from parallel_ext.layout import TensorLayout
from parallel_ext.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.ops import Group
from parallel_ext.partial_gradients import PartialGradients
from parallel_ext.sharded import ShardedModule, named_shards, take
from parallel_ext.state import state_of

# What a configuration may say of a parallel linear; everything else must be as PEFT's default.
_SUPPORTED = {
    *("r", "lora_alpha", "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "peft_type", "auto_mapping", "peft_version", "inference_mode"),
    *("base_model_name_or_path", "revision", "runtime_config"),
}


class LoraConfig(peft.LoraConfig):
    """``peft.LoraConfig`` whose adapters also fit the linears of a parallel model.

    Everything is as in PEFT; on a parallel model each rank holds its part of the factors, and what
    is not supported there is refused by name.

    Example:
        >>> config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"])
        >>> config.r
        8
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._register_custom_module(
            {ColumnParallelLinear: LoraColumnLinear, RowParallelLinear: LoraRowLinear}
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> LoraConfig:
        """As PEFT's, returning this class."""
        config = peft.LoraConfig.from_pretrained(*args, **kwargs)
        fields = (field.name for field in dataclasses.fields(peft.LoraConfig) if field.init)
        return cls(**{name: getattr(config, name) for name in fields})


def _refuse_unsupported(config: peft.LoraConfig, where: str) -> None:
    default = peft.LoraConfig()
    given = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(peft.LoraConfig)
        if field.name not in _SUPPORTED
        and getattr(config, field.name) != getattr(default, field.name)
    ]
    if config.init_lora_weights not in (True, False, "gaussian"):
        given.append(f"init_lora_weights={config.init_lora_weights!r}")
    if given:
        raise NotImplementedError(
            f"{where}: LoRA on a parallel linear does not support {', '.join(given)}"
        )


class _Factor(ShardedModule):
    """One factor of an adapter: a weight of which this rank holds its part, or all."""

    def __init__(self, layout: TensorLayout, group: Group) -> None:
        super().__init__({"weight": layout}, group)
        self.out_features, self.in_features = layout.shape
        self.weight = nn.Parameter(torch.zeros(layout.local_shape(group.rank)))

    def draw(self, distribution: str, size: float) -> None:
        """Fill with this rank's part of random numbers that depend on seed and name alone."""
        layout = self.layouts["weight"]
        generator = torch.Generator().manual_seed(
            xxhash.xxh3_64_intdigest(f"{_common_seed()} {layout.name}".encode()) >> 1
        )
        full = torch.empty(layout.shape)
        if distribution == "uniform":
            full.uniform_(-size, size, generator=generator)
        else:
            full.normal_(0.0, size, generator=generator)
        with torch.no_grad():
            self.weight.copy_(take(full, layout, self.group.rank))


def _common_seed() -> int:
    """Rank 0's seed, so that the ranks need not be seeded alike."""
    seed = torch.tensor([[torch.initial_seed() & (2**62 - 1)]])
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return int(seed)
    everyone = Group.of(dist.group.WORLD)
    if "nccl" in str(dist.get_backend()):
        seed = seed.cuda()
    return int(ops.gather_from_tp(seed, [1] * everyone.size, everyone)[0, 0])


class _LoraLinear(PeftLoraLinear):
    """What the two kinds share: PEFT's bookkeeping and merging, our factors and product."""

    def __init__(
        self,
        base_layer: ColumnParallelLinear | RowParallelLinear,
        adapter_name: str,
        config: peft.LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config, **kwargs)

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
        _refuse_unsupported(config, target_name)
        if r <= 0:
            raise ValueError(f"{target_name}: r must be at least 1, got {r}")
        base = self.get_base_layer()
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name] = config.use_rslora
        self.use_dora[adapter_name] = self.lora_bias[adapter_name] = False
        self.lora_dropout[adapter_name] = nn.Identity()
        layouts = self._factor_layouts(
            f"{target_name}.lora_A.{adapter_name}.weight",
            f"{target_name}.lora_B.{adapter_name}.weight",
            r,
        )
        for factors, layout in zip((self.lora_A, self.lora_B), layouts, strict=True):
            factors[adapter_name] = _Factor(layout, base.group)
        if config.init_lora_weights is True:  # nn.Linear's own: uniform by the global fan-in
            self.lora_A[adapter_name].draw("uniform", base.in_features**-0.5)
        elif config.init_lora_weights == "gaussian":
            self.lora_A[adapter_name].draw("normal", 1 / r)
        elif config.init_lora_weights is False:  # as PEFT: both factors random
            self.lora_A[adapter_name].draw("uniform", base.in_features**-0.5)
            self.lora_B[adapter_name].draw("uniform", r**-0.5)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _factor_layouts(self, name_a: str, name_b: str, r: int) -> tuple[TensorLayout, ...]:
        raise NotImplementedError

    def _product(
        self, x: torch.Tensor, factor_a: torch.Tensor, factor_b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        raise NotImplementedError

    def _caught(self, factor: _Factor, group: Group) -> torch.Tensor:
        """A factor for use in a forward, whose gradient is partial over ``group``."""
        partials: PartialGradients | None = self.get_base_layer().partials
        if group.size == 1 or partials is None or not factor.weight.requires_grad:
            return factor.weight
        return partials.catch(factor.weight, factor.layouts["weight"].name, group)

    def _for_use(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The base and its active adapters, in one product and without a further collective."""
        if kwargs.pop("adapter_names", None) is not None:
            raise NotImplementedError("batches of several adapters are not supported here")
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return self.base_layer(x, *args, **kwargs)
        factors = [self._for_use(name) for name in active]
        if len(active) == 1:
            return self._product(x, *factors[0], self.scaling[active[0]])
        stacked_a = torch.cat([a for a, _ in factors])
        scaled = [b * self.scaling[name] for name, (_, b) in zip(active, factors, strict=True)]
        return self._product(x, stacked_a, torch.cat(scaled, dim=1), 1.0)


class LoraColumnLinear(_LoraLinear):
    """An adapter on a base cut by output features: A is replicated, B cut like the base."""

    def _factor_layouts(self, name_a: str, name_b: str, r: int) -> tuple[TensorLayout, ...]:
        base = self.get_base_layer()
        like_base = dataclasses.replace(
            base.layouts["weight"], name=name_b, shape=(base.out_features, r)
        )
        return TensorLayout(name_a, (r, base.in_features)), like_base

    def _for_use(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        base = self.get_base_layer()
        return (
            self._caught(self.lora_A[adapter], base.group),
            self._caught(self.lora_B[adapter], base.replicas),
        )

    def _product(
        self, x: torch.Tensor, factor_a: torch.Tensor, factor_b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        weight, bias = self.get_base_layer().for_use()
        return ops.lora_linear(x, weight, factor_a, factor_b, bias, scale=scale)


class LoraRowLinear(_LoraLinear):
    """An adapter on a base cut by input features: A is cut like the base, B replicated."""

    def _factor_layouts(self, name_a: str, name_b: str, r: int) -> tuple[TensorLayout, ...]:
        base = self.get_base_layer()
        like_base = dataclasses.replace(
            base.layouts["weight"], name=name_a, shape=(r, base.in_features)
        )
        return like_base, TensorLayout(name_b, (base.out_features, r))

    def _for_use(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        base = self.get_base_layer()
        return self.lora_A[adapter].weight, self._caught(self.lora_B[adapter], base.group)

    def _product(
        self, x: torch.Tensor, factor_a: torch.Tensor, factor_b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        base = self.get_base_layer()
        return ops.lora_linear(
            x, base.weight, factor_a, factor_b, base.bias, scale=scale, group=base.group
        )


_plain_save_pretrained = peft.PeftModel.save_pretrained


@wraps(_plain_save_pretrained)
def _save_pretrained(self: peft.PeftModel, save_directory: str, *args: Any, **kwargs: Any) -> None:
    """On a parallel model all ranks call it: adapters are gathered, and rank 0 writes them."""
    try:
        state = state_of(self)
    except TypeError:
        _plain_save_pretrained(self, save_directory, *args, **kwargs)
        return
    mesh, what = state.mesh, f"save_pretrained of an adapter to {save_directory}"
    mesh.meet(what)
    adapters = {
        name: (parameter, layout)
        for name, parameter, layout in named_shards(self)
        if any(part in LoraLayer.adapter_layer_names for part in name.split("."))
    }
    full = gather_in_step(adapters, mesh, what)
    kwargs.pop("is_main_process", None)

    def write() -> None:
        if mesh.rank == 0:
            _plain_save_pretrained(self, save_directory, *args, state_dict=full, **kwargs)

    mesh.together(what, write)


peft.PeftModel.save_pretrained = _save_pretrained
peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType.LORA] = LoraConfig
