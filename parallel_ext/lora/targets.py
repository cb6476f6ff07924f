"""Find the modules that a LoRA configuration names, and refuse those that take no adapter."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from os.path import commonprefix

import peft
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.transformers_weight_conversion import (
    convert_peft_config_for_transformers,
    get_model_conversion_mapping,
)
from torch import nn

from parallel_ext.distributed.errors import first_few, warn_user
from parallel_ext.lora.merge import Mergeable
from parallel_ext.lora.tokens import refuse_tokens
from parallel_ext.nn.blocks import BlockColumnLinear, BlockRowLinear
from parallel_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.transposed_experts import TransposedExperts
from parallel_ext.nn.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead
from parallel_ext.parallel.beside import beginnings_inside
from parallel_ext.parallel.state import ParallelState

_LINEARS = (ColumnParallelLinear, RowParallelLinear, BlockColumnLinear, BlockRowLinear)
_WHOLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # of torch, which we replace


def _linears_beside(model: nn.Module) -> list[str]:
    """Return the paths of linears beside a parallel model, as in a tower of images, but a head."""
    inside = beginnings_inside(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [
        path.removesuffix(".base_layer")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ".lora_" not in path
        and module is not head
        and not path.startswith(inside)
    ]


def resolve_targets(model: nn.Module, config: peft.LoraConfig, state: ParallelState) -> None:
    """Write the targets into ``config`` by the names that they have in the model.

    "all-linear" means the linears of a parallel model and those beside it, which with dropout would
    have other masks on each tp rank. The names that experts had in transformers 4 (``w1``) become
    ``target_parameters``, as PEFT does a little later.
    """
    if str(config.target_modules).lower() == "all-linear":
        sharded = {
            path.removesuffix(".base_layer")
            for path, module in model.named_modules()
            if isinstance(module, _LINEARS)
        }
        beside = _linears_beside(model)
        if _draws_masks(config, state):
            if beside and state.mesh.rank == 0:
                warn_user(
                    f'target_modules="all-linear" with lora_dropout={config.lora_dropout} at '
                    f"tp={state.mesh.tp_size} adapts the linears of the parallel model. In one "
                    f"process, or without dropout, PEFT adapts these too: {first_few(beside)}"
                )
            beside = []
        config.target_modules = {*sharded, *beside}
    convert_peft_config_for_transformers(config, model, get_model_conversion_mapping(model))


def refuse_targets(
    model: nn.Module, config: peft.LoraConfig, op_name: str, state: ParallelState
) -> None:
    """Raise unless everything that ``config`` names, as resolved, takes such an adapter.

    Raises:
        NotImplementedError: a module or parameter takes none, or not with these options.
        ValueError: names or options do not go together, or are of nothing in the model.
    """
    targeted = _targeted(model, config)
    _refuse_mixture(model, targeted, op_name, state)
    _refuse_parameters(model, config, op_name)
    _refuse_whole(model, config, targeted, op_name, state)
    _refuse_both_ends(model, config, targeted, op_name)
    _refuse_borrowed_weight(model, config, targeted, op_name)
    refuse_tokens(model, config, op_name)
    _refuse_dora(config, targeted, op_name, state)


def _targeted(model: nn.Module, config: peft.LoraConfig) -> dict[str, nn.Module]:
    """Map paths that ``target_modules`` names to their modules, without adapters around these."""
    if not config.target_modules:
        return {}
    return {
        path: module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        for path, module in model.named_modules()
        if check_target_module_exists(config, path)
    }


def _draws_masks(config: peft.LoraConfig, state: ParallelState) -> bool:
    """Return whether adapters of PEFT's own would be trained with masks of each tp rank."""
    return bool(config.lora_dropout) and state.mesh.tp_size > 1 and not config.inference_mode


def _refuse_mixture(
    model: nn.Module, targeted: Iterable[str], op_name: str, state: ParallelState
) -> None:
    """Refuse an adapter on a module of a mixture of experts, which PEFT would wrap on its own."""
    mixture = state.spec.mixture
    for path in targeted if mixture is not None else ():
        if path.endswith(mixture.experts):
            reached = experts_tensors(model)
            experts = f", and experts by target_parameters={reached}" if reached else ""
            raise NotImplementedError(
                f"{op_name}: an adapter on {path} is not supported; target attention and head"
                + (experts or "; these experts take no adapter")
            )


def _refuse_whole(
    model: nn.Module,
    config: peft.LoraConfig,
    targeted: Mapping[str, nn.Module],
    op_name: str,
    state: ParallelState,
) -> None:
    """Refuse an adapter on a module of a parallel model that every rank holds whole.

    One beside the model, as in a tower of images, takes PEFT's own, which begin with equal factors;
    but it is not trained with dropout at tp > 1, whose masks each rank would draw for itself.
    """
    inside = beginnings_inside(model)
    for path, base in targeted.items():
        if not isinstance(base, _WHOLE):
            continue
        if path.startswith(inside):
            reasons = state.spec.unadapted.items()
            why = [reason for beginning, reason in reasons if path.startswith(beginning)]
            raise NotImplementedError(
                f"{op_name}: an adapter on {path} is not supported: "
                + (why[0] if why else "every rank holds it whole, and adapters lie as their base")
                + '; target others, or "all-linear" for all that are sharded'
                + _by_path(targeted)
            )
        if _draws_masks(config, state):
            raise NotImplementedError(
                f"{op_name}: lora_dropout={config.lora_dropout} on {path} is not supported at "
                f"tp={state.mesh.tp_size}: every rank holds it whole, and would draw masks of its "
                "own; leave it out, or the dropout" + _by_path(targeted)
            )


def _by_path(targeted: Mapping[str, nn.Module]) -> str:
    """Tell how to name what of a configuration's targets is sharded, if anything is."""
    paths = [path for path, base in targeted.items() if isinstance(base, _LINEARS)]
    if not paths:
        return ""
    names = sorted({path.rpartition(".")[2] for path in paths})
    above = commonprefix([path.rpartition(".")[0] + "." for path in paths]).rpartition(".")[0]
    pattern = rf"{re.escape(above)}\..*\b({'|'.join(names)})"
    return f', or target_modules=r"{pattern}" for these of them'


def _refuse_both_ends(
    model: nn.Module, config: peft.LoraConfig, targeted: Container[str], op_name: str
) -> None:
    """Raise a ValueError if adapters would be on embedding and head that share one weight."""
    ends = []
    for path, module in model.named_modules():
        base = module.get_base_layer() if isinstance(module, Mergeable) else module
        if not getattr(base, "tied", False) or path.endswith(".base_layer"):
            continue
        if path in targeted and config.trainable_token_indices:
            raise NotImplementedError(
                f"{op_name}: an adapter on {path}, which shares its weight with the other end, "
                "beside trainable_token_indices is not supported; leave one of them out, or untie "
                "embedding and head"
            )
        if path in targeted or getattr(module, "scaling", None):
            ends.append(path)
    if len(ends) > 1 or (ends and config.ensure_weight_tying):
        raise ValueError(
            f"{op_name}: embedding and head ({' and '.join(ends)}) share one weight, and adapters "
            "on both ends cannot share it; target one of the two, or untie them"
        )


def _refuse_borrowed_weight(
    model: nn.Module, config: peft.LoraConfig, targeted: Container[str], op_name: str
) -> None:
    """Refuse to train or adapt a head whose weight is that of the embedding in a decoder.

    PEFT's copy would have no weight, and nothing would be trained.
    """
    kept, ties = tuple(config.modules_to_save or ()), config.ensure_weight_tying
    for path, module in model.named_modules():
        if not isinstance(module, TiedHead):
            continue
        if path.endswith(kept) or path in targeted or (kept and ties):
            option = "target_modules" if path in targeted else "modules_to_save"
            raise NotImplementedError(
                f"{op_name}: {'ensure_weight_tying' if ties else option} names {path}, "
                "whose weight is that of the embedding in the parallel decoder; leave it out, or "
                "untie it before px.parallelize"
            )


def experts_tensors(model: nn.Module) -> list[str]:
    """Return the ``target_parameters`` that reach all experts, such as ``experts.down_proj``."""
    return sorted({".".join(name.split(".")[-2:]) for name in _tensors_of_experts(model)})


def _tensors_of_experts(model: nn.Module) -> list[str]:
    return [
        f"{path.replace('.base_layer', '')}.{attribute}"
        for path, module in model.named_modules()
        if isinstance(module, ExpertParallelExperts) and not isinstance(module, TransposedExperts)
        for attribute in module.layouts
    ]


def _refuse_parameters(model: nn.Module, config: peft.LoraConfig, op_name: str) -> None:
    """Raise unless ``target_parameters`` are tensors of experts, without dropout or bias."""
    if not config.target_parameters:
        return
    served, wanted = set(_tensors_of_experts(model)), sorted(config.target_parameters)
    if not served:
        has_experts = any(isinstance(each, TransposedExperts) for each in model.modules())
        which = "with the experts of GPT-OSS or Llama 4" if has_experts else "without experts"
        raise NotImplementedError(
            f"{op_name}: LoRA on a parallel model {which} does not support "
            f"target_parameters={wanted}; use target_modules"
        )
    everything = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]
    for target in wanted:
        found = [name for name in everything if f".{name}".endswith(f".{target}")]
        others = [name for name in found if name not in served]
        if others:
            raise NotImplementedError(
                f"{op_name}: an adapter on {others[0]} is not supported; of all parameters only "
                f"the tensors of experts take one: target_parameters={experts_tensors(model)}"
            )
        if not found:
            raise ValueError(
                f"{op_name}: the model has no parameter {target}; its experts are reached by "
                f"target_parameters={experts_tensors(model)}"
            )
    for option in ("lora_dropout", "lora_bias"):
        value = getattr(config, option)
        if value:
            raise ValueError(
                f"{op_name}: {option}={value!r} does not go with target_parameters={wanted}, in "
                "PEFT neither: the adapter is added to the experts' weight; leave it out"
            )


def _refuse_dora(
    config: peft.LoraConfig, targeted: Mapping[str, nn.Module], op_name: str, state: ParallelState
) -> None:
    """Refuse DoRA on anything but linears that are sharded by rows or columns."""
    if not config.use_dora:
        return
    if state.invariant is not None:
        raise NotImplementedError(f"{op_name}: px.Invariant does not serve use_dora=True")
    if config.target_parameters:
        raise NotImplementedError(f"{op_name}: use_dora=True does not go with target_parameters")
    for path, base in targeted.items():
        if isinstance(base, (VocabParallelEmbedding, VocabParallelHead)):
            raise NotImplementedError(
                f"{op_name}: use_dora=True on {path} is not supported; target linears of the layers"
            )
