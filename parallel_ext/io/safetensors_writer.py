"""Our own writer of the safetensors format: the header first, then tensor by tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import disk
from parallel_ext.io.hashing import ChunkHasher, FileRecord
from parallel_ext.io.header_hashes import PartHasher, in_header
from parallel_ext.io.safetensors_reader import DTYPES, HASHES, LENGTH_BYTES, METADATA
from parallel_ext.sharding.reshard import bytes_of

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written: what the header says of it before its bytes are there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return how many bytes the tensor takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    chunk_bytes: int | None = None,
) -> SafetensorsWriter:
    """Write whole CPU tensors into one new safetensors file, those of wider dtypes first.

    Returns:
        The writer, which is closed; its ``record()`` is that of the file if ``chunk_bytes`` are
        given.
    """
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    specs = [TensorSpec(n, tensors[n].dtype, tuple(tensors[n].shape)) for n in ordered]
    with SafetensorsWriter(path, specs, metadata, chunk_bytes) as writer:
        for name in ordered:
            writer.append(name, tensors[name])
    return writer


class SafetensorsWriter:
    """A writer of one safetensors file from front to back, in rows of its tensors.

    The disk space is reserved at once, so that a full disk is found before anything is gathered.

    Args:
        path: a file that does not exist yet.
        tensors: what will be appended, in this order. With wider dtypes first every tensor is
            aligned.
        metadata: added to the header's ``__metadata__``, which always says ``format: pt``.
        chunk_bytes: of the chunks in which what is written is hashed, for ``record()``; None for
            hashes of the tensors in the header.

    Raises:
        CheckpointError: a dtype that the format does not know, or a name that occurs twice.
        OSError: the file cannot be made, for example on a full disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        # Tensors without elements take no bytes, so nothing of them is ever appended.
        self._expected = [spec for spec in tensors if spec.num_bytes]
        self._rest = self._expected[0].num_bytes if self._expected else 0  # of the first of them
        kept: dict[str, str] = {}
        if chunk_bytes is None:
            self._hasher = PartHasher(1 + len(self._expected))
            kept[HASHES] = self._hasher.text()
        else:
            self._hasher = ChunkHasher(chunk_bytes)
        header = self._header(tensors, {**(metadata or {}), **kept})
        self._hashes_at = header.find(in_header(kept[HASHES])) if kept else 0
        self._file = disk.create(self.path)
        self._offset = 0
        try:
            disk.reserve(self._file, len(header) + sum(spec.num_bytes for spec in tensors))
            self._write(memoryview(header))
            self._hasher.end_part()
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _header(self, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
        described: dict[str, Any] = {METADATA: {"format": "pt", **metadata}}
        offset = 0
        for spec in tensors:
            if spec.dtype not in DTYPE_NAMES or spec.name in described:
                raise CheckpointError(
                    f"{self.path}: {spec.name}: a dtype that safetensors does not know "
                    f"({spec.dtype}), or a name that occurs twice"
                )
            described[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.num_bytes],
            }
            offset += spec.num_bytes
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % LENGTH_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    def _write(self, memory: memoryview) -> None:
        disk.write(self._file, memory, self._offset)
        self._offset += len(memory)
        self._hasher.update(memory)

    def append(self, name: str, rows: torch.Tensor) -> None:
        """Write the next rows, in dimension 0, of the tensor that the header lists next.

        Args:
            rows: on the CPU; some rows, or the whole tensor.

        Raises:
            CheckpointError: another name, dtype or shape than announced.
            OSError: the file cannot be written.
        """
        if rows.numel() == 0:
            return
        spec = self._expected[0] if self._expected else None
        fits = spec is not None and (name, rows.dtype) == (spec.name, spec.dtype)
        if not fits or rows.shape[1:] != spec.shape[1:] or rows.nbytes > self._rest:
            raise CheckpointError(
                f"{self.path}: expected {spec} next, {self._rest} bytes of it, got {name} of "
                f"shape {tuple(rows.shape)}, {rows.dtype}"
            )
        self._write(bytes_of(rows.contiguous()))
        self._rest -= rows.nbytes
        if self._rest == 0:
            self._hasher.end_part()
            self._expected.pop(0)
            self._rest = self._expected[0].num_bytes if self._expected else 0

    def close(self) -> None:
        """Make the file durable.

        Raises:
            CheckpointError: tensors that the header lists are missing.
            OSError: the file cannot be made durable.
        """
        with self._file:
            if self._expected:
                raise CheckpointError(
                    f"{self.path}: closed before {self._expected[0].name} was written"
                )
            if self._hashes_at:
                disk.write(self._file, memoryview(in_header(self._hasher.text())), self._hashes_at)
            disk.sync(self._file)

    def record(self) -> FileRecord:
        """Return size and hashes of the file, after ``close()``, if made with ``chunk_bytes``."""
        return self._hasher.record()

    def abandon(self) -> None:
        """Close the file as it is, unfinished."""
        self._file.close()
