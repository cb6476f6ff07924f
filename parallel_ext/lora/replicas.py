"""Adapters of parallel models: their state, and what several ranks hold of them."""

from __future__ import annotations

import torch
import xxhash
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from parallel_ext.checkpoint import bytes_of
from parallel_ext.ranks import DisagreementError
from parallel_ext.sharded import named_shards
from parallel_ext.state import ParallelState, state_of


def parallel_state(model: nn.Module) -> ParallelState | None:
    """How a model is spread; None for one that was not parallelized."""
    try:
        return state_of(model)
    except TypeError:
        return None


def bits_of(tensor: torch.Tensor) -> memoryview:
    """Those of any tensor, for a digest."""
    return bytes_of(tensor.cpu().contiguous())


def check_replicas(model: nn.Module, state: ParallelState, what: str) -> None:
    """What several ranks hold of the adapters must be the same bits on all of them."""
    mesh = state.mesh
    trained = {
        name: (parameter, layout)
        for name, parameter, layout in named_shards(model)
        if set(name.split(".")) & {*LoraLayer.adapter_layer_names, "modules_to_save"}
    }
    own = [xxhash.xxh3_128_digest(bits_of(parameter)) for parameter, _ in trained.values()]
    everyone = mesh.gather_objects(own)
    for index, (name, (_, layout)) in enumerate(trained.items()):
        for rank, theirs in enumerate(everyone):
            first = layout.holders(rank)[0]
            if theirs[index] != everyone[first][index]:
                raise DisagreementError(
                    f"{what}: {name} differs between ranks {first} and {rank}, which must hold "
                    "the same; load the adapter anew, and change it on all ranks alike"
                )
