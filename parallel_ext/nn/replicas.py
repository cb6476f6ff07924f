"""Notice drift: shards that several ranks hold must be the same bits on all of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import xxhash
from torch import nn

from parallel_ext.distributed.errors import DisagreementError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.sharding._torch_private import own_parameters
from parallel_ext.sharding.digests import content_digest
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers
from parallel_ext.sharding.slices import local_part

PIECE_BYTES = 2**20
"""How much of a parameter joins one comparison."""

CAUSES = (
    "a weight or a gradient was changed on one rank only, an optimizer was built or stepped "
    "differently, or the gradients of dp ranks are not averaged (px.data_parallel)"
)


@lru_cache(maxsize=256)
def _primaries(layout: TensorLayout, world_size: int) -> tuple[int, ...]:
    """Return for each rank of a job the primary rank of its shard, by the layout as it is."""
    return tuple(layout.replicas(rank)[0] for rank in range(world_size))


def primaries(layout: TensorLayout, world_size: int) -> tuple[int, ...]:
    """Return for each rank of a job the primary rank of its shard: the lowest that holds it.

    Example:
        >>> primaries(TensorLayout("norm.weight", (5,)), 3)
        (0, 0, 0)
    """
    return _primaries(replace(layout, name=""), world_size)  # most layouts differ by name only


def compare(
    shards: Mapping[str, tuple[torch.Tensor, TensorLayout]], mesh: Mesh, op_name: str
) -> None:
    """Raise a DisagreementError unless shards are equal on all ranks that hold the same one.

    Every rank calls it.

    Args:
        shards: by name what this rank holds, and where the full tensor lies; the same names in one
            order on all ranks.
        mesh: the ranks.
        op_name: what the ranks are doing, for errors.
    """
    digests: dict[str, str] = {}
    of_classes: dict[tuple[int, ...], xxhash.xxh3_128] = {}  # by who holds the same
    for name, (shard, layout) in shards.items():
        of_ranks = primaries(layout, mesh.world_size)
        if len(set(of_ranks)) < mesh.world_size:
            digests[name] = content_digest(shard)
            of_classes.setdefault(of_ranks, xxhash.xxh3_128()).update(digests[name].encode())
    own = {str(number): each.hexdigest() for number, each in enumerate(of_classes.values())}
    everyone = mesh.control.all_gather_object(own)
    for number, of_ranks in enumerate(of_classes):
        found = [each[str(number)] for each in everyone]
        if any(found[rank] != found[first] for rank, first in enumerate(of_ranks)):
            _raise(mesh.control.all_gather_object(digests), shards, mesh, op_name)


def _raise(
    everyone: list[dict[str, str]],
    shards: Mapping[str, tuple[torch.Tensor, TensorLayout]],
    mesh: Mesh,
    op_name: str,
) -> None:
    differing = [
        (name, first, rank)
        for name in everyone[0]
        for rank, first in enumerate(primaries(shards[name][1], mesh.world_size))
        if everyone[rank][name] != everyone[first][name]
    ]
    names = list(dict.fromkeys(name for name, _, _ in differing))
    more = f" ({len(names) - 1} more differ)" if len(names) > 1 else ""
    name, first, rank = differing[0]
    raise DisagreementError(f"{op_name}: {drift(name, first, rank)}{more}")


def drift(name: str, first: int, rank: int) -> str:
    """Return the error text for a parameter that must be equal on two ranks, and differs."""
    return (
        f"{name} differs between ranks {first} and {rank}, which must hold the same: replicas have "
        f"drifted apart. Likely causes: {CAUSES}. px.check_replicas(model) compares all"
    )


class ReplicaPiece(NamedTuple):
    """A part of a parameter that the ranks of a group compare in one forward.

    Attributes:
        name: of the parameter.
        values: its elements here, in one dimension.
        ranks: of the job, those of the group.
        primaries: for each of them the place of the first that must hold the same values.
    """

    name: str
    values: torch.Tensor
    ranks: tuple[int, ...]
    primaries: tuple[int, ...]

    def number(self) -> int:
        """Return a number of 64 bits that changes with the values; it waits for a device."""
        return int(content_digest(self.values), 16)

    def check(self, numbers: Sequence[object], op_name: str) -> None:
        """Raise if ranks that must hold equal values have different numbers of them.

        Args:
            numbers: of each rank of the group, what it has made of :meth:`number`.
            op_name: what the ranks are doing, for the error.

        Raises:
            DisagreementError: the values of two such ranks differ.
        """
        for place, first in enumerate(self.primaries):
            if numbers[place] != numbers[first]:
                ranks = self.ranks[first], self.ranks[place]
                raise DisagreementError(f"{op_name}: {drift(self.name, *ranks)}")


class _Place(NamedTuple):
    """Where the next piece lies."""

    name: str
    part: slice
    primaries: tuple[int, ...]


class ReplicaCycle:
    """A cycle through what several ranks of a group hold of a model, in pieces of 1 MiB.

    One pass over a model takes as many calls as it has such parameters and buffers; one of more
    than 1 MiB takes a call for each.

    Args:
        ranks: of the job, those of the group.
        world_size: of the job.
        buffers: names of the buffers that all ranks hold, such as corrections of a router.
    """

    def __init__(self, ranks: tuple[int, ...], world_size: int, buffers: Collection[str]) -> None:
        self._ranks, self._world_size, self._buffers = ranks, world_size, buffers
        self._pieces: Iterator[_Place] = iter(())
        self._now: _Place | None = None

    def __deepcopy__(self, memo: object) -> ReplicaCycle:
        return ReplicaCycle(self._ranks, self._world_size, self._buffers)

    def now(self, model: nn.Module) -> ReplicaPiece | None:
        """Return the piece to compare now; None if no two ranks of the group share a shard."""
        if self._now is None:
            self._now = next(self._pieces, None)
        if self._now is None or _tensor(model, self._now.name) is None:  # of a deleted adapter
            self._pieces = self._pass_over(model)
            self._now = next(self._pieces, None)
        if self._now is None:
            return None
        values = local_part(_tensor(model, self._now.name).detach()).reshape(-1)
        # Cloned, since FSDP could not free a gathered weight while its digest is computed.
        own = values[self._now.part].clone()
        return ReplicaPiece(self._now.name, own, self._ranks, self._now.primaries)

    def done(self) -> None:
        """Move to the next piece; all ranks of the group call it, when they have compared."""
        self._now = None

    def _pass_over(self, model: nn.Module) -> Iterator[_Place]:
        buffers = (
            (name, buffer, TensorLayout(name, tuple(buffer.shape)))
            for name, buffer in persistent_buffers(model)
            if name in self._buffers
        )
        # Without the tensors, which would outlive their places in the model.
        tensors = [
            (name, layout, tensor.element_size())
            for name, tensor, layout in (*named_shards(model), *buffers)
        ]
        for name, layout, element_size in tensors:
            same = primaries(layout, self._world_size)
            places = [same[rank] for rank in self._ranks]
            firsts = tuple(map(places.index, places))
            if len(set(firsts)) == len(firsts):
                continue
            elements = max(math.prod(layout.local_shape(rank)) for rank in self._ranks)
            at_once = PIECE_BYTES // element_size
            for start in range(0, elements, at_once):
                yield _Place(name, slice(start, start + at_once), firsts)


def _tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter, or what ``functional_call`` has put in its place, or a buffer.

    None if it is gone.
    """
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    found = own_parameters(module).get(attribute)
    return dict(module.named_buffers(recurse=False)).get(attribute) if found is None else found
