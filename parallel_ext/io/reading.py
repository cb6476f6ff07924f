"""From the tensors of files to the places where this rank holds its boxes of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.places import Piece, Place
from parallel_ext.io.progress import progress_bar
from parallel_ext.io.safetensors_reader import SafetensorsFile
from parallel_ext.sharding.layout import Part, TensorLayout
from parallel_ext.sharding.reshard import part_views

_STEP_BYTES = 128 << 20  # of full tensors that are read before the ranks meet again
_MOST_THREADS = 4


@dataclass(frozen=True)
class Wanted:
    """A tensor of a file that is to be read.

    Attributes:
        name: in the file.
        whole: the tensor of the model that it is a part of, or one that is sharded like it.
        part: where it lies there.
        transposed: whether the file has the last two dimensions of it in the other order.
    """

    name: str
    whole: TensorLayout
    part: Part
    transposed: bool = False


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


def read_shard(
    file: SafetensorsFile, wanted: Wanted, shard: torch.Tensor, rank: int, reads: Reads
) -> None:
    """Let this rank's boxes of a tensor of a file be read, straight to their places in its shard.

    Args:
        shard: this rank's shard of ``wanted.whole``, on any device; the rest of it stays as it is.
        reads: does it, when it runs.
    """
    for box, place in part_views(shard, wanted.whole, wanted.part, rank):
        if wanted.transposed:
            box, place = (*box[:-2], box[-1], box[-2]), place.transpose(-1, -2)
        file.read_box(wanted.name, box, place, partial(reads.add, file))


class Reads:
    """The reads of one file after another, each from front to back, by some threads.

    Args:
        pool: of the threads; None for this one alone.
    """

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._map = map if pool is None else pool.map
        self._file: SafetensorsFile | None = None
        self._passes: list[dict[int, list[Piece]]] = []  # by chunk; the first is nearly always all

    def add(self, file: SafetensorsFile, places: Iterable[Place]) -> None:
        """Add places of a file, after those of lower offsets."""
        if self._file is not file:
            self.finish()
            self._file = file
        for place in places:
            for piece in Piece.of(place, file.chunk_bytes):
                self._pieces_before(piece).append(piece)

    def _pieces_before(self, piece: Piece) -> list[Piece]:
        """Return the pieces of the same chunk that one pass reads before this one."""
        number = piece.start // self._file.chunk_bytes
        for each in self._passes:
            pieces = each.setdefault(number, [])
            if not pieces or pieces[-1].stop <= piece.start:
                return pieces
        self._passes.append({number: []})
        return self._passes[-1][number]

    def run(self, keep: int = 1) -> None:
        """Read what was added, but for the last chunks, of which more may be wanted.

        Args:
            keep: how many of the last chunks.
        """
        for each in self._passes:
            numbers = sorted(each)[: len(each) - keep]
            for _ in self._map(self._file.read_chunk, numbers, [each.pop(n) for n in numbers]):
                pass

    def finish(self) -> None:
        """Read all that was added, and give back what the file took."""
        if self._file is not None:
            self.run(keep=0)
            self._file.forget()
        self._file, self._passes = None, []


def num_threads(world_size: int) -> int:
    """Return how many threads of a rank read: what the cores of its host leave to it, at most 4."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # of torchrun
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks_here))


def read_shards(
    wanted: Sequence[tuple[Wanted, torch.Tensor]],
    files: Mapping[str, SafetensorsFile],
    mesh: Mesh,
    op_name: str,
    progress: bool | None = None,
) -> None:
    """Read this rank's boxes of many tensors; every rank calls it with the same tensors.

    They are read in the order of the files, and the ranks stay in step, so that one that is killed
    or stopped is found.

    Args:
        wanted: what, and this rank's shard of ``whole``, to be filled.
        files: that hold them, by name of the tensor.
        progress: whether rank 0 shows a bar of what it reads; None for one on a terminal.

    Raises:
        CheckpointError: a rank cannot read a tensor; all ranks raise it.
        CollectiveTimeout: a rank was killed or stopped.
    """
    shards = {each.name: shard for each, shard in wanted}

    def place(each: Wanted) -> tuple[str, int]:
        return str(files[each.name].path), files[each.name].tensors[each.name].start

    steps = list(steps_of(sorted((each for each, _ in wanted), key=place), files))
    threads = num_threads(mesh.world_size)

    def held(part: Iterable[Wanted]) -> int:
        return sum(bytes_here(each, files, mesh.rank) for each in part)

    total = partial(held, (each for each, _ in wanted))
    with (
        progress_bar("Loading shards", total, mesh.rank, progress) as done,
        ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool,
    ):
        reads = Reads(pool)

        def read(step: Sequence[Wanted]) -> None:
            for each in step:
                read_shard(files[each.name], each, shards[each.name], mesh.rank, reads)
            reads.finish() if step is steps[-1] else reads.run()

        for step in steps:
            mesh.control.run_on_all(op_name, partial(read, step))
            done(partial(held, step))


def bytes_here(wanted: Wanted, files: Mapping[str, SafetensorsFile], rank: int) -> int:
    """Return how many bytes ``rank`` holds of a tensor of a file."""
    shape = wanted.part.layout(wanted.whole).local_shape(rank)
    return math.prod(shape) * files[wanted.name].tensors[wanted.name].dtype.itemsize
