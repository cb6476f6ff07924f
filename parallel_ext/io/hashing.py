"""Hashes of files by chunks: made while a file is written, compared while it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from parallel_ext.distributed.errors import CheckpointError

_SMALLEST_CHUNK = 1 << 20
_MOST_CHUNKS = 1 << 18  # of all files, so that their hashes are read in a moment

Holds = Callable[[int, int], str]
"""Says what the bytes of a file from one offset to another hold, for errors."""


def chunk_bytes_for(num_bytes: int) -> int:
    """Return the size of the chunks in which files of ``num_bytes`` in all are hashed.

    A rank reads every chunk of which it needs a part, so they are small: 1 MiB up to 256 GiB, then
    so large that no more than 2**18 hashes are kept.
    """
    chunk_bytes = _SMALLEST_CHUNK
    while num_bytes > chunk_bytes * _MOST_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


@dataclass(frozen=True)
class FileRecord:
    """The size and the hashes that a file must have.

    Attributes:
        size: in bytes.
        chunk_bytes: size of every chunk of the file but the last.
        hashes: xxh3-128 of each chunk, in hexadecimal; none of an empty file.
    """

    size: int
    chunk_bytes: int
    hashes: tuple[str, ...]

    @classmethod
    def of(cls, content: bytes, chunk_bytes: int) -> FileRecord:
        """Return the record of a file with this content."""
        hasher = ChunkHasher(chunk_bytes)
        hasher.update(memoryview(content))
        return hasher.record()

    def check(self, content: bytes, path: Path) -> None:
        """Raise a CheckpointError unless a whole file has this size and these hashes."""
        if len(content) != self.size:
            raise wrong_size(path, self.size, len(content))
        for number in range(len(self.hashes)):
            check = ChunkCheck(self, number)
            check.update(memoryview(content)[check.start : check.stop])
            check.finish(path)


class ChunkCheck:
    """The comparison of a chunk of a file with its hash, while it is read from front to back.

    Args:
        record: what the file must be.

    Attributes:
        start, stop: the bytes of the chunk.
    """

    def __init__(self, record: FileRecord, number: int) -> None:
        self._expected, self._hash = record.hashes[number], xxhash.xxh3_128()
        self.start = number * record.chunk_bytes
        self.stop = min(self.start + record.chunk_bytes, record.size)

    def update(self, memory: memoryview) -> None:
        """Take the next bytes of the chunk."""
        self._hash.update(memory)

    def finish(self, path: Path, holds: Holds = lambda start, stop: "") -> None:
        """Raise a CheckpointError unless the bytes of the chunk, now taken, are those written.

        Args:
            holds: says what the bytes from one offset to another hold, for the error.
        """
        if (found := self._hash.hexdigest()) != self._expected:
            raise CheckpointError(
                f"{path}: the bytes [{self.start}, {self.stop}){holds(self.start, self.stop)} are "
                f"damaged: their hash is {found}, but {self._expected} was written"
            )


def wrong_size(path: Path, expected: int, found: int) -> CheckpointError:
    """Return the error for a file of another size than was written."""
    kind = "it is truncated" if found < expected else "something was added to it"
    return CheckpointError(f"{path}: {expected} bytes were written, but it has {found}; {kind}")


class ChunkHasher:
    """A hasher of what is written to a file from front to back, in chunks of ``chunk_bytes``."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes, self._hash = chunk_bytes, xxhash.xxh3_128()
        self._hashes: list[str] = []
        self._size = 0

    def update(self, memory: memoryview) -> None:
        """Take the next bytes of the file."""
        while len(memory):
            piece = memory[: self._chunk_bytes - self._size % self._chunk_bytes]
            self._hash.update(piece)
            self._size += len(piece)
            if self._size % self._chunk_bytes == 0:
                self._hashes.append(self._hash.hexdigest())
                self._hash.reset()
            memory = memory[len(piece) :]

    def end_part(self) -> None:
        """Do nothing where a tensor ends: chunks are counted from the front of the file."""

    def record(self) -> FileRecord:
        """Return the record of the file, once all of it was passed to :meth:`update`."""
        rest = [self._hash.hexdigest()] if self._size % self._chunk_bytes else []
        return FileRecord(self._size, self._chunk_bytes, (*self._hashes, *rest))
