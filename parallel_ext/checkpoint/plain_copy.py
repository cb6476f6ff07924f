"""Copy the model or adapter out of a training checkpoint, every byte compared with its hash."""

from __future__ import annotations

from pathlib import Path

from parallel_ext.checkpoint.manifest import COMMIT_NAME, STATE_FOLDER, read_manifest
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.io import disk
from parallel_ext.io.hashing import FileRecord, wrong_size
from parallel_ext.io.publish import Publication
from parallel_ext.io.rewrite import Progress, check_new, copy_beside, nothing
from parallel_ext.io.safe_open import open_file


def copy_model(path: Path, out: Path, progress: Progress = nothing) -> int:
    """Write what a training checkpoint holds beside the state of its job as a plain directory.

    HuggingFace's ``from_pretrained`` reads it, or PEFT's where an adapter was trained.

    Args:
        path: directory of a step.
        out: folder that is made.
        progress: called with the bytes of each piece that was written.

    Returns:
        How many tensors the directory holds.

    Raises:
        CheckpointError: the checkpoint is damaged; nothing is written.
        OSError: a file cannot be read or written.
    """
    check_new(out, path)
    manifest = read_manifest(path)
    read_small_files(path, manifest)
    own = {n: record for n, record in manifest.files.items() if not n.startswith(STATE_FOLDER)}
    with Publication(out) as temporary:
        for name, record in own.items():
            _copy(path / name, temporary / name, record, progress)
        copy_beside(path, temporary, without={*own, COMMIT_NAME})
    return sum(1 for file, _ in manifest.tensors.values() if file in own)


def _copy(path: Path, out: Path, record: FileRecord, progress: Progress) -> None:
    """Copy a file in chunks; raise unless each is the one that was written."""
    with open_file(path, links=False) as file, disk.create(out) as copy:
        if record.size:
            disk.reserve(copy, record.size)
        offset = 0
        for number in range(len(record.hashes)):
            chunk = bytearray(min(record.chunk_bytes, record.size - offset))
            filled = 0
            while filled < len(chunk):
                count = file.readinto(memoryview(chunk)[filled:])
                if not count:
                    raise wrong_size(path, record.size, offset + filled)
                filled += count
            record.check_chunk(number, memoryview(chunk), path)
            disk.write(copy, memoryview(chunk), offset)
            offset += len(chunk)
            progress(len(chunk))
        if file.read(1):
            raise wrong_size(path, record.size, offset + 1)
        disk.sync(copy)
