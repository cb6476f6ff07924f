"""Every change to the disk that a save makes, in one place, where a test can let any of them fail.

Callers write ``disk.rename(...)``, so that a replaced function is found.
"""

from __future__ import annotations

import os
import shutil
from io import FileIO
from pathlib import Path

from parallel_ext import _C


def make_directory(path: Path) -> None:
    """Make a directory that must not exist; its parents may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir()


def create(path: Path) -> FileIO:
    """Open a file that must not exist, for unbuffered writing."""
    return FileIO(path, "x")


def reserve(file: FileIO, size: int) -> None:
    """Make the file ``size`` bytes long, so that a full disk is found now."""
    os.posix_fallocate(file.fileno(), 0, size)


def write(file: FileIO, memory: memoryview, offset: int) -> None:
    """Write all of ``memory`` at a place of the file, and let the disk begin with it."""
    done = 0
    while done < len(memory):
        done += os.pwrite(file.fileno(), memory[done:], offset + done)
    _C.start_writeback(file.fileno(), offset, done)


def sync(file: FileIO) -> None:
    """Wait until the contents of the file would outlive a loss of power."""
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """The same for a file by name, or for the entries of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or directory another name at once; a file under that name is replaced."""
    os.rename(old, new)


def remove_tree(path: Path) -> None:
    """Remove what is left of a directory, as far as it can be removed."""
    shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Make a small file with this content, durably."""
    with create(path) as file:
        write(file, memoryview(content), 0)
        sync(file)
