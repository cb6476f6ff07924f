"""One writer at a time in the directory of a job's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from io import FileIO
from pathlib import Path

from parallel_ext.distributed.errors import CheckpointError, warn_user
from parallel_ext.distributed.hosts import machine
from parallel_ext.io import disk
from parallel_ext.io.safe_open import shown

LOCK_NAME = ".lock"
_BEAT_S = 4.0
_WATCH_S = 15.0
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_TEXT = 1000
_held: set[FileIO] = set()


def _let_go() -> None:
    """Close the lock files in a forked process, which may outlive a job that is killed."""
    for file in _held:
        file.close()
    _held.clear()


@cache
def _let_go_in_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def one_writer(root: Path) -> Iterator[None]:
    """Let no other process save into ``root`` inside the context; on one rank.

    ``root/.lock`` says who writes. Its holder has locked the file, which ends with the process,
    however it ends, and touches it every few seconds. A file that is left over is removed: at once
    if its holder ran on this machine, whose kernel knows that it is gone, else after some seconds
    in which nobody has touched it. It depends neither on process ids, which are used again, nor
    on clocks, and no dead job blocks the next.

    Raises:
        CheckpointError: another process is saving there; says which.
        OSError: the file cannot be made.
    """
    _let_go_in_forks()
    path = root / LOCK_NAME
    with _take(path) as file:
        finished = threading.Event()
        beating = threading.Thread(target=_beat, args=(file, path, finished), daemon=True)
        _held.add(file)
        try:
            disk.write(file, memoryview(_own_name()), 0)
            disk.sync(file)
            beating.start()
            yield
        finally:
            finished.set()
            if beating.ident is not None:  # started
                beating.join()
            _held.discard(file)
            _release(file, path)


def _take(path: Path) -> FileIO:
    """Return the open lock file, empty and locked."""
    while True:
        file = disk.open_or_create(path)
        try:
            known = _lock(file, path)
            holder = _text(file)
            if _is_at(file, path):
                if not holder:
                    return file
                # A name without its end is of a process that died before it did anything else.
                if holder.endswith("\n") and not (known and machine() in holder):
                    _watch(path, holder)
                disk.remove(path)
        except BaseException:
            file.close()
            raise
        file.close()  # it was left over, or its holder removed it just now


def _lock(file: FileIO, path: Path) -> bool:
    """Lock the file, and return whether its file system can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path, _text(file)) from None
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return False
    return True


def _watch(path: Path, holder: str) -> None:
    """Watch a lock file whose holder cannot be asked for, and raise if anybody touches it."""
    begin, deadline = _touched(path), time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(_BEAT_S / 8)
        if _touched(path) != begin:
            raise _busy(path, holder)
    warn_user(
        f"{path.parent}: the lock of {shown(holder.strip())} is taken over, since nobody has "
        f"touched it for {_WATCH_S:g} s"
    )


def _touched(path: Path) -> int:
    with FileIO(path) as file:  # opened again, since a network file system then asks its server
        return os.fstat(file.fileno()).st_mtime_ns


def _beat(file: FileIO, path: Path, finished: threading.Event) -> None:
    """Touch the file until the save is over; warn of the first error, which may pass."""
    warned = False
    while not finished.wait(_BEAT_S):
        try:
            disk.touch(file)
        except OSError as error:
            if not warned:
                warn_user(f"{path} cannot be touched: {error}; another job may take the lock over")
            warned = True


def _release(file: FileIO, path: Path) -> None:
    """Remove the file, unless another process took this one for dead and has its own there.

    A forked process, in which it is closed, holds no lock.
    """
    try:
        if not file.closed and _is_at(file, path):
            disk.remove(path)
    except OSError as error:
        warn_user(f"{path} could not be removed; the next save does it: {error}")


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def _text(file: FileIO) -> str:
    return os.pread(file.fileno(), _MOST_TEXT, 0).decode(errors="replace")


def _own_name() -> bytes:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} ({machine()}) since {now}\n".encode()


def _busy(path: Path, holder: str) -> CheckpointError:
    return CheckpointError(
        f"{path.parent}: another save is going on there, by {holder.strip() or 'a process'}; wait "
        "until it is over, or save to another root, since each job needs its own"
    )
