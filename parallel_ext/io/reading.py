"""From the tensors of files to the places where this rank holds its boxes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.sharding.layout import Part, TensorLayout
from parallel_ext.sharding.reshard import part_views

_STEP_BYTES = 128 << 20  # of full tensors that are read before the ranks meet again


@dataclass(frozen=True)
class Wanted:
    """A tensor of a file that is to be read.

    Attributes:
        name: in the file.
        whole: the tensor of the model that it is a part of, or one that is sharded like it.
        part: where it lies there.
    """

    name: str
    whole: TensorLayout
    part: Part


def steps_of(
    wanted: Sequence[Wanted], files: Mapping[str, SafetensorsFile]
) -> Iterator[list[Wanted]]:
    """Yield the tensors in steps, equal on every rank, after each of which the ranks meet."""
    step: list[Wanted] = []
    num_bytes = 0
    for each in wanted:
        entry = files[each.name].tensors[each.name]
        step.append(each)
        num_bytes += entry.stop - entry.start
        if num_bytes >= _STEP_BYTES:
            yield step
            step, num_bytes = [], 0
    if step:
        yield step


def read_shard(file: SafetensorsFile, wanted: Wanted, shard: torch.Tensor, rank: int) -> None:
    """Read this rank's boxes of a tensor of a file, straight to their places in its shard.

    Args:
        file: that holds it.
        wanted: which.
        shard: this rank's shard of ``wanted.whole``, on any device; the rest of it stays as it is.
        rank: this rank.

    Raises:
        CheckpointError: it cannot be read.
    """
    for box, place in part_views(shard, wanted.whole, wanted.part, rank):
        room = place if place.is_cpu else torch.empty_like(place, device="cpu")
        file.read_box(wanted.name, box, room)
        if room is not place:
            place.copy_(room)


def read_shards(
    wanted: Sequence[tuple[Wanted, torch.Tensor]],
    files: Mapping[str, SafetensorsFile],
    mesh: Mesh,
    op_name: str,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Read this rank's boxes of many tensors; every rank calls it with the same tensors.

    They are read in the order of the files, and the ranks stay in step, so that one that is killed
    or stopped is found.

    Args:
        wanted: what, and this rank's shard of ``whole``, to be filled.
        files: that hold them, by name of the tensor.
        mesh: the ranks.
        op_name: what the ranks are doing, for errors.
        progress: called with the number of bytes that this rank has read.

    Raises:
        CheckpointError: a tensor cannot be read, on that rank; a RuntimeError on the others.
        CollectiveTimeout: a rank was killed or stopped.
    """
    shards = {each.name: shard for each, shard in wanted}

    def place(each: Wanted) -> tuple[str, int]:
        return str(files[each.name].path), files[each.name].tensors[each.name].start

    before: SafetensorsFile | None = None

    def read(step: Sequence[Wanted]) -> None:
        nonlocal before
        for each in step:
            if before is not None and before is not files[each.name]:
                before.forget()
            before = files[each.name]
            read_shard(before, each, shards[each.name], mesh.rank)

    for step in steps_of(sorted((each for each, _ in wanted), key=place), files):
        mesh.control.run_on_all(op_name, partial(read, step))
        progress(sum(bytes_here(each, files, mesh.rank) for each in step))


def bytes_here(wanted: Wanted, files: Mapping[str, SafetensorsFile], rank: int) -> int:
    """Return how many bytes ``rank`` holds of a tensor of a file."""
    shape = wanted.part.layout(wanted.whole).local_shape(rank)
    return math.prod(shape) * files[wanted.name].tensors[wanted.name].dtype.itemsize
