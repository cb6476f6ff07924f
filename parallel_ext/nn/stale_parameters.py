"""Refuse what would be lost with parameters that a model replaces: hooks, and steps on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallel_ext.distributed.errors import first_few
from parallel_ext.sharding._torch_private import gradient_hooks

# A parameter that nobody may train -> its name, and how an optimizer may have come to hold it.
_stale: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_stale(parameter: nn.Parameter, name: str, reason: str) -> None:
    """Mark ``parameter`` as replaced, so that :func:`refuse_stale` refuses steps on it.

    Args:
        parameter: what a model has held under ``name``.
        name: for the error.
        reason: how an optimizer came to hold it: "was built before px.parallelize, ...".
    """
    _stale[parameter] = (name, reason)


def replaced_by(function: str) -> str:
    """Return the reason, for an error, why ``function`` has made a parameter stale."""
    return f"was built before {function} and still holds parameters that it replaced"


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
