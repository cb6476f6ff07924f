"""Adapters of parallel models: their state, and what several ranks hold of them."""

from __future__ import annotations

from peft.tuners.lora.layer import LoraLayer
from torch import nn

from parallel_ext.replicas import compare
from parallel_ext.sharded import named_shards
from parallel_ext.state import ParallelState, state_of


def parallel_state(model: nn.Module) -> ParallelState | None:
    """How a model is spread; None for one that was not parallelized."""
    try:
        return state_of(model)
    except TypeError:
        return None


def check_adapters(model: nn.Module, state: ParallelState, what: str) -> None:
    """Raise unless ranks that hold the same of an adapter hold the same bits; all ranks call it."""
    trained = {
        name: (parameter, layout)
        for name, parameter, layout in named_shards(model)
        if set(name.split(".")) & {*LoraLayer.adapter_layer_names, "modules_to_save"}
    }
    compare(trained, state.mesh, what)
