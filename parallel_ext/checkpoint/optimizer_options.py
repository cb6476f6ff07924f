"""The hyperparameters of an optimizer's group: out of one, and into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parallel_ext.checkpoint.tagged_json import decode, encode

# How a step is computed, not what: the running optimizer's count. The parameters are written apart.
OF_THE_RUN = {"params", "foreach", "fused", "capturable", "differentiable", "param_names"}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, as JSON.

    Raises:
        CheckpointError: one is of a type that a checkpoint does not hold.
    """
    return {
        key: encode(value, f"the option {key!r} of a group")
        for key, value in group.items()
        if key not in OF_THE_RUN
    }


def read_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`options_of` was given.

    Raises:
        CheckpointError: it was not made by it.
    """
    return {key: decode(value, f"the option {key!r} of a group") for key, value in saved.items()}


def give_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Let a group have these; its tensors are filled and stay, since a CUDA graph may hold them."""
    for key, value in options.items():
        group[key] = _in_kind_of(group.get(key), value)


def _in_kind_of(own: Any, saved: Any) -> Any:
    if isinstance(own, tuple) and isinstance(saved, tuple) and len(own) == len(saved):
        return tuple(map(_in_kind_of, own, saved))
    number = saved.item() if isinstance(saved, torch.Tensor) and saved.numel() == 1 else saved
    return own.fill_(number) if isinstance(own, torch.Tensor) else number
