"""Add adapters to parallel models: what PEFT calls to make one, extended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import ModulesToSaveWrapper
from torch import nn

from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.lora._peft_private import register_layers
from parallel_ext.lora.config import refuse_unsupported
from parallel_ext.lora.experts import ParamWrapper
from parallel_ext.lora.files import parallel_state
from parallel_ext.lora.layers import (
    AdaptedBlocks,
    AdaptedLinear,
    LoraVocabEmbedding,
    LoraVocabHead,
)
from parallel_ext.lora.merge import Mergeable
from parallel_ext.lora.seeds import seeded_by
from parallel_ext.lora.targets import refuse_targets, resolve_targets
from parallel_ext.nn.blocks import BlockColumnLinear, BlockRowLinear
from parallel_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from parallel_ext.parallel.adopting import adopt_trained
from parallel_ext.parallel.joining import arrive, remember
from parallel_ext.parallel.state import ParallelState
from parallel_ext.parallel.watch_forward import watch_forward
from parallel_ext.sharding.named_shards import named_shards


class _NoMasks(nn.Dropout):
    """The dropout of an adapter that was loaded for inference: raises where it would draw masks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise NotImplementedError(
                f"lora_dropout={self.p:g} on what every rank holds whole, as a tower of images, "
                "would have masks of its own on each tp rank; call model.eval(), or load the "
                "adapter with lora_dropout=0"
            )
        return input


def _refuse_masks(model: nn.Module, adapter_name: str) -> None:
    """Let PEFT's own layers of an adapter refuse to draw dropout masks."""
    for module in model.modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Mergeable):
            dropout = module.lora_dropout[adapter_name] if adapter_name in module.r else None
            if isinstance(dropout, nn.Dropout):
                module.lora_dropout[adapter_name] = _NoMasks(dropout.p)


LAYERS = {
    ColumnParallelLinear: AdaptedLinear,
    RowParallelLinear: AdaptedLinear,
    BlockColumnLinear: AdaptedBlocks,
    BlockRowLinear: AdaptedBlocks,
    VocabParallelHead: LoraVocabHead,
    VocabParallelEmbedding: LoraVocabEmbedding,
    ExpertParallelExperts: ParamWrapper,
}
"""Module of a parallel model -> what PEFT puts around it."""

_COMBINABLE = ("linear", "cat")  # element by element, so a rank can do its own part


def get_peft_model(
    plain: Callable[..., Any], model: nn.Module, peft_config: peft.PeftConfig, *args: Any, **kw: Any
) -> Any:
    """Extend ``peft.get_peft_model``: refuse at once what is not LoRA on a parallel model."""
    _checked_state(model, "get_peft_model", peft_config)
    return plain(model, peft_config, *args, **kw)


def _checked_state(
    model: nn.Module, op_name: str, *configs: peft.PeftConfig
) -> ParallelState | None:
    """Return the state of a parallel model; raise if it cannot serve adapters of these ``configs``.

    Under px.patch an adapter that is to be trained makes a model parallel.
    """
    if any(not config.inference_mode for config in configs):
        adopt_trained(model, "an adapter")
    state = parallel_state(model)
    for config in configs if state is not None else ():
        refuse_unsupported(config, op_name)
    return state


def start_model(
    plain: Callable[..., None],
    self: peft.PeftModel,
    model: nn.Module,
    peft_config: peft.PeftConfig,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend ``PeftModel.__init__``: refuse what is not LoRA on a parallel model."""
    state = _checked_state(model, "PeftModel", peft_config)
    plain(self, model, peft_config, *args, **kwargs)
    if state is not None:
        watch_forward(self)
        remember(self)


def start_tuner(
    plain: Callable[..., None],
    self: BaseTuner,
    model: nn.Module,
    peft_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend ``BaseTuner.__init__``: refuse what is not LoRA on a parallel model."""
    configs = peft_config.values() if isinstance(peft_config, dict) else [peft_config]
    _checked_state(model, type(self).__name__, *configs)
    plain(self, model, peft_config, *args, **kwargs)


def inject_adapter(
    plain: Callable[..., None],
    self: peft.LoraModel,
    model: nn.Module,
    adapter_name: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend ``LoraModel.inject_adapter``: add layers of a parallel model; all ranks call it."""
    state, config = parallel_state(model), self.peft_config[adapter_name]
    if state is None:
        plain(self, model, adapter_name, *args, **kwargs)
        return
    op_name = f"adding adapter {adapter_name!r}"
    arrive(op_name)
    state.mesh.control.barrier(op_name)

    def check() -> None:
        refuse_unsupported(config, op_name)
        if state.zero is not None and state.mesh.dp_size > 1:
            raise RuntimeError(f"{op_name}: add adapters before px.data_parallel shards the model")
        resolve_targets(model, config, state)
        refuse_targets(model, config, op_name, state)

    state.mesh.control.run_on_all(op_name, check)
    seed = _agree_on(config, op_name, state)
    register_layers(config, LAYERS)
    with seeded_by(seed):
        plain(self, model, adapter_name, *args, **kwargs)
    if state.mesh.tp_size > 1:
        _refuse_masks(model, adapter_name)
    state.adapted = True


def _agree_on(config: peft.LoraConfig, op_name: str, state: ParallelState) -> int:
    """Raise unless the ranks' configurations are equal, and return rank 0's seed for all."""
    own = {
        name: repr(sorted(value) if isinstance(value, set) else value)
        for name, value in config.to_dict().items()
        if name not in ("base_model_name_or_path", "revision")  # may differ from host to host
    }
    advice = "give all ranks the same configuration"
    require_equal(state.mesh.control, op_name, own, advice=advice)
    return state.mesh.control.all_gather_object(torch.initial_seed())[0]


def copy_to_save(
    plain: Callable[..., None],
    self: ModulesToSaveWrapper,
    adapter_name: str,
    tied_module: nn.Module | None = None,
    **kwargs: Any,
) -> None:
    """Extend ``ModulesToSaveWrapper.update``: tie a head to the copy of a parallel embedding."""
    if not isinstance(tied_module, VocabParallelEmbedding):
        plain(self, adapter_name, tied_module, **kwargs)
        return
    plain(self, adapter_name, **kwargs)
    self.modules_to_save[adapter_name].weight = tied_module.weight


def count_parameters(
    plain: Callable[..., tuple[int, int]], self: peft.PeftModel
) -> tuple[int, int]:
    """Extend ``get_nb_trainable_parameters``: count the whole model, not this rank's part."""
    if parallel_state(self) is None:
        return plain(self)
    sizes = [(p.requires_grad, layout.numel) for _, p, layout in named_shards(self)]
    return sum(size for trained, size in sizes if trained), sum(size for _, size in sizes)


def add_weighted_adapter(
    plain: Callable[..., Any],
    self: peft.LoraModel,
    adapters: list[str],
    weights: list[float],
    adapter_name: str,
    combination_type: str = "svd",
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Extend ``LoraModel.add_weighted_adapter``: refuse what needs more than this rank's shards."""
    state = parallel_state(self.model)
    if state is not None and state.mesh.tp_size > 1 and combination_type not in _COMBINABLE:
        raise NotImplementedError(
            f"add_weighted_adapter(combination_type={combination_type!r}) at "
            f"tp={state.mesh.tp_size} needs whole factors; use {' or '.join(_COMBINABLE)}"
        )
    if state is not None and any(self.peft_config[name].use_dora for name in adapters):
        raise NotImplementedError("add_weighted_adapter does not combine adapters of DoRA")
    return plain(self, adapters, weights, adapter_name, combination_type, *args, **kwargs)
