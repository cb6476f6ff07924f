"""Find what stands in the place of parameters that a model has replaced, or refuse their use."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallel_ext.distributed.errors import first_few
from parallel_ext.sharding._torch_private import gradient_hooks, own_parameters

# A parameter that nobody may train -> its name, and how an optimizer may have come to hold it.
_stale: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Such a parameter -> a weak reference to what stands in its place.
_new: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_stale(parameter: nn.Parameter, name: str, reason: str) -> None:
    """Mark ``parameter`` as replaced, so that :func:`refuse_stale` refuses steps on it.

    Args:
        parameter: what a model has held under ``name``.
        name: for the error.
        reason: how an optimizer came to hold it: "was built before px.parallelize, ...".
    """
    _stale[parameter] = (name, reason)


def mark_replaced(old: nn.Parameter, new: nn.Parameter, name: str, function: str) -> None:
    """Mark ``old`` as stale, since ``function`` has put ``new`` in its place.

    :func:`newest` finds the new one. A gradient that reaches the old one raises.

    Args:
        old, new: what a model has held under ``name``, and holds now.
        name: for errors.
        function: such as "px.parallelize", for errors.
    """
    reason = f"was built before {function} and still holds parameters that it replaced"
    mark_stale(old, name, reason)
    _new[old] = weakref.ref(new)
    if old.requires_grad:
        old.register_hook(partial(_refuse_gradient, name, function))


def newest(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a model holds now in the place of a parameter; other tensors as they are."""
    while (reference := _new.get(tensor)) is not None and (new := reference()) is not None:
        tensor = new
    return tensor


def _refuse_gradient(name: str, function: str, gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        f"a gradient reaches {name} as it was before {function}, which has replaced it; take it "
        "from the model again"
    )


def watch_replaced(module: nn.Module) -> None:
    """Let a module that another one has replaced in a model raise where it runs with old weights.

    Raises:
        RuntimeError: of its forward, if one of its parameters is stale; names it.
    """
    module.register_forward_pre_hook(_refuse_old_module)


def _refuse_old_module(module: nn.Module, args: Any) -> None:
    for parameter in own_parameters(module).values():
        if parameter is not None and parameter in _stale:
            name, reason = _stale[parameter]
            raise RuntimeError(
                f"this {type(module).__name__} {reason}: {name}; take it from the model again"
            )


def refuse_gradient_hooks(op_name: str, name: str, parameter: nn.Parameter) -> None:
    """Raise if a parameter that is to be replaced has hooks, which the new one would not have."""
    if any(gradient_hooks(parameter)):
        raise ValueError(
            f"{op_name}: {name} has gradient hooks, which would be lost; add them after {op_name}"
        )


def refuse_stale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer holds parameters that :func:`mark_stale` has marked.

    A hook for ``register_optimizer_step_pre_hook``.

    Raises:
        RuntimeError: it does; names them.
    """
    found = [
        _stale[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in _stale
    ]
    if found:
        names = first_few([name for name, _ in found])
        raise RuntimeError(
            f"{type(optimizer).__name__} {found[0][1]}: {names}; build the optimizer from the "
            "parallel model"
        )
