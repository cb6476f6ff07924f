"""How many bytes of a model each rank holds, computed from its layout alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from parallel_ext.models.blocks import MixtureNames
from parallel_ext.models.spec import ModelSpec
from parallel_ext.parallel.traffic import Traffic
from parallel_ext.sharding.layout import ModelLayout, TensorLayout
from parallel_ext.sharding.named_shards import named_shards


@dataclass(frozen=True)
class _Kind:
    """What tensors have in common that take equally much on every rank.

    Attributes:
        layout: without the name of the tensor.
        copy_size: how many consecutive ranks hold one copy.
        itemsize: bytes of a number.
        adapter: whether it belongs to an adapter, which ZeRO does not divide.
        expert: whether it belongs to the experts of a mixture, which ZeRO gathers apart.
        idle: whether no step gives it a gradient.
    """

    layout: TensorLayout
    copy_size: int
    itemsize: int
    adapter: bool
    expert: bool
    idle: bool

    def nbytes(self, rank: int, replicas_of: int | None) -> int:
        """Return the bytes on a rank; ZeRO divides them over the replicas of so many ranks."""
        rows, *others = self.layout.local_shape(rank)
        if replicas_of is not None and not self.adapter:  # as torch.chunk divides rows
            copies, place = replicas_of // self.copy_size, rank // self.copy_size
            at_once = -(-rows // copies)
            rows = min(at_once, max(0, rows - place * at_once))
        return self.itemsize * rows * math.prod(others)

    def padded_numel(self, rank: int, replicas: int) -> int:
        """Return the elements of a replica's part, padded to that of the first one."""
        rows, *others = self.layout.local_shape(rank)
        return -(-rows // replicas) * math.prod(others)


class Held:
    """How many bytes of a model a rank holds.

    Args:
        further_layers: equal to the last one of the layout, and in the model beside its layers.
        idle: names of parameters that no step gives a gradient.

    Attributes:
        vocab_rows: of the vocabulary, on rank 0.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ModelLayout,
        tp: int,
        ep: int,
        world: int,
        itemsize: int,
        further_layers: int = 0,
        idle: Collection[str] = (),
    ) -> None:
        self._spec, self._tp, self._ep, self._world = spec, tp, ep, world
        self._experts = tuple(
            f"{path}.{block.experts}."
            for path, block in spec.blocks(layout).items()
            if isinstance(block, MixtureNames)
        )
        # Each kind of tensor is looked at once, however many layers have it.
        self._root: Counter[_Kind] = Counter()
        self._of_layer: dict[str, Counter[_Kind]] = {}
        self._further, self._idle = further_layers, idle
        for name, tensor in layout.tensors.items():
            if name not in layout.buffers:
                self._add(name, tensor, itemsize, adapter=False)
        self.vocab_rows = layout[f"{spec.embedding}.weight"].local_shape(0)[0]

    def _add(self, name: str, tensor: TensorLayout, itemsize: int, *, adapter: bool) -> None:
        expert = name.startswith(self._experts)
        copy_size = self._ep if expert else self._tp
        idle = name in self._idle
        kind = _Kind(replace(tensor, name=""), copy_size, itemsize, adapter, expert, idle)
        layer = re.match(rf"{re.escape(self._spec.layers)}\.\d+\.", name)
        of = self._of_layer.setdefault(layer[0], Counter()) if layer else self._root
        of[kind] += 1

    @cached_property
    def _layers(self) -> Counter[_Kind]:
        """Return how many tensors of each kind all layers have together."""
        layers = list(self._of_layer.values())
        total: Counter[_Kind] = Counter()
        for layer in layers:
            total.update(layer)
        for kind, number in layers[-1].items():
            total[kind] += self._further * number
        return total

    def add_adapter(self, model: nn.Module) -> None:
        """Add the factors of an adapted model with the layers of the layout, before all else."""
        for name, parameter, layout in named_shards(model):
            if parameter.requires_grad:
                self._add(name, layout, parameter.itemsize, adapter=True)

    def extremes(self) -> list[int]:
        """Return the ranks among which those with the most and the fewest bytes are."""
        inner = max(self._tp, self._ep)
        return [*range(inner), *range(self._world - inner, self._world)]

    def nbytes(
        self,
        rank: int,
        *,
        sharded: bool = False,
        root: bool = True,
        layers: bool = True,
        adapter: bool | None = None,
        trained: bool = False,
    ) -> int:
        """Return how many bytes a rank holds.

        Args:
            rank: of the job.
            sharded: with what ZeRO divides over the replicas, where there are any dp ranks.
            root: count what is in no layer.
            layers: count what is in the layers.
            adapter: count only the adapter, or only what is not; None for both.
            trained: leave out what gets no gradient.
        """
        counters = [self._root] * root + [self._layers] * layers
        if trained:
            counters = [
                Counter({kind: number for kind, number in counter.items() if not kind.idle})
                for counter in counters
            ]
        return sum(self._sum(counter, rank, sharded, adapter) for counter in counters)

    def largest_layer(self, rank: int) -> int:
        """Return the bytes of the largest layer of a rank, not divided, without an adapter."""
        return max(self._sum(layer, rank, False, False) for layer in self._of_layer.values())

    def logical(self, *, adapter: bool) -> int:
        """Return the bytes of the adapter, or of the model without it, in one process."""
        return sum(
            number * kind.itemsize * kind.layout.numel
            for counter in (self._root, self._layers)
            for kind, number in counter.items()
            if kind.adapter is adapter
        )

    def sent_by_zero(self, zero: int, adapted: bool) -> Traffic:
        """Return what ZeRO sends in a step on rank 0.

        Each layer, its experts, and the rest of the model are gathered by one collective, in stage
        3 once more for backward, and their gradients are scattered by one, in fp32 or wider. An
        adapter has all of its gradients summed, in one flat tensor.

        Args:
            zero: the stage, 2 or 3.
            adapted: whether only an adapter is trained.
        """
        sent = Traffic()
        layers = [*self._of_layer.values()]
        for number, parts in enumerate([self._root, *layers]):
            times = 1 + self._further * (number == len(layers))
            for expert in (False, True):
                inner = self._ep if expert else self._tp
                copies, group = self._world // inner, "edp" if expert else "dp"
                kinds = [
                    (kind, count)
                    for kind, count in parts.items()
                    if kind.expert is expert
                    and not kind.adapter
                    and math.prod(kind.layout.local_shape(0))
                ]
                if copies == 1 or not kinds:
                    continue
                numel = [(kind, count * kind.padded_numel(0, copies)) for kind, count in kinds]
                nbytes = sum(each * kind.itemsize for kind, each in numel)
                gathers = times * (1 + (zero == 3))
                sent.send(group, "zero_all_gather", nbytes, gathers)
                if not adapted:
                    nbytes = sum(each * max(4, kind.itemsize) for kind, each in numel)
                    sent.send(group, "zero_reduce_scatter", copies * nbytes, times)
        for group, expert in (("dp", False), ("edp", True)):
            counts = (self._root + self._layers).items()
            flat = sum(
                count * math.prod(kind.layout.local_shape(0)) * max(4, kind.itemsize)
                for kind, count in counts
                if kind.adapter and kind.expert is expert
            )
            if flat and self._world > (self._ep if expert else self._tp):
                sent.send(group, "all_reduce", flat)
        return sent

    def _sum(self, counter: Counter[_Kind], rank: int, sharded: bool, adapter: bool | None) -> int:
        replicas_of = self._world if sharded and self._world > self._tp else None
        return sum(
            number * kind.nbytes(rank, replicas_of)
            for kind, number in counter.items()
            if adapter in (None, kind.adapter)
        )
