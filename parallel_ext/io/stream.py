"""From the shards of the ranks to files: every byte once, by the one rank that owns the file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapreplace
from itertools import chain, zip_longest
from pathlib import Path

import torch
import xxhash

from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.errors import first_few, warn_user
from parallel_ext.io.hashing import FileRecord
from parallel_ext.io.hf_reader import SINGLE_FILE_NAME
from parallel_ext.io.progress import progress_bar
from parallel_ext.io.safetensors_writer import SafetensorsWriter, TensorSpec
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.reshard import STRIPE_BYTES, RowStripe, Swap, row_stripes

MAX_FILE_BYTES = 5 * 10**9
SEVERAL_FILES_NAME = "model-{:05}-of-{:05}.safetensors"


@dataclass
class PlannedFile:
    """One file of a save: its name, the rank that writes it, and its tensors in file order."""

    writer: int
    tensors: list[TensorSpec] = field(default_factory=list)
    name: str = ""

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the tensors of the file take."""
        return sum(spec.num_bytes for spec in self.tensors)


@dataclass
class Turn:
    """Rows of one file that its writer gathers and writes at once."""

    file: PlannedFile
    stripes: list[RowStripe] = field(default_factory=list)


def plan_files(
    tensors: Sequence[TensorSpec],
    writers: int,
    max_shard_size: int | None = None,
    single: str = SINGLE_FILE_NAME,
    several: str = SEVERAL_FILES_NAME,
) -> list[PlannedFile]:
    """Assign tensors to the ranks that write them, and to files.

    A pure function of its arguments, so that every rank computes the same.

    Args:
        max_shard_size: bytes that the tensors of a file may take, ``MAX_FILE_BYTES`` when None; a
            larger tensor is alone in its.
        single, several: names of the one file, or by number of each and of all.

    Returns:
        The files, ordered by writer. Within a writer's files the tensors are in the given order,
        those of wider dtypes first, so that all are aligned.
    """
    ranks = share_out([spec.num_bytes for spec in tensors], writers)
    writer_of = {spec.name: rank for spec, rank in zip(tensors, ranks, strict=True)}
    files: list[PlannedFile] = []
    room = 0
    for spec in sorted(tensors, key=lambda spec: (writer_of[spec.name], -spec.dtype.itemsize)):
        if not files or files[-1].writer != writer_of[spec.name] or spec.num_bytes > room:
            files.append(PlannedFile(writer_of[spec.name]))
            room = MAX_FILE_BYTES if max_shard_size is None else max_shard_size
        files[-1].tensors.append(spec)
        room -= spec.num_bytes
    for number, file in enumerate(files, start=1):
        file.name = single if len(files) == 1 else several.format(number, len(files))
    return files


def share_out(sizes: Sequence[int], writers: int) -> list[int]:
    """Return which rank writes each tensor: the one with the fewest bytes, largest tensors first.

    Args:
        sizes: bytes of each tensor.
    """
    loads = [(0, rank) for rank in range(writers)]  # a heap: the first has the fewest bytes
    ranks = [0] * len(sizes)
    for which in sorted(range(len(sizes)), key=lambda which: -sizes[which]):
        load, ranks[which] = loads[0]
        heapreplace(loads, (load + sizes[which], ranks[which]))
    return ranks


def plan_turns(
    files: Sequence[PlannedFile], layouts: Mapping[str, TensorLayout], writers: int
) -> Iterator[tuple[Turn | None, ...]]:
    """Plan what every writer writes in each turn: consecutive rows of its files.

    A pure function of its arguments, so that every rank computes the same.

    Returns:
        The turns, each planned when it is asked for, with one entry a writer: its rows, at most
        ``STRIPE_BYTES`` of them or one row; None once it has nothing left.
    """
    files_of: list[list[PlannedFile]] = [[] for _ in range(writers)]
    for file in files:
        files_of[file.writer].append(file)
    return zip_longest(*(_turns_of(own, layouts) for own in files_of))


def _turns_of(files: Sequence[PlannedFile], layouts: Mapping[str, TensorLayout]) -> Iterator[Turn]:
    """Yield the turns of the writer of some files."""
    for file in files:
        turn, room = Turn(file), STRIPE_BYTES
        for spec in file.tensors:
            row_bytes = spec.num_bytes // max(1, spec.shape[0]) if spec.shape else spec.num_bytes
            for stripe in row_stripes(layouts[spec.name], spec.dtype.itemsize):
                num_bytes = (stripe.stop - stripe.start) * row_bytes
                if num_bytes > room and turn.stripes:
                    yield turn
                    turn, room = Turn(file), STRIPE_BYTES
                turn.stripes.append(stripe)
                room -= num_bytes
        yield turn


def digest_of(files: Sequence[PlannedFile]) -> str:
    """Return a digest of the files and their tensors, to be compared between ranks."""
    return xxhash.xxh3_128_hexdigest(repr(files).encode())


class TensorStream:
    """A stream of rows from the ranks to the files that this rank writes.

    Args:
        values: this rank's shard of every tensor that is written, by its name in the files.
        chunk_bytes: of the chunks in which what is written is hashed, for ``records()``; None for
            hashes of the tensors in the header of each file.

    Attributes:
        non_finite: how many values of each tensor that this rank wrote are NaN or infinite.
    """

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        control: ControlPlane,
        chunk_bytes: int | None = None,
    ) -> None:
        self._values, self._control, self._chunk_bytes = values, control, chunk_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._writers: dict[str, SafetensorsWriter] = {}
        self._own: Turn | None = None  # of the turn that was prepared last
        self._rows: list[torch.Tensor] = []
        self._swap: Swap | None = None
        self.non_finite: Counter[str] = Counter()

    def write(
        self,
        files: Sequence[PlannedFile],
        layouts: Mapping[str, TensorLayout],
        directory: Path,
        metadata: Mapping[str, str],
        op_name: str,
        progress: bool | None = None,
    ) -> None:
        """Write all files; every rank calls it with the same arguments.

        Args:
            directory: where to; the names of the files are relative to it.
            progress: whether rank 0 shows a bar of what all write; None for one on a terminal.

        Raises:
            CollectiveTimeout: a rank was killed or stopped.
            CheckpointError, OSError: a rank cannot write; all ranks raise the same class.
        """
        control = self._control
        try:
            # A file system that cannot reserve room is slow: all of it is written.
            control.run_on_all(
                op_name, lambda: self._open(files, metadata, directory), patient=True
            )
            total = sum(file.num_bytes for file in files)
            with progress_bar("Saving", total, control.rank, progress) as done:
                prepared: Sequence[Turn | None] = ()
                for turn in chain(plan_turns(files, layouts, control.world_size), [()]):
                    control.run_on_all(op_name, partial(self._take_and_prepare, turn))
                    done(partial(self._bytes_of, prepared))  # which are written now
                    prepared = turn
            control.run_on_all(op_name, self._close, patient=True)  # disks may be slow
        finally:
            for writer in self._writers.values():
                writer.abandon()

    def records(self) -> dict[str, FileRecord]:
        """Return size and hashes of each file that this rank wrote, by name.

        Only a stream made with ``chunk_bytes`` has them.
        """
        return {name: writer.record() for name, writer in self._writers.items()}

    def _open(
        self, files: Sequence[PlannedFile], metadata: Mapping[str, str], directory: Path
    ) -> None:
        """Make all files of this rank, so that a full disk is found before any work."""
        for file in files:
            if file.writer == self._control.rank:
                path = directory / file.name
                self._writers[file.name] = SafetensorsWriter(
                    path, file.tensors, metadata, self._chunk_bytes
                )

    def _take_and_prepare(self, turn: Sequence[Turn | None]) -> None:
        """Do the prepared turn, and prepare all of the next turn that may fail on one rank.

        So the ranks meet once a turn, and none begins to send before all are ready.
        """
        self._take()
        wanted = [[] if part is None else part.stripes for part in turn]
        self._own = turn[self._control.rank] if self._control.rank < len(turn) else None
        self._rows = self._room_for([] if self._own is None else self._own.stripes)
        self._swap = Swap(self._values, wanted, self._rows, self._control)

    def _take(self) -> None:
        """Bring every writer its rows, then let all of them write at the same time."""
        if self._swap is None:
            return
        self._swap.run()
        self._swap = None
        if self._own is None:
            return
        writer = self._writers[self._own.file.name]
        for stripe, values in zip(self._own.stripes, self._rows, strict=True):
            writer.append(stripe.layout.name, values)
            self._count_non_finite(stripe.layout.name, values)

    def _room_for(self, stripes: Sequence[RowStripe]) -> list[torch.Tensor]:
        """Return tensors for the stripes, in memory that every turn uses again.

        Wide dtypes come first in a file, so each begins where its dtype can.
        """
        dtypes = [self._values[stripe.layout.name].dtype for stripe in stripes]
        sizes = [self._bytes(stripe) for stripe in stripes]
        if sum(sizes) > self._buffer.numel():
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = self._buffer[: sum(sizes)].split(sizes)
        return [
            part.view(dtype).view(stripe.shape)
            for stripe, dtype, part in zip(stripes, dtypes, parts, strict=True)
        ]

    def _bytes_of(self, turn: Sequence[Turn | None]) -> int:
        return sum(self._bytes(stripe) for part in turn if part for stripe in part.stripes)

    def _bytes(self, stripe: RowStripe) -> int:
        return math.prod(stripe.shape) * self._values[stripe.layout.name].dtype.itemsize

    def _count_non_finite(self, name: str, values: torch.Tensor) -> None:
        if not values.is_floating_point():
            return
        wide = values if values.dtype == torch.float64 else values.float()
        # One pass for the usual case: a sum that is finite has only finite terms.
        if not wide.sum().isfinite() and (count := int((~wide.isfinite()).sum())):
            self.non_finite[name] += count

    def _close(self) -> None:
        """Make all files durable."""
        for writer in self._writers.values():
            writer.close()


def warn_of_non_finite(counts: Sequence[Counter[str]], op_name: str, control: ControlPlane) -> None:
    """Warn on rank 0 which tensors hold how many values that are NaN or infinite."""
    found = sum(counts, Counter())

    def warn() -> None:
        if control.rank == 0:
            shown = first_few([f"{name} ({count})" for name, count in found.most_common()], 8)
            warn_user(f"{op_name}: {found.total()} values are NaN or infinite: {shown}")

    if found:
        control.run_on_all(op_name, warn)  # which a filter may make an error
