"""Find out, before a save writes anything, whether its directory is one for all hosts."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from pathlib import Path

from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import disk

_TOKEN_NAME = ".parallel_ext-token-{random}"


def check_same_directory(directory: Path, control: ControlPlane, op_name: str) -> None:
    """Raise on every rank unless all hosts of the job see the directory of rank 0.

    Rank 0 makes a file for a moment in what is there of the directory's parents, or in itself, and
    all ranks look for it. On one host nothing is done.

    Args:
        directory: where a save is to write; that of rank 0 counts. It need not exist.

    Raises:
        CheckpointError: some ranks do not see the file; names one of them, and its host.
        OSError: rank 0 cannot make the file.
    """
    if not control.hosts.several:
        return
    with ExitStack() as cleanup:

        def make() -> str | None:
            if control.rank != 0:
                return None
            target = Path(os.path.realpath(directory))
            place = next(path for path in (target, *target.parents) if path.is_dir())
            token = place / _TOKEN_NAME.format(random=secrets.token_hex(8))
            cleanup.callback(disk.discard, token)
            disk.create(token).close()
            return str(token)

        made = control.run_on_all(op_name, make)
        token = Path(control.all_gather_object(made, op_name=op_name)[0])
        # A name that no host has asked for before, which no cache of a network file system knows.
        check_all_see(token, directory, control, op_name)


def check_all_see(path: Path, directory: Path, control: ControlPlane, op_name: str) -> None:
    """Raise on every rank unless all ranks of a job on several hosts see a path.

    Raises:
        CheckpointError: some ranks do not see it; names one of them, and its host.
    """
    if not control.hosts.several:
        return
    seen = control.all_gather_object(os.access(path, os.F_OK), op_name=op_name)  # raises nothing
    if not all(seen):
        first, other = seen.index(True) if any(seen) else 0, seen.index(False)
        hosts = control.hosts
        raise CheckpointError(
            f"{op_name}: {directory} is not the same directory on rank {first} (host "
            f"{hosts.name(first)}) and rank {other} (host {hosts.name(other)}); give all hosts one "
            "that they share"
        )
