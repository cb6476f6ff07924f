"""Optimizers that still hold parameters which a model has no more are refused when they step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

# Old parameter -> its name, and the function that replaced it.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember(old: nn.Parameter, name: str, by: str) -> None:
    """Say that ``old`` was replaced.

    Args:
        old: a parameter that the model holds no more.
        name: its name.
        by: the public function that replaced it.
    """
    _replaced[old] = (name, by)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stale = [
        _replaced[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in _replaced
    ]
    if stale:
        names = [name for name, _ in stale]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before {stale[0][1]} and still holds the "
            f"parameters that it replaced: {shown}; build the optimizer from the parallel model"
        )


register_optimizer_step_pre_hook(_refuse)
