"""Replace files of a directory that also holds others: each is the old or the new one, whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io import disk


@contextmanager
def replaced_files(target: str | os.PathLike[str], last: str = "") -> Iterator[Path]:
    """Yield a temporary directory, whose files replace those of ``target`` when the block ends.

    They are made durable first, and then renamed one by one, also those of subdirectories. An error
    in the block leaves ``target`` as it was. One process only.

    Args:
        target: the directory; made, with its parents, if it is not there.
        last: name of the files that come last in their directory, since they make the others count.

    Yields:
        A new directory inside ``target``, and so on its file system.

    Raises:
        CheckpointError: ``target`` is a file.
        OSError: the file system refused; every file is then the old or the new one.
    """
    target = Path(os.path.realpath(target))
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a directory is needed to save into")
    disk.make_directories(target)
    temporary = target / f".files.tmp-{secrets.token_hex(4)}"
    disk.make_directory(temporary)
    try:
        yield temporary
        made = [path for path in temporary.rglob("*") if path.is_file()]
        made.sort(key=lambda path: (path.parent, path.name == last, path.name))
        for path in made:
            disk.sync_path(path)
        for path in made:
            new = target / path.relative_to(temporary)
            disk.make_directories(new.parent)
            disk.rename(path, new)
        for folder in dict.fromkeys(path.parent.relative_to(temporary) for path in made):
            disk.sync_path(target / folder)
    finally:
        disk.discard(temporary)
