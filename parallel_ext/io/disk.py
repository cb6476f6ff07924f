"""Every change to the disk that a save makes, in one place, where a test can let any of them fail.

Callers write ``disk.rename(...)``, so that a replaced function is found.
"""

from __future__ import annotations

import os
import shutil
from io import FileIO
from pathlib import Path

from parallel_ext import _C
from parallel_ext.distributed.errors import warn_user

_MUCH_BYTES = 1 << 20


def make_directory(path: Path, exist_ok: bool = False) -> None:
    """Make a directory, whose parent must be there."""
    path.mkdir(exist_ok=exist_ok)


def make_directories(path: Path) -> None:
    """Make a directory and its parents, durably, as far as they are missing."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        make_directory(each, exist_ok=True)  # somebody may have been faster
        sync_path(each.parent)


def create(path: Path) -> FileIO:
    """Open a file that must not exist, for unbuffered writing."""
    return FileIO(path, "x")


def open_or_create(path: Path) -> FileIO:
    """Open a file for reading and writing, unbuffered; make it, empty, if it is not there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return FileIO(os.open(path, flags, 0o644), "r+")


def reserve(file: FileIO, size: int) -> None:
    """Make the file ``size`` bytes long, so that a full disk is found now; the error names it."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        error.filename = file.name
        raise


def write(file: FileIO, memory: memoryview, offset: int) -> None:
    """Write all of ``memory`` at ``offset`` of the file; the disk begins at once if it is much."""
    done = 0
    while done < len(memory):
        done += os.pwrite(file.fileno(), memory[done:], offset + done)
    if done >= _MUCH_BYTES:
        _C.start_writeback(file.fileno(), offset, done)


def touch(file: FileIO) -> None:
    """Set the time of the last change of the file to now."""
    os.utime(file.fileno())


def sync(file: FileIO) -> None:
    """Wait until the contents of the file would outlive a loss of power."""
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a directory, would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file or directory another name at once; a file under that name is replaced."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> None:
    """Let two directories change places at once.

    Raises:
        OSError: the file system cannot, such as NFS; or as of a rename.
    """
    _C.exchange_paths(os.fsencode(one), os.fsencode(other))


def link(old: Path, new: Path) -> None:
    """Give a file, or a symbolic link, a second name; where that is not possible, copy it."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(old, new, follow_symlinks=False)


def copy_mode(old: Path, new: Path) -> None:
    """Give ``new`` the permissions of ``old``."""
    shutil.copymode(old, new)


def remove(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_tree(path: Path) -> None:
    """Remove a directory and all that is in it."""
    shutil.rmtree(path)


def discard(path: Path) -> None:
    """Remove a file or directory that may be missing; if that fails, warn and continue."""
    try:
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        elif os.path.lexists(path):
            remove(path)
    except OSError as error:
        warn_user(f"{path} is not needed, but could not be removed: {error}")


def write_file(path: Path, content: bytes) -> None:
    """Make a small file with this content, durably."""
    with create(path) as file:
        write(file, memoryview(content), 0)
        sync(file)
