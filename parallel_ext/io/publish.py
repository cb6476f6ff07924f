"""Replace a saved directory by a new one, so that the old or the new one is always whole."""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from parallel_ext.distributed.errors import CheckpointError, first_few, warn_user
from parallel_ext.io import disk
from parallel_ext.io.hf_reader import ADAPTER_CONFIG_NAME

# What a save writes or makes stale. Everything else in a directory is carried over.
_OF_A_SAVE = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-?????-of-?????.bin",
    "pytorch_model.bin.index.json",
    "config.json",
    "generation_config.json",
)

_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def of_a_save(name: str) -> bool:
    """Return whether a file of this name is one that a save writes or makes stale."""
    return any(fnmatchcase(name, pattern) for pattern in _OF_A_SAVE)


class Publication:
    """A temporary directory beside ``target`` that takes its place, or vanishes. One process only.

    A ``with`` block gets the temporary directory; at its end ``target`` is published, or after an
    error discarded.

    Args:
        target: the directory to replace; need not exist. A link to a directory is followed.

    Attributes:
        temporary: the directory to write into, on the same file system as ``target``.

    Raises:
        CheckpointError: ``target`` cannot be replaced: it is a file, a mount point, the working
            directory or a link to itself, or what it holds beside a model would be read as part of
            it.
        OSError: the temporary directory cannot be made.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(os.path.realpath(target))
        if self.target.is_symlink():
            raise CheckpointError(f"{self.target} is a link that leads back to itself; remove it")
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(f"{self.target} is a file; a directory is needed to save into")
        if self.target.exists() and os.path.samefile(self.target, os.curdir):
            raise CheckpointError(
                f"{self.target} is the working directory of this process; a save replaces the "
                "directory, so choose one inside it"
            )
        if (self.target / ADAPTER_CONFIG_NAME).exists():
            raise CheckpointError(
                f"{self.target} holds an adapter, which from_pretrained would add to the model; "
                f"save into another directory, or move its {ADAPTER_CONFIG_NAME}"
            )
        if os.path.ismount(self.target):
            raise CheckpointError(
                f"{self.target} is a mount point, which cannot be renamed; a save replaces the "
                "directory, so choose one inside it"
            )
        for path in self.target.iterdir() if self.target.exists() else ():
            if of_a_save(path.name) and path.is_dir():
                raise CheckpointError(f"{path} is a directory, but must be a file of the model")
        self._warn_of_leftovers()
        suffix = secrets.token_hex(4)
        self.temporary = self.target.with_name(f".{self.target.name}.tmp-{suffix}")
        self._old = self.target.with_name(f".{self.target.name}.old-{suffix}")
        disk.make_directories(self.target.parent)
        disk.make_directory(self.temporary)
        if self.target.exists():
            disk.copy_mode(self.target, self.temporary)
        self._made = os.stat(self.temporary)

    def _warn_of_leftovers(self) -> None:
        """Warn of subdirectories of ``target`` that a save did not move, since it was killed."""
        name, parent = re.escape(self.target.name), self.target.parent
        for path in parent.iterdir() if parent.exists() else ():
            if not re.fullmatch(rf"\.{name}\.(tmp|old)-[0-9a-f]{{8}}", path.name):
                continue
            with suppress(OSError):  # somebody else's, or gone
                if folders := sorted(each.name for each in path.iterdir() if each.is_dir()):
                    warn_user(
                        f"{path} is left of a save that was killed, with subdirectories of "
                        f"{self.target}: {first_few(folders)}; move them there"
                    )

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary directory, if it is still there."""
        if self.temporary.exists() and not os.path.samestat(self._made, os.stat(self.temporary)):
            disk.exchange(self.temporary, self.target)  # an interrupt came behind the other one
        disk.discard(self.temporary)

    def publish(self) -> None:
        """Put the temporary directory in the place of ``target``.

        What ``target`` holds beside a saved model (tokenizer, README, subdirectories) is kept.

        Raises:
            OSError: the file system refused; ``target`` is then what it was, or, if only its
                subdirectories could not be moved, complete but for those, which the error names.
        """
        replaces = self.target.exists()
        if replaces:
            self._carry_files()
        for path in self.temporary.iterdir():
            if path.is_file() and not path.is_symlink():
                with suppress(PermissionError):  # of others, which was carried over
                    disk.sync_path(path)
        disk.sync_path(self.temporary)
        if not replaces:
            disk.rename(self.temporary, self.target)
        else:
            self._change_places()
            for path in self._old.iterdir():
                if path.is_dir() and not path.is_symlink():
                    disk.rename(path, self.target / path.name)
        disk.sync_path(self.target)
        disk.sync_path(self.target.parent)
        disk.discard(self._old)

    def _change_places(self) -> None:
        """Put what ``target`` holds aside, and the temporary directory in its place."""
        try:
            disk.exchange(self.temporary, self.target)
        except OSError as error:
            if error.errno not in _CANNOT_EXCHANGE:
                raise
            self._rename_both()
            return
        disk.rename(self.temporary, self._old)

    def _rename_both(self) -> None:
        """Rename both directories, where a file system cannot let them change places at once."""
        try:
            disk.rename(self.target, self._old)
            disk.rename(self.temporary, self.target)
        except BaseException:  # an interrupt too must not leave the place empty
            if self._old.exists() and not self.target.exists():
                disk.rename(self._old, self.target)
            raise

    def _carry_files(self) -> None:
        """Link the files that do not belong to a saved model into the temporary directory."""
        for path in self.target.iterdir():
            is_directory = path.is_dir() and not path.is_symlink()
            new = self.temporary / path.name
            if not (is_directory or of_a_save(path.name) or os.path.lexists(new)):
                disk.link(path, new)
