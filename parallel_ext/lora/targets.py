"""What a configuration targets in a parallel model: its names resolved, and what is refused."""

from __future__ import annotations

import peft
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.transformers_weight_conversion import (
    convert_peft_config_for_transformers,
    get_model_conversion_mapping,
)
from torch import nn

from parallel_ext.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.moe import ExpertParallelExperts
from parallel_ext.state import ParallelState

_WHOLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # of torch, which we replace


def resolve_targets(model: nn.Module, config: peft.LoraConfig) -> None:
    """Write the targets into ``config`` by the names that they have in the model.

    "all-linear" means the linears of a parallel model. The names that experts had in transformers 4
    (``w1``) become ``target_parameters``, as PEFT does a little later.
    """
    if str(config.target_modules).lower() == "all-linear":
        config.target_modules = {
            path.removesuffix(".base_layer")
            for path, module in model.named_modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        }
    convert_peft_config_for_transformers(config, model, get_model_conversion_mapping(model))


def refuse_mixture(
    model: nn.Module, config: peft.LoraConfig, what: str, state: ParallelState
) -> None:
    """No adapter on the modules of a mixture, which PEFT would wrap in modules of its own.

    Raises:
        NotImplementedError: names the first of them that ``config`` targets.
    """
    mixture = state.table.mixture
    if mixture is None or not config.target_modules:
        return
    _, *parts = mixture.modules()
    for path, _ in model.named_modules():
        if path.endswith(tuple(parts)) and check_target_module_exists(config, path):
            raise NotImplementedError(
                f"{what}: an adapter on {path} is not supported; target attention and head, and "
                f"experts by target_parameters={experts_tensors(model)}"
            )


def refuse_whole(
    model: nn.Module, config: peft.LoraConfig, what: str, state: ParallelState
) -> None:
    """No adapter on modules that every rank holds whole.

    Those of PEFT would begin with other factors, and draw other dropout masks, on each rank.

    Raises:
        NotImplementedError: names the first of them that ``config`` targets, and why.
    """
    if not config.target_modules:
        return
    for path, module in model.named_modules():
        if isinstance(module, _WHOLE) and check_target_module_exists(config, path):
            reasons = state.table.unadapted.items()
            why = [reason for beginning, reason in reasons if path.startswith(beginning)]
            raise NotImplementedError(
                f"{what}: an adapter on {path} is not supported: "
                + (why[0] if why else "it is whole on every rank, and adapters are cut with a base")
                + '; target others, or "all-linear" for all that are cut'
            )


def experts_tensors(model: nn.Module) -> list[str]:
    """Names that as ``target_parameters`` reach all tensors of experts: ``experts.down_proj``."""
    return sorted({".".join(name.split(".")[-2:]) for name in _tensors_of_experts(model)})


def _tensors_of_experts(model: nn.Module) -> list[str]:
    return [
        f"{path.replace('.base_layer', '')}.{attribute}"
        for path, module in model.named_modules()
        if isinstance(module, ExpertParallelExperts)
        for attribute in module.layouts
    ]


def refuse_parameters(model: nn.Module, config: peft.LoraConfig, what: str) -> None:
    """Of all parameters only the tensors of experts take an adapter, without dropout or bias.

    Raises:
        NotImplementedError: names another parameter that ``config`` targets.
        ValueError: a target is not there, or an option does not go with it, in PEFT neither.
    """
    if not config.target_parameters:
        return
    served, wanted = set(_tensors_of_experts(model)), sorted(config.target_parameters)
    if not served:
        raise NotImplementedError(
            f"{what}: LoRA on a parallel model without experts does not support "
            f"target_parameters={wanted}; use target_modules"
        )
    everything = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]
    for target in wanted:
        found = [name for name in everything if f".{name}".endswith(f".{target}")]
        others = [name for name in found if name not in served]
        if others:
            raise NotImplementedError(
                f"{what}: an adapter on {others[0]} is not supported; of all parameters only the "
                f"tensors of experts take one: target_parameters={experts_tensors(model)}"
            )
        if not found:
            raise ValueError(
                f"{what}: the model has no parameter {target}; its experts are reached by "
                f"target_parameters={experts_tensors(model)}"
            )
    for option in ("lora_dropout", "lora_bias"):
        value = getattr(config, option)
        if value:
            raise ValueError(
                f"{what}: {option}={value!r} does not go with target_parameters={wanted}, in PEFT "
                "neither: the adapter is added to the experts' weight; leave it out"
            )
