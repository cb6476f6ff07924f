"""Imitate what ZeRO does with gradients and gathered weights in a backward on the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.parallel.state import state_of
from parallel_ext.parallel.traffic import Traffic
from parallel_ext.sharding._torch_private import running_backward


@dataclass
class _Unit:
    """Parameters that FSDP gathers, and whose gradients it scatters, at once."""

    parameters: list[nn.Parameter]  # of these no other unit has any
    layer: str  # prefix of the names of the layer that they are in; empty outside of layers
    group: str  # the ranks that share them
    replicas: int  # how many these are
    ran: bool = False  # whether a forward has needed them
    done: bool = False  # whether their backward is complete

    def numel(self, parameters: list[nn.Parameter]) -> int:
        """Return the elements of a rank's part of some, padded to that of the first replica."""
        return sum(-(-len(p) // self.replicas) * math.prod(p.shape[1:]) for p in parameters)


class MetaZero:
    """Scatter the gradients of each layer of a model once they are complete, as FSDP does.

    Each layer, its experts, and the rest of the model are gathered by one collective, in stage 3
    once more for backward, and their gradients are scattered by one, in fp32 or wider.

    Args:
        model: parallel, on meta, and to be trained by ``data_parallel``. Its layers are watched.
        free: gets the bytes of gathered weights that are given back.
        sent: counts what is sent.

    Attributes:
        scattered: ids of the parameters whose gradients were.
        skipped: prefixes of the names of layers that no forward runs.
    """

    def __init__(self, model: nn.Module, free: Callable[[int], None], sent: Traffic) -> None:
        state = state_of(model)
        self._free, self._stage, self._sent = free, state.zero, sent
        self.scattered: set[int] = set()
        self.skipped: tuple[str, ...] = ()
        self._trains: dict[str, bool] = {}  # layers in the order of forward: whether backward runs
        self._flat: torch.Tensor | None = None
        self._shards: list[torch.Tensor] = []
        own = [p for p in model.parameters() if not (state.adapted and p.requires_grad)]
        halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        self._reduced_in = torch.float32 if halves else None
        outside = {id(p): p for p in own if p.numel()}
        self._layers: dict[str, list[_Unit]] = {}
        for path in (state.spec.layers, *state.spec.towers):
            for number, layer in enumerate(model.get_submodule(path)):
                prefix = f"{path}.{number}."
                units = self._layers[prefix] = []
                layer.register_forward_hook(partial(self._has_run, prefix))
                parts = [m for m in layer.modules() if isinstance(m, ExpertParallelExperts)]
                for part in (*parts, layer):
                    mine = [p for p in part.parameters() if outside.pop(id(p), None) is not None]
                    mesh = state.mesh
                    shared = ("dp", mesh.dp_size) if part is layer else ("edp", mesh.edp_size)
                    units.append(_Unit(mine, prefix, *shared))
                    watch_start(part, partial(self._has_begun, units[-1]))
        self._root = _Unit(list(outside.values()), "", "dp", state.mesh.dp_size, ran=True)
        self._gather(self._root)

    def _gather(self, unit: _Unit) -> None:
        if unit.replicas > 1 and unit.parameters:
            nbytes = unit.numel(unit.parameters) * unit.parameters[0].itemsize
            self._sent.send(unit.group, "zero_all_gather", nbytes)

    def _has_begun(self, unit: _Unit, hidden: torch.Tensor) -> None:
        unit.ran = True
        self._gather(unit)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._complete(unit))

    def _has_run(self, prefix: str, layer: nn.Module, args: Any, output: Any) -> None:
        if running_backward() == -1:
            first = output[0] if isinstance(output, tuple) else output
            self._trains[prefix] = first.requires_grad

    def finish(self) -> None:
        """End the backward."""
        for units in self._layers.values():
            for unit in units:
                self._complete(unit)
        self._complete(self._root)
        self.skipped = tuple(name for name in self._layers if name not in self._trains)

    def _is_gathered_again(self, layer: str) -> bool:
        """Return whether FSDP gathers a layer for its own backward, or for the next one's."""
        trains = [*self._trains.values(), True, True]
        place = [*self._trains, ""].index(layer)
        return trains[place] or trains[place + 1]

    def _complete(self, unit: _Unit) -> None:
        if unit.done or not unit.ran:
            return
        unit.done, self._flat = True, None  # the buffer of the unit before is there until now
        gathered = sum(p.nbytes for p in unit.parameters)
        self._free(gathered)
        if given := [p for p in unit.parameters if p.grad is not None]:
            self._scatter(given, unit)
        if self._stage == 3:  # the next one is there in its place
            self._free(-gathered)
            if self._is_gathered_again(unit.layer):
                self._gather(unit)

    def _scatter(self, given: list[nn.Parameter], unit: _Unit) -> None:
        """Sum gradients over ranks, as their shards."""
        dtype, numel = given[0].dtype, unit.numel(given)
        wide = self._reduced_in or dtype
        self._flat = torch.empty(unit.replicas * numel, dtype=wide, device="meta")
        if unit.replicas > 1:
            self._sent.send(unit.group, "zero_reduce_scatter", self._flat.nbytes)
        for parameter in given:
            parameter.grad = None
            self.scattered.add(id(parameter))
        self._shards.append(torch.empty(numel, dtype=wide, device="meta").to(dtype))


def watch_start(layer: nn.Module, watch: Callable[[torch.Tensor], object]) -> None:
    """Let ``watch`` have the input of a layer's forward, but not of one that backward repeats."""

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if running_backward() == -1:
            watch(args[0])

    layer.register_forward_pre_hook(before)
