"""The bytes of a file that hold a box of a tensor, and the places in memory that they fill."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from parallel_ext.sharding.layout import Box
from parallel_ext.sharding.reshard import bytes_of

HOT_BYTES = 1 << 20
"""Size of the pieces in which bytes are read, hashed and converted: a core's caches hold it."""

GAP_BYTES = 16 << 10
"""Size from which what nobody wants between the pieces of two rows is skipped, not read."""

_lock = threading.Lock()  # of the counts and stripes of all places; held for a moment


class Place:
    """Consecutive bytes of a file, and the tensor that they fill, piece by piece in any order.

    Several threads may fill pieces of one place. Where the bytes are not the tensor's own, they go
    to a stripe first, which is there from the first piece to the last.

    Args:
        start: of the bytes in the file.
        out: the tensor, of any strides, on any device.
        dtype: of the elements in the file.
        shape: of the elements in the file; that of ``out`` when None.
        columns: those of them that ``out`` takes.
        gaps: whether only the bytes of these columns are read, which are consecutive in each row.

    Attributes:
        start, stop: the bytes, half-open.
        gaps: as above.
    """

    def __init__(
        self,
        start: int,
        out: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
        columns: tuple[slice, ...] = (),
        *,
        gaps: bool = False,
    ) -> None:
        whole = tuple(out.shape) if shape is None else shape
        self._out, self._dtype, self._columns = out, dtype, () if gaps else columns
        self._shape = tuple(out.shape) if gaps else whole
        self.gaps = gaps
        if gaps:  # the bytes of a row, and those wanted of it
            of_column = math.prod(whole[2:]) * dtype.itemsize
            first, last = (edge * of_column for edge in (columns[1].start, columns[1].stop))
            self._row, self._wanted = whole[1] * of_column, (first, last)
        self.start, self.stop = start, start + math.prod(whole) * dtype.itemsize
        self._missing = self.stop - start
        self._memory: memoryview | None = None
        self._stripe: torch.Tensor | None = None

    def memory(self, start: int, stop: int) -> Iterator[tuple[memoryview, int]]:
        """Yield the memory that the file's bytes from ``start`` to ``stop`` are to fill.

        Yields:
            Memory, and the place in the file of the bytes that it takes.
        """
        with _lock:
            if self._memory is None:
                direct = not self._columns and is_plain(self._out, self._dtype)
                if not direct:
                    self._stripe = torch.empty(self._shape, dtype=self._dtype, device="cpu")
                self._memory = bytes_of(self._out if direct else self._stripe)
            memory = self._memory
        if not self.gaps:
            yield memory[start - self.start : stop - self.start], start
            return
        row, (first, last) = self._row, self._wanted
        width = last - first
        for number in range((start - self.start) // row, -(-(stop - self.start) // row)):
            begin = self.start + number * row + first
            at, end = max(start, begin), min(stop, begin + width)
            if at < end:
                inside = number * width - begin
                yield memory[inside + at : inside + end], at

    def filled(self, num_bytes: int) -> None:
        """Count bytes that are passed; with the last of them the tensor has its values."""
        with _lock:
            self._missing -= num_bytes
            if self._missing:
                return
        if self._stripe is not None:
            self._out.copy_(self._stripe[self._columns])
        self._stripe = self._memory = None


class Piece(NamedTuple):
    """The bytes of a place that lie in one chunk of the file.

    Attributes:
        place: to be filled.
        start, stop: the bytes, counted from the beginning of the file.
    """

    place: Place
    start: int
    stop: int

    @classmethod
    def of(cls, place: Place, chunk_bytes: int) -> Iterator[Piece]:
        """Yield the pieces of a place in a file of such chunks, in order."""
        at = place.start
        while at < place.stop:
            stop = min(place.stop, (at // chunk_bytes + 1) * chunk_bytes)
            yield cls(place, at, stop)
            at = stop


def is_plain(out: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the memory of a tensor is the bytes of elements of ``dtype``, in order."""
    return out.is_cpu and out.dtype == dtype and out.is_contiguous()


def places_of(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    start: int,
    box: Box,
    out: torch.Tensor,
    *,
    skips: bool = False,
) -> Iterator[Place]:
    """Yield the places of a box of a tensor, in the order of the file.

    Whole rows of ``out``'s own dtype are one place of any size, since they need no other memory.

    Args:
        dtype: of the elements in the file.
        shape: of the whole tensor, which is row-major.
        start: of its bytes in the file.
        box: the half-open range that is wanted of each dimension, with at least one element.
        out: of the shape of ``box``.
        skips: whether bytes between the pieces of two rows may be skipped, if that is worth it.
    """
    if not shape:
        yield Place(start, out.view(1), dtype)
        return
    row_shape, row_box, first_row = shape[1:], box[1:], box[0][0]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    begin = start + first_row * row_bytes
    if row_box == tuple((0, size) for size in row_shape):
        yield from _places_of_rows(dtype, begin, out)
    elif row_bytes > HOT_BYTES:
        for index, row in enumerate(out):
            at = begin + index * row_bytes
            yield from places_of(dtype, row_shape, at, row_box, row, skips=skips)
    else:
        columns = (slice(None), *(slice(a, b) for a, b in row_box))
        one_piece = all(side == (0, size) for side, size in zip(box[2:], shape[2:], strict=True))
        gap = row_bytes * (1 - (row_box[0][1] - row_box[0][0]) / row_shape[0])
        gaps = skips and one_piece and gap >= GAP_BYTES
        for block in out.split(HOT_BYTES // row_bytes):
            place = Place(begin, block, dtype, (len(block), *row_shape), columns, gaps=gaps)
            yield place
            begin = place.stop


def _places_of_rows(dtype: torch.dtype, start: int, out: torch.Tensor) -> Iterator[Place]:
    """Yield the places of whole rows, which are consecutive bytes."""
    if is_plain(out, dtype):
        yield Place(start, out, dtype)
        return
    rows = out.view(-1) if out.is_contiguous() else out
    row_bytes = math.prod(rows.shape[1:]) * dtype.itemsize
    for block in rows.split(max(1, HOT_BYTES // row_bytes)):
        place = Place(start, block, dtype)
        yield place
        start = place.stop
