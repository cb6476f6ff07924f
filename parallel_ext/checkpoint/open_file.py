"""Opening the files of a saved model, which somebody else may have put there."""

from __future__ import annotations

import os
import reprlib
import stat
from io import FileIO
from pathlib import Path

from parallel_ext.errors import CheckpointError

_KINDS = {"d": "directory", "p": "FIFO", "s": "socket"}  # by the letter of ``ls -l``
_shorten = reprlib.Repr()  # the repr of a hostile value may be larger than memory
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 200
shown = _shorten.repr
"""The ``repr`` of any value, cut to a length that fits into a message."""


def open_file(path: Path, links: bool = True) -> FileIO:
    """Open a regular file of a saved model for unbuffered reading.

    A symbolic link may lead to a place in its own directory, and in a HuggingFace hub cache from a
    snapshot to the blobs of the same repository.

    Args:
        path: of the file; what it is, is found out before it is opened, since a device may act on
            that, and again afterwards, since it may be another by then.
        links: False where no symbolic link may be followed, as in a training checkpoint.

    Raises:
        CheckpointError: there is no such file, it is no regular file, it cannot be opened, or it is
            a symbolic link that leads elsewhere.
    """
    try:
        if path.is_symlink():
            if not links:
                raise CheckpointError(
                    f"{path}: a symbolic link, which is not followed in a training checkpoint; put "
                    "the file itself there"
                )
            folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
            if not (target.is_relative_to(folder) or target.parent == _hub_blobs(folder)):
                raise CheckpointError(
                    f"{path}: this symbolic link leads out of its directory, to {target}; put the "
                    "file itself there"
                )
        _check_regular(path, os.stat(path).st_mode)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # or a FIFO would wait for a writer
        file = FileIO(os.open(path, flags if links else flags | os.O_NOFOLLOW))
        try:
            _check_regular(path, os.fstat(file.fileno()).st_mode)
        except BaseException:
            file.close()
            raise
        return file
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: not a name that a file can have
        raise CheckpointError(f"{path}: cannot be opened: {error}") from error


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.filemode(mode)[0], "device")
        raise CheckpointError(f"{path}: a regular file is needed, but this is a {kind}")


def _hub_blobs(folder: Path) -> Path | None:
    """Where the files of ``models--<repository>/snapshots/<revision>`` lie in a hub cache."""
    for repository in folder.parents:
        if repository.name.startswith("models--") and repository / "snapshots" in folder.parents:
            return repository / "blobs"
    return None
