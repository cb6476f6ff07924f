"""The training checkpoints of a job: a directory for each step, and a file that names the last."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from parallel_ext.checkpoint import disk
from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    STATE_FOLDER,
    Manifest,
    commit_of,
    number_of_save,
    read_manifest,
)
from parallel_ext.checkpoint.open_file import CheckpointError, shown
from parallel_ext.checkpoint.strict_json import read_content

LATEST_NAME = "LATEST"
TEMPORARY_NAME = ".tmp-{name}-{save_id}"  # of a step that is being written
TRASH_NAME = ".trash-{name}-{save_id}"  # of a step that is not needed any more, by the save
POINTER_NAME = f".{LATEST_NAME}-{{save_id}}"  # of what is to become LATEST
_STEP_NAME = re.compile(r"step-([0-9]{8,19})")
_LATEST = re.compile(rb"(step-[0-9]{8,19}) ([0-9a-f]{32})\n")
_MAX_LATEST_BYTES = 4096


def name_of_step(step: int) -> str:
    """The name of the directory of a step.

    Example:
        >>> name_of_step(1200)
        'step-00001200'
    """
    return f"step-{step:08}"


def publish_step(temporary: Path, root: Path, manifest: Manifest) -> None:
    """Seal a directory whose files are durable, and give it its name; on one rank.

    A directory of the same step is renamed to ``.trash-...`` before. It is not the one that
    ``LATEST`` names, so that this one is found all the time.

    Args:
        temporary: the directory, inside of ``root``.
        root: where the checkpoints of a job are.
        manifest: of the directory.

    Raises:
        OSError: the file system refused. Until the directory has its name ``latest`` finds the one
            before.
    """
    content = manifest.to_bytes()
    disk.write_file(temporary / MANIFEST_NAME, content)
    disk.sync_path(temporary / STATE_FOLDER)
    disk.sync_path(temporary)
    disk.write_file(temporary / COMMIT_NAME, commit_of(content, manifest))
    disk.sync_path(temporary)
    name = name_of_step(manifest.step)
    if os.path.lexists(root / name):
        disk.rename(root / name, root / TRASH_NAME.format(name=name, save_id=manifest.save_id))
    disk.rename(temporary, root / name)
    disk.sync_path(root)
    disk.sync_path(root.absolute().parent)  # root itself may be new
    pointer = root / POINTER_NAME.format(save_id=manifest.save_id)
    disk.write_file(pointer, f"{name} {manifest.save_id}\n".encode())
    disk.rename(pointer, root / LATEST_NAME)
    disk.sync_path(root)


def manifest_of_step(path: Path) -> Manifest:
    """The manifest of a directory that has the name of a step, as :func:`read_manifest`.

    Raises:
        CheckpointError: the directory holds another step than its name says, among others.
    """
    manifest = read_manifest(path)
    if path.name != name_of_step(manifest.step):
        raise CheckpointError(f"{path} holds the step {manifest.step}, by its {MANIFEST_NAME}")
    return manifest


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The last complete checkpoint that was saved under ``root``; any process may ask at any time.

    It is the one that ``root/LATEST`` names. Without that file, as after a first save that was
    killed in its last moment, it is the one whose save has the highest number.

    Args:
        root: as of ``save_checkpoint``.

    Returns:
        The directory of the step; None if there is none.

    Raises:
        CheckpointError: ``LATEST``, or the commit or manifest of that checkpoint, is damaged.

    Example:
        >>> latest("a/directory/that/is/not/there") is None
        True
    """
    root = Path(root)
    while (named := _named_by_latest(root)) is not None:
        try:
            return _found(root, *named)
        except CheckpointError:
            if _named_by_latest(root) == named:
                raise
            # A save has put another there since, and may have removed the one that was named.
    steps = complete_steps(root)
    if not steps:
        return None
    path = steps[_last_saved(steps)]
    manifest_of_step(path)
    return path


def _found(root: Path, name: str, save_id: str) -> Path:
    """The directory that ``LATEST`` names."""
    pointer, path = root / LATEST_NAME, root / name
    if not path.is_dir():
        raise CheckpointError(
            f"{pointer} names {name}, but there is no such directory; load a step by its number"
        )
    found = manifest_of_step(path).save_id
    if found != save_id:
        raise CheckpointError(
            f"{pointer} names the save {save_id} of {name}, but that directory is of {found}; load "
            "a step by its number"
        )
    return path


def _named_by_latest(root: Path) -> tuple[str, str] | None:
    """Name and save of the step in ``LATEST``; None if there is no such file."""
    pointer = root / LATEST_NAME
    if not os.path.lexists(pointer):
        return None
    content = read_content(pointer, _MAX_LATEST_BYTES, links=False)
    named = _LATEST.fullmatch(content)
    if named is None:
        raise CheckpointError(
            f"{pointer}, bytes [0, {len(content)}), is damaged: expected the name of a step "
            f"and the id of its save, found {shown(content)}; load a step by its number"
        )
    return named[1].decode(), named[2].decode()


def complete_steps(root: Path) -> dict[int, Path]:
    """The directories of steps under ``root`` that have a commit, by the number of the step."""
    steps = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP_NAME.fullmatch(path.name)
        is_step = match and name_of_step(int(match[1])) == path.name
        if is_step and os.path.lexists(path / COMMIT_NAME):
            steps[int(match[1])] = path
    return steps


def numbers_of_saves(steps: Mapping[int, Path]) -> dict[int, int]:
    """The numbers of the saves in directories of steps; of those with a damaged commit none."""
    numbers = {}
    for step, path in steps.items():
        with suppress(CheckpointError):  # it says so to who loads it
            numbers[step] = number_of_save(path)
    return numbers


def _last_saved(steps: Mapping[int, Path]) -> int:
    numbers = numbers_of_saves(steps)
    return max(steps, key=lambda step: (numbers.get(step, -1), step))


def check_may_save(root: Path, step: int) -> None:
    """See that saving a step would overwrite neither the last checkpoint nor something foreign.

    Another complete checkpoint of that step may be replaced: it is of a save that was killed before
    ``LATEST`` named it, or of a run that was given up for an earlier step.

    Raises:
        CheckpointError: it would.
    """
    target = root / name_of_step(step)
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not os.path.lexists(target / COMMIT_NAME):
        raise CheckpointError(
            f"{target} is there already, and is no training checkpoint; remove it, or save to "
            "another root"
        )
    named = _named_by_latest(root)
    last = named[0] if named else name_of_step(_last_saved(complete_steps(root)))
    if name_of_step(step) == last:
        raise CheckpointError(
            f"{target} is there already, and is the last checkpoint, which a save never "
            "overwrites; load it, remove it, or save to another root"
        )
