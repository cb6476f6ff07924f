"""Open files of others with care, and say what is wrong with them in one error."""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from parallel_ext.distributed.errors import CheckpointError, CollectiveTimeout, DisagreementError

_KINDS = {"d": "directory", "p": "FIFO", "s": "socket"}  # by the letter of ``ls -l``
_shorten = reprlib.Repr()  # the repr of a hostile value may be larger than memory
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 200
shown = _shorten.repr
"""The ``repr`` of any value, shortened to a length that fits into a message."""


def open_file(path: Path, links: bool = True) -> FileIO:
    """Open a regular file of a saved model for unbuffered reading.

    A symbolic link may lead to a place in its own directory, and in a HuggingFace hub cache from a
    snapshot to the blobs of the same repository.

    Args:
        path: of the file. What it is and where it lies is asked of the very file that is then
            read, whatever stands under its name meanwhile. Nothing else is opened, since a device
            may act on that.
        links: False where no symbolic link may be followed, as in a training checkpoint.

    Raises:
        CheckpointError: there is no such file, it is no regular file, it cannot be opened, or it is
            a symbolic link that leads elsewhere.
    """
    flags = os.O_CLOEXEC if links else os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        folder = Path(os.path.realpath(path.parent))
        found = os.open(path, os.O_PATH | flags)
        try:
            mode, same = os.fstat(found).st_mode, f"/proc/self/fd/{found}"
            if stat.S_ISLNK(mode):
                raise CheckpointError(
                    f"{path}: a symbolic link, which is not followed in a training checkpoint; put "
                    "the file itself there"
                )
            target = Path(os.readlink(same))
            if not (target.is_relative_to(folder) or target.parent == _hub_blobs(folder)):
                raise CheckpointError(
                    f"{path}: this symbolic link leads out of its directory, to {target}; put the "
                    "file itself there"
                )
            if not stat.S_ISREG(mode):
                kind = _KINDS.get(stat.filemode(mode)[0], "device")
                raise CheckpointError(f"{path}: a regular file is needed, but this is a {kind}")
            return FileIO(os.open(same, os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(found)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: not a name that a file can have
        text = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened: {text}") from error


def _hub_blobs(folder: Path) -> Path | None:
    """Return the folder of the files of a snapshot in a HuggingFace hub cache; None elsewhere."""
    for repository in folder.parents:
        if repository.name.startswith("models--") and repository / "snapshots" in folder.parents:
            return repository / "blobs"
    return None


class CheckpointTimeout(CheckpointError, CollectiveTimeout):  # noqa: N818 (as the other's name)
    """The error when a rank was killed or stopped, did not come, or left early; names it."""


class CheckpointDisagreement(CheckpointError, DisagreementError):  # noqa: N818
    """The error when the ranks were about to do different things; names who."""


@contextmanager
def one_error(op_name: str) -> Iterator[None]:
    """Let every error that leaves the block be a :class:`CheckpointError`.

    A rank that handles the error of a save, and continues, can then be sure that the others do,
    too: they would not if one of them had an ``OSError`` where the others hear of it.

    Args:
        op_name: what the ranks are doing, where the error does not say so.

    Raises:
        CheckpointError: what was raised inside, if it was one, else with that as its cause.
    """
    try:
        yield
    except CheckpointError:
        raise
    except CollectiveTimeout as error:
        raise CheckpointTimeout(_with(op_name, error)) from error
    except DisagreementError as error:
        raise CheckpointDisagreement(_with(op_name, error)) from error
    except RuntimeError as error:  # also that of a rank which quotes another's
        raise CheckpointError(_with(op_name, error)) from error
    except Exception as error:
        raise CheckpointError(f"{op_name}: {type(error).__name__}: {error}") from error


def _with(op_name: str, error: Exception) -> str:
    return str(error) if op_name in str(error) else f"{op_name}: {error}"
