"""How many bytes of a model each rank holds, computed from its layout alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from parallel_ext.models.spec import ModelSpec
from parallel_ext.parallel.repeated import Repeated
from parallel_ext.parallel.traffic import Traffic
from parallel_ext.sharding.layout import ModelLayout, TensorLayout, box_shape
from parallel_ext.sharding.named_shards import named_shards


@dataclass(frozen=True)
class _Kind:
    """A key that is equal for tensors which take the same bytes on every rank."""

    layout: TensorLayout  # without the name of the tensor
    copy_size: int  # how many consecutive ranks hold one copy
    itemsize: int  # bytes of a number
    adapter: bool  # whether it belongs to an adapter, which ZeRO does not divide
    expert: bool  # whether it belongs to the experts of a mixture, which ZeRO gathers apart
    idle: bool  # whether no step gives it a gradient
    in_files: tuple[int, ...]  # how many elements each of the tensors has that files hold of it

    def nbytes(self, rank: int, replicas_of: int | None) -> int:
        """Return the bytes on a rank; ZeRO divides them over the replicas of so many ranks."""
        rows, *others = self.layout.local_shape(rank)
        if replicas_of is not None and not self.adapter:  # as torch.chunk divides rows
            copies, place = replicas_of // self.copy_size, rank // self.copy_size
            at_once = -(-rows // copies)
            rows = min(at_once, max(0, rows - place * at_once))
        return self.itemsize * rows * math.prod(others)


class Held:
    """How many bytes of a model a rank holds.

    Args:
        spec, layout: of the model.
        tp, ep, world: ranks that share a copy of the dense parts, those of the experts, and all.
        itemsize: bytes of an element of the model.
        repeated: which layers of the model equal those of the layout.
        idle: names of parameters that no step gives a gradient.
        skipped: prefixes of layers that no step runs.
        in_fp32: names of parameters with elements of 4 bytes in place of ``itemsize``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ModelLayout,
        tp: int,
        ep: int,
        world: int,
        itemsize: int,
        repeated: Repeated,
        idle: Collection[str] = (),
        skipped: Collection[str] = (),
        in_fp32: Collection[str] = (),
    ) -> None:
        self._spec, self._tp, self._ep, self._world = spec, tp, ep, world
        self._experts = tuple(
            f"{path}.{mixture.experts}." for path, mixture in spec.mixtures(layout).items()
        )
        # Each kind of tensor is looked at once, however many layers have it.
        self._root: Counter[_Kind] = Counter()
        self._of_layer: dict[str, Counter[_Kind]] = {}
        self._repeated, self._idle, self._skipped = repeated, idle, skipped
        self._layer = re.compile(
            rf"(?:{'|'.join(map(re.escape, (spec.layers, *spec.towers)))})\.\d+\."
        )
        for name, tensor in layout.tensors.items():
            if name not in layout.buffers:
                parts = tuple(math.prod(box_shape(part.box)) for part in layout.parts_of(name))
                size = 4 if name in in_fp32 else itemsize
                self._add(name, tensor, size, parts, adapter=False)
        self._vocabulary = layout[f"{spec.embedding}.weight"]

    def _add(
        self,
        name: str,
        tensor: TensorLayout,
        itemsize: int,
        parts: tuple[int, ...],
        *,
        adapter: bool,
    ) -> None:
        expert = name.startswith(self._experts)
        copy_size = self._ep if expert else self._tp
        idle = name in self._idle
        kind = _Kind(replace(tensor, name=""), copy_size, itemsize, adapter, expert, idle, parts)
        layer = self._layer.match(name)
        of = self._of_layer.setdefault(layer[0], Counter()) if layer else self._root
        of[kind] += 1

    @cached_property
    def _layers(self) -> Counter[_Kind]:
        """Return how many tensors of each kind all layers have together."""
        total: Counter[_Kind] = Counter()
        for prefix, layer in self._of_layer.items():
            for kind, number in layer.items():
                total[kind] += self._times(prefix) * number
        return total

    def _times(self, prefix: str) -> int:
        """Return how many layers a layer stands for."""
        path, _, number = prefix.removesuffix(".").rpartition(".")
        return len(self._repeated.numbers(int(number))) if path == self._spec.layers else 1

    def add_adapter(self, model: nn.Module) -> None:
        """Add the factors of an adapted model with the layers of the layout, before all else."""
        for name, parameter, layout in named_shards(model):
            if parameter.requires_grad:
                self._add(name, layout, parameter.itemsize, (layout.numel,), adapter=True)

    def vocab_rows(self, rank: int) -> int:
        """Return how many rows of the vocabulary a rank has."""
        return self._vocabulary.local_shape(rank)[0]

    def nbytes(
        self,
        rank: int,
        *,
        sharded: bool = False,
        layers: bool = True,
        adapter: bool | None = None,
        trained: bool = False,
    ) -> int:
        """Return how many bytes a rank holds.

        Args:
            sharded: with what ZeRO divides over the replicas, where there are any dp ranks.
            layers: count what is in the layers, too.
            adapter: count only the adapter, or only what is not; None for both.
            trained: leave out what gets no gradient.
        """
        counters = [self._root, self._layers] if layers else [self._root]
        if trained:
            counters = [
                Counter({kind: number for kind, number in counter.items() if not kind.idle})
                for counter in counters
            ]
        return sum(self._sum(counter, rank, sharded, adapter) for counter in counters)

    def largest_layer(self, rank: int) -> int:
        """Return the bytes of a rank's largest layer, not divided, without an adapter."""
        return max(self._sum(layer, rank, False, False) for layer in self._of_layer.values())

    def skipped(self, rank: int) -> int:
        """Return the bytes of a rank's layers that no step runs, not divided."""
        return sum(self._sum(self._of_layer[name], rank, False, False) for name in self._skipped)

    def in_files(self, *, adapter: bool) -> list[int]:
        """Return the bytes of each tensor in files of the adapter, or of the model without it."""
        return [
            kind.itemsize * numel
            for counter in (self._root, self._layers)
            for kind, number in counter.items()
            if kind.adapter is adapter
            for numel in kind.in_files * number
        ]

    def sent_by_adapter(self, rank: int) -> Traffic:
        """Return what sums the gradients of an adapter under ZeRO: one flat tensor of a group."""
        sent = Traffic()
        for group, expert in (("dp", False), ("edp", True)):
            flat = sum(
                count * math.prod(kind.layout.local_shape(rank)) * max(4, kind.itemsize)
                for kind, count in (self._root + self._layers).items()
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
