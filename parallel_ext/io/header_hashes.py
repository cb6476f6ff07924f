"""Hashes of a model's file in its own header: made while it is written, compared by ``verify``.

HuggingFace's format has no hashes, but its header may keep strings beside the tensors. A file of a
model that this package writes keeps there, separated by spaces, a hash of the header, in which
they are blank then, and one of each tensor that has bytes, in the order of the file.
"""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

import xxhash

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.progress import Progress, nothing
from parallel_ext.io.safe_open import open_file
from parallel_ext.io.safetensors_reader import HASHES, SafetensorsFile
from parallel_ext.sharding.reshard import STRIPE_BYTES

_BLANK = "-" * 32  # the digits of an xxh3-128 in hexadecimal


class PartHasher:
    """A hasher of the parts of a file, one after the other: its header, then each tensor.

    Args:
        num_parts: how many there are: one more than tensors that have bytes.

    Attributes:
        hashes: of each part of which the end was reached.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts, self._hash = num_parts, xxhash.xxh3_128()
        self.hashes: list[str] = []

    def update(self, memory: bytes | memoryview) -> None:
        """Take the next bytes of a part."""
        self._hash.update(memory)

    def end_part(self) -> None:
        """Take what comes next for another part."""
        self.hashes.append(self._hash.hexdigest())
        self._hash.reset()

    def text(self) -> str:
        """Return what the header keeps, with a blank for each part of which the end is missing."""
        return " ".join(self.hashes + [_BLANK] * (self._num_parts - len(self.hashes)))


def in_header(text: str) -> bytes:
    """Return the bytes of a header that keep this text."""
    return f'"{HASHES}":"{text}"'.encode(errors="replace")


def check_tensors(file: SafetensorsFile, progress: Progress = nothing) -> bool:
    """Read every byte of a file of a model, and compare it with the hashes that its header keeps.

    Returns:
        Whether there are hashes. If not, nothing is read.

    Raises:
        CheckpointError: header or tensors are not those that were written; names the first tensor.
    """
    if not file.hashes:
        return False
    ordered = sorted((at.start, at.stop, n) for n, at in file.tensors.items() if at.start < at.stop)
    written, hasher = file.hashes.split(" "), PartHasher(1 + len(ordered))
    kept, blank = in_header(file.hashes), in_header(hasher.text())
    with BufferedReader(open_file(file.path)) as content:
        header = content.read(ordered[0][0] if ordered else -1)
        hasher.update(header.replace(kept, blank))
        hasher.end_part()
        if hasher.hashes != written[:1] or len(written) != 1 + len(ordered):
            raise CheckpointError(
                f"{file.path}: its header is not the one that was written with the hashes in it: "
                "it is damaged, or another program wrote the file and kept them"
            )
        for expected, (start, stop, name) in zip(written[1:], ordered, strict=True):
            for at in range(start, stop, STRIPE_BYTES):
                piece = content.read(min(STRIPE_BYTES, stop - at))
                hasher.update(piece)
                progress(len(piece))
            hasher.end_part()
            if (found := hasher.hashes[-1]) != expected:
                raise CheckpointError(
                    f"{file.path}: {name} is damaged: its hash is {found}, but {expected} was "
                    "written"
                )
    return True


def open_compared(path: Path) -> SafetensorsFile:
    """Open a safetensors file, all of which was compared with the hashes in its header, if any.

    Raises:
        CheckpointError: as of :func:`check_tensors`.
    """
    file = SafetensorsFile(path)
    try:
        check_tensors(file)
    except BaseException:
        file.close()
        raise
    return file
