"""``torch.distributed.checkpoint`` and its functions on state dicts.

The tensors of ``state_dict()`` know their place (:mod:`parallel_ext.sharding.shards`), so that DCP
saves and loads them as they are. What is left are its options that ask for full tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from parallel_ext.interplay.refusals import Refusal, refuse
from parallel_ext.io.state_dict import gather_state_dict
from parallel_ext.nn.extended import extend, extend_by_name
from parallel_ext.parallel.state import own_state

_MODULE = "torch.distributed.checkpoint.state_dict"
_INSTEAD = (
    "without full_state_dict=True its tensors are shards that torch.distributed.checkpoint saves; "
    "px.save_checkpoint saves model and optimizer"
)


def extend_dcp() -> None:
    """Extend ``torch.distributed.checkpoint`` so that it knows parallel models."""
    extend(dcp.save, save)
    extend_by_name(of_torch, get_model_state_dict, set_model_state_dict)
    for of_what in ("state_dict", "optimizer_state_dict"):
        for name in (f"get_{of_what}", f"set_{of_what}"):
            extend(getattr(of_torch, name), _without_full_tensors(name))


def save(plain: Callable[..., Any], state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Extend ``dcp.save`` to refuse bare parameters, which it would take for equal on all ranks."""
    refuse(
        Refusal(
            "torch.distributed.checkpoint:save of bare parameters",
            "pass model.state_dict(), whose tensors know their place in the full ones",
        ),
        _parameters_in(state_dict),
    )
    return plain(state_dict, *args, **kwargs)


def _parameters_in(value: Any) -> list[nn.Parameter]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [parameter for inner in value for parameter in _parameters_in(inner)]
    return [value] if isinstance(value, nn.Parameter) else []


def _wants_full(kwargs: dict[str, Any]) -> bool:
    options: StateDictOptions | None = kwargs.get("options")
    return options is not None and options.full_state_dict


def _without_full_tensors(name: str) -> Callable[..., Any]:
    """Return an extension that refuses ``full_state_dict=True`` for a parallel model."""
    refusal = Refusal(f"{_MODULE}:{name}(full_state_dict=True)", _INSTEAD)

    def extension(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _wants_full(kwargs):
            refuse(refusal, args, kwargs)
        return plain(*args, **kwargs)

    return extension


def get_model_state_dict(
    plain: Callable[..., Any], model: nn.Module, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """Extend ``get_model_state_dict`` to gather full tensors, if asked to; every rank calls it."""
    state = own_state(model)
    if not _wants_full(kwargs):
        return plain(model, **kwargs)
    if state is None:
        refuse(Refusal(f"{_MODULE}:get_model_state_dict of a wrapper", _INSTEAD), model)
        return plain(model, **kwargs)
    options = kwargs["options"]
    full = gather_state_dict(model, state.mesh, state.layout, writer_only=options.cpu_offload)
    if options.ignore_frozen_params:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                full.pop(name, None)
    return full


def set_model_state_dict(
    plain: Callable[..., Any], model: nn.Module, model_state_dict: dict[str, Any], **kwargs: Any
) -> Any:
    """Extend ``set_model_state_dict`` to refuse full tensors after ``px.data_parallel``."""
    state = own_state(model)
    if state is not None and state.fsdp_sharded and _wants_full(kwargs):
        instead = "load them before px.data_parallel, or a checkpoint by px.load_checkpoint"
        refuse(Refusal(f"{_MODULE}:set_model_state_dict of full tensors", instead), model)
    return plain(model, model_state_dict, **kwargs)
