"""Our own reader of the safetensors format: by position, in stripes, without mmap.

A file is the length of its header (unsigned 64-bit, little-endian), the header (JSON: tensor name
-> dtype, shape and byte range behind the header), and the tensors' bytes in row-major order.
Format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.hashing import ChunkCheck, FileRecord, wrong_size
from parallel_ext.io.places import HOT_BYTES, Piece, Place, places_of
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.safe_open import open_file, shown
from parallel_ext.io.schema import (
    MAX_JSON_BYTES,
    MAX_OWN_JSON_BYTES,
    MAX_TENSORS,
    OFFSETS_WORD,
    parse_json,
)
from parallel_ext.sharding.layout import Box, box_shape
from parallel_ext.sharding.reshard import bytes_of

LENGTH_BYTES = 8  # what precedes the header, and the alignment of what follows it
METADATA = "__metadata__"  # the one key of the header that is no tensor: strings by name
HASHES = "parallel_ext_xxh3_128"  # the key there of ``io.header_hashes``
_CHUNK_BYTES = 16 << 20  # of a file without hashes
_MAX_DIMENSIONS = 64
_LARGEST = 2**63 - 1  # no file is longer
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_SUB_BYTE_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")


class TensorEntry(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: of the elements in the file.
        shape: of the whole tensor.
        start, stop: its bytes, counted from the beginning of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Return what stays as it is while nobody writes a file; a new name or link changes its ctime.

    A file that was deleted may leave its inode's number to the one that took its place.
    """
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class SafetensorsFile:
    """A safetensors file whose header has been validated; opened again where it is read.

    Args:
        path: of the file; it can be read until ``close()`` or the end of a ``with`` block, while it
            stays as it is under this name.
        record: its size and hashes, which all that is read is then compared with.

    Attributes:
        tensors: what the file holds, by name.
        metadata: the strings by name that the header holds beside.
        hashes: those of the tensors that the header keeps, as it does so; empty if it has none.
        chunk_bytes: of the chunks in which it is read.

    Raises:
        CheckpointError: the file is not a valid safetensors file, or not the one of ``record``;
            names the file, and the tensor or the sizes that do not fit. With a record, also: it is
            a symbolic link.
    """

    def __init__(self, path: str | os.PathLike[str], record: FileRecord | None = None) -> None:
        self.path = Path(path)
        self._links = record is None
        self._file: FileIO | None = open_file(self.path, links=self._links)
        self._found = os.fstat(self._file.fileno())
        self._closed = False
        self._record = record
        self.chunk_bytes = _CHUNK_BYTES if record is None else record.chunk_bytes
        self._rooms: list[memoryview] = []  # for bytes that nobody wants, one for each thread
        self._opening = threading.Lock()
        self.metadata: dict[str, str] = {}
        self.hashes = ""
        self.tensors: dict[str, TensorEntry] = {}
        try:
            size = self._found.st_size
            if record is not None and size != record.size:
                raise wrong_size(self.path, record.size, size)
            most = MAX_JSON_BYTES if record is None else MAX_OWN_JSON_BYTES
            self.tensors = self._read_header(size, most)
            self.forget()  # a large model has more files than a process may hold open
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_header(self, size: int, most: int) -> dict[str, TensorEntry]:
        if size < LENGTH_BYTES:
            raise CheckpointError(
                f"{self.path}: the file has {size} bytes, fewer than the {LENGTH_BYTES} with "
                "which a safetensors file begins; it is truncated"
            )
        likely = LENGTH_BYTES
        if self._record is not None:  # a whole chunk is read in any case, and so only once
            likely = min(size, HOT_BYTES, self.chunk_bytes)
        first = self._bytes(0, likely)
        header_bytes = int.from_bytes(first[:LENGTH_BYTES], "little")
        if header_bytes > most:
            raise CheckpointError(
                f"{self.path}: a header of {header_bytes} bytes is announced, more than "
                f"{most}; this is no safetensors file"
            )
        data_start = LENGTH_BYTES + header_bytes
        if data_start > size:
            raise CheckpointError(
                f"{self.path}: its header alone ends at byte {data_start}, but the file has "
                f"{size} bytes; it is truncated"
            )
        known = data_start <= len(first)
        header = first[LENGTH_BYTES:data_start] if known else self._bytes(LENGTH_BYTES, data_start)
        if (count := header.count(OFFSETS_WORD)) > MAX_TENSORS:
            raise CheckpointError(
                f"{self.path}: its header describes {count} tensors, more than {MAX_TENSORS}"
            )
        described = parse_json(header, f"{self.path} (header)")
        metadata = described.pop(METADATA, {})
        if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
            raise CheckpointError(f"{self.path}: {METADATA} must hold strings: {shown(metadata)}")
        self.metadata, self.hashes = metadata, metadata.pop(HASHES, "")
        tensors = {name: self._entry(name, value, data_start) for name, value in described.items()}
        self._check_coverage(tensors, data_start, size)
        return tensors

    def _entry(self, name: str, value: Any, data_start: int) -> TensorEntry:
        """Return what the header says of one tensor, checked on its own."""
        where = f"{self.path}: {name}"
        fields = {"dtype", "shape", "data_offsets"}
        if not isinstance(value, dict) or value.keys() != fields:
            raise CheckpointError(
                f"{where}: expected the fields {', '.join(sorted(fields))}, got {shown(value)}"
            )
        dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if dtype_name in _SUB_BYTE_DTYPES:
            raise CheckpointError(
                f"{where}: elements of dtype {dtype_name} are smaller than a byte, which is not "
                "supported; convert the model to BF16 first"
            )
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise CheckpointError(
                f"{where}: unknown dtype {shown(dtype_name)}; known are {', '.join(DTYPES)}"
            )
        for field, numbers in (("shape", shape), ("data_offsets", offsets)):
            if (
                not isinstance(numbers, list)
                or len(numbers) > _MAX_DIMENSIONS
                or any(type(number) is not int or not 0 <= number <= _LARGEST for number in numbers)
            ):
                raise CheckpointError(
                    f"{where}: {field} must be a list of integers from 0 to {_LARGEST}, at most "
                    f"{_MAX_DIMENSIONS}, got {shown(numbers)}"
                )
        num_bytes = math.prod(shape) * DTYPES[dtype_name].itemsize
        if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
            raise CheckpointError(
                f"{where}: {dtype_name} of shape {shown(tuple(shape))} takes {shown(num_bytes)} "
                f"bytes, but data_offsets is {shown(offsets)}"
            )
        start, stop = (data_start + offset for offset in offsets)
        return TensorEntry(DTYPES[dtype_name], tuple(shape), start, stop)

    def _check_coverage(
        self, tensors: Mapping[str, TensorEntry], data_start: int, size: int
    ) -> None:
        """Raise unless the tensors fill the file: no hole, no overlap, nothing behind the last."""
        end, before = data_start, "the header"
        truncated = None
        for name, entry in sorted(tensors.items(), key=lambda item: item[1][2:]):
            if entry.start != end:
                kind = "overlaps" if entry.start < end else "leaves a hole behind"
                raise CheckpointError(
                    f"{self.path}: {name} begins at byte {entry.start} and not at {end}: it {kind} "
                    f"{before}"
                )
            end, before = entry.stop, name
            if truncated is None and end > size:
                truncated = name
        if end != size:
            at_end = f"something is behind {before}"
            kind = at_end if truncated is None else f"it is truncated, from {truncated} on"
            raise CheckpointError(
                f"{self.path}: by its header the file has {end} bytes, but it has {size}; {kind}"
            )

    def _bytes(self, start: int, stop: int) -> bytes:
        """Read bytes of the file, compared with the hashes if there are any."""
        content = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        self._fill([Place(start, content, torch.uint8)])
        return bytes_of(content).tobytes()

    def _holds(self, start: int, stop: int) -> str:
        """Name the tensors between two places of the file, for errors; empty if there are none."""
        names = [n for n, at in self.tensors.items() if at.start < stop and start < at.stop]
        if not names:
            return ""
        return f" of {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")

    def check_all(self, progress: Progress = nothing) -> None:
        """Read the whole file, and compare it with the hashes with which it was opened.

        Raises:
            CheckpointError: a chunk is damaged.
        """
        end = max((entry.stop for entry in self.tensors.values()), default=0)
        for number, start in enumerate(range(0, end, self.chunk_bytes)):
            self.read_chunk(number, [])
            progress(min(self.chunk_bytes, end - start))

    def forget(self) -> None:
        """Free the memory and the descriptor that reading in order has kept."""
        self._rooms.clear()
        self._let_go()

    def _descriptor(self) -> int:
        """Return the descriptor of the file, which is opened again if need be.

        Raises:
            CheckpointError: it is not the file any more whose header was read, or was changed.
            ValueError: ``close()`` was called.
        """
        with self._opening:
            if self._closed:
                raise ValueError(f"{self.path}: read after it was closed")
            if self._file is None:
                file = open_file(self.path, links=self._links)
                if _identity(os.fstat(file.fileno())) != _identity(self._found):
                    file.close()
                    raise CheckpointError(
                        f"{self.path}: another file was put there while it was read, or it was "
                        "changed"
                    )
                self._file = file
            return self._file.fileno()

    def _read_plain(self, memory: memoryview, offset: int) -> None:
        done, descriptor = 0, self._descriptor()
        while done < len(memory):
            count = os.preadv(descriptor, [memory[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: the file ended at byte {offset + done}, where "
                    f"{len(memory) - done} more were expected; it was changed while being read"
                )
            done += count

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor into new memory of the CPU; errors as of :meth:`read_box`."""
        shape = self.tensors[name].shape
        return self.read_rows(name, 0, shape[0] if shape else 1)

    def read_rows(
        self, name: str, start: int, stop: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read some rows of a tensor into new memory of the CPU, as the file has them or cast.

        Args:
            start, stop: the rows, half-open; of a tensor of one number all is read.
            dtype: of what is returned; that in the file when None.
        """
        entry = self.tensors[name]
        box = ((start, stop), *((0, size) for size in entry.shape[1:])) if entry.shape else ()
        rows = torch.empty(box_shape(box), dtype=dtype or entry.dtype, device="cpu")
        self.read_box(name, box, rows)
        return rows

    def read_box(
        self,
        name: str,
        box: Box,
        out: torch.Tensor,
        later: Callable[[Iterable[Place]], None] | None = None,
    ) -> None:
        """Read a box of a tensor into ``out``, at once or with others.

        Beside ``out`` it takes one stripe of memory, whatever the size of the tensor.

        Args:
            box: the half-open range that is wanted of each dimension.
            out: of the shape of ``box``, on any device; any strides. Elements are converted to its
                dtype.
            later: gets the places that are to be filled by ``read_chunk``; when None, they are
                filled here.

        Raises:
            CheckpointError: there is no such tensor or box, ``out`` does not fit, or the file got
                shorter.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        entry = self.tensors[name]
        inside = len(box) == len(entry.shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(box, entry.shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"{self.path}: {name}: the box {box} does not lie inside the shape {entry.shape}"
            )
        if tuple(out.shape) != box_shape(box) or out.is_meta:
            raise CheckpointError(
                f"{self.path}: {name}: the box {box} does not fit a tensor of shape "
                f"{tuple(out.shape)} on {out.device}"
            )
        if not out.numel():
            return
        skips = self._record is None  # a hash is that of all bytes of a chunk
        places = places_of(entry.dtype, entry.shape, entry.start, box, out.detach(), skips=skips)
        (self._fill if later is None else later)(places)

    def _fill(self, places: Iterable[Place]) -> None:
        """Read places, in the order of the file, chunk by chunk."""
        pieces = (piece for place in places for piece in Piece.of(place, self.chunk_bytes))
        for number, of_chunk in groupby(pieces, lambda piece: piece.start // self.chunk_bytes):
            self.read_chunk(number, list(of_chunk))

    def read_chunk(self, number: int, pieces: Sequence[Piece]) -> None:
        """Read all that is wanted of a chunk of the file; several threads may read others.

        With hashes, what lies between is read too, and the whole chunk is compared.

        Args:
            pieces: of places, in the order of the file, without overlap.

        Raises:
            CheckpointError: the file got shorter, or the chunk is not the one that was written. The
                places may have been filled.
        """
        check = None if self._record is None else ChunkCheck(self._record, number)
        at = number * self.chunk_bytes
        if check is None:
            self._announce(pieces)
        for place, start, stop in pieces:
            if check is not None:
                self._skip(at, start, check)
            for memory, offset in place.memory(start, stop):
                self._read_hot(memory, offset, check)
            place.filled(stop - start)
            at = stop
        if check is not None:
            self._skip(at, check.stop, check)
            check.finish(self.path, self._holds)

    def _announce(self, pieces: Sequence[Piece]) -> None:
        """Let the system begin to read what has gaps, since it reads nothing ahead there."""
        for place, start, stop in pieces:
            if place.gaps:
                descriptor = self._descriptor()
                for memory, at in place.memory(start, stop):
                    os.posix_fadvise(descriptor, at, len(memory), os.POSIX_FADV_WILLNEED)

    def _skip(self, start: int, stop: int, check: ChunkCheck) -> None:
        """Read bytes that nobody wants, for the hash alone."""
        if start < stop:
            try:  # other threads take some too
                room = self._rooms.pop()
            except IndexError:
                room = memoryview(bytearray(HOT_BYTES))
            for at in range(start, stop, HOT_BYTES):
                self._read_hot(room[: stop - at], at, check)
            self._rooms.append(room)

    def _read_hot(self, memory: memoryview, offset: int, check: ChunkCheck | None) -> None:
        if check is None:
            self._read_plain(memory, offset)
            return
        for start in range(0, len(memory), HOT_BYTES):
            piece = memory[start : start + HOT_BYTES]
            self._read_plain(piece, offset + start)
            check.update(piece)
