"""The steps of a checkpoint's root: which there are, and which are removed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from parallel_ext.checkpoint.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    STATE_FOLDER,
    Manifest,
    commit_of,
    number_of_save,
    read_manifest,
)
from parallel_ext.distributed.errors import CheckpointError, warn_user
from parallel_ext.io import disk
from parallel_ext.io.safe_open import shown
from parallel_ext.io.schema import read_content

LATEST_NAME = "LATEST"
TEMPORARY_NAME = ".tmp-{name}-{save_id}"  # of a step that is being written
TRASH_NAME = ".trash-{name}-{save_id}"  # of a step that is not needed any more, by the save
POINTER_NAME = f".{LATEST_NAME}-{{save_id}}"  # of what is to become LATEST
_STEP_NAME = re.compile(r"step-([0-9]{8,19})")
_LATEST = re.compile(rb"(step-[0-9]{8,19}) ([0-9a-f]{32})\n")
_MAX_LATEST_BYTES = 4096


def name_of_step(step: int) -> str:
    """Return the name of the directory of a step.

    Example:
        >>> name_of_step(1200)
        'step-00001200'
    """
    return f"step-{step:08}"


def step_of_name(name: str) -> int | None:
    """Return the step whose directory has a name; None if it is of none."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and name_of_step(int(match[1])) == name else None


def publish_step(temporary: Path, root: Path, manifest: Manifest) -> None:
    """Seal a directory whose files are durable, and give it its name; on one rank.

    A directory of the same step is renamed to ``.trash-...`` before. It is not the one that
    ``LATEST`` names, so that this one is found all the time.

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
    """Read the manifest of a directory that has the name of a step, as :func:`read_manifest`.

    Raises:
        CheckpointError: the directory holds another step than its name says, among others.
    """
    manifest = read_manifest(path)
    if path.name != name_of_step(manifest.step):
        raise CheckpointError(f"{path} holds the step {manifest.step}, by its {MANIFEST_NAME}")
    return manifest


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the last complete checkpoint saved under ``root``; any process may ask at any time.

    It is the one that ``root/LATEST`` names. Without that file, as after a first save that was
    killed in its last moment, it is the one whose save has the highest number.

    Args:
        root: as of ``save_checkpoint``.

    Returns:
        The directory of the step; None if there is none.

    Raises:
        CheckpointError: ``LATEST``, or the commit or manifest of that checkpoint, is damaged.

    Example:
        >>> latest_checkpoint("a/directory/that/is/not/there") is None
        True
    """
    found = latest_save(Path(root))
    return None if found is None else found[0]


latest = latest_checkpoint  # an alias


def latest_save(root: Path) -> tuple[Path, str] | None:
    """Return the directory of :func:`latest_checkpoint` and the id of its save, if there is one."""
    while (named := _named_by_latest(root)) is not None:
        try:
            return _found(root, *named), named[1]
        except CheckpointError:
            if _named_by_latest(root) == named:
                raise
            # A save has put another there since, and may have removed the one that was named.
    steps = complete_steps(root)
    if not steps:
        return None
    path = steps[_last_saved(steps)]
    return path, manifest_of_step(path).save_id


def _found(root: Path, name: str, save_id: str) -> Path:
    """Return the directory that ``LATEST`` names, after a check of its step and save."""
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
    """Read the name and the save id of the step in ``LATEST``; None if there is no such file."""
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
    """Return the directories under ``root`` that have a commit, by the number of their step."""
    steps = {}
    for path in root.iterdir() if root.is_dir() else ():
        step = step_of_name(path.name)
        if step is not None and os.path.lexists(path / COMMIT_NAME):
            steps[step] = path
    return steps


def numbers_of_saves(steps: Mapping[int, Path]) -> dict[int, int]:
    """Return the number of the save of each step, leaving out those with a damaged commit."""
    numbers = {}
    for step, path in steps.items():
        with suppress(CheckpointError):  # it says so to who loads it
            numbers[step] = number_of_save(path)
    return numbers


def _last_saved(steps: Mapping[int, Path]) -> int:
    numbers = numbers_of_saves(steps)
    return max(steps, key=lambda step: (numbers.get(step, -1), step))


def check_may_save(root: Path, step: int) -> None:
    """Raise a CheckpointError if a step would overwrite the last checkpoint or something foreign.

    Another complete checkpoint of that step may be replaced: it is of a save that was killed before
    ``LATEST`` named it, or of a run that was given up for an earlier step.
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


_LEFTOVER = re.compile(
    "|".join(
        re.escape(form.format(name="STEP", save_id="ID"))
        .replace("STEP", r"step-\d{8,}")
        .replace("ID", "[0-9a-f]{32}")
        for form in (TEMPORARY_NAME, TRASH_NAME, POINTER_NAME)
    )
)


def check_keep(keep_last: int | None, keep_every: int | None) -> None:
    """Raise a ValueError unless the numbers of checkpoints to keep make sense."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"save_checkpoint: {name} must be a whole number from 1 on, or None, got {value!r}"
            )
    if keep_every is not None and keep_last is None:
        raise ValueError(
            f"save_checkpoint: keep_every={keep_every} says which of the steps stay that keep_last "
            "would remove; pass keep_last too"
        )


def steps_to_remove(
    numbers: Mapping[int, int], keep_last: int | None, keep_every: int | None
) -> list[int]:
    """Return the steps whose checkpoints are not needed any more.

    Args:
        numbers: of the saves of all steps that there are, in the order in which they were made.
            After going back to an earlier step that is not the order of the steps.
        keep_last: how many of the last saves stay; all when None.
        keep_every: multiples of it stay too.

    Example:
        >>> steps_to_remove({10: 1, 20: 2, 30: 3, 15: 4, 25: 5}, keep_last=2, keep_every=20)
        [10, 30]
    """
    if keep_last is None:
        return []
    old = sorted(numbers, key=lambda step: numbers[step])[:-keep_last]
    return [step for step in old if keep_every is None or step % keep_every]


def prune(
    root: Path, saved: int, save_id: str, keep_last: int | None, keep_every: int | None
) -> None:
    """Remove the checkpoints that are not needed any more, after one was published.

    Only directories of complete steps are removed. Each loses its name first, so that a step that
    has its name is whole. What cannot be removed stays, with a warning: the save has succeeded.

    Args:
        root: where the checkpoints of a job are; this process is its one writer.
        saved: the step that was published, by the save with the highest number.
        save_id: of that save.
        keep_last, keep_every: as of :func:`steps_to_remove`.
    """
    try:
        steps = {n: path for n, path in complete_steps(root).items() if not path.is_symlink()}
        removed = steps_to_remove(numbers_of_saves(steps), keep_last, keep_every)
        for step in removed:
            trash = TRASH_NAME.format(name=steps[step].name, save_id=save_id)
            disk.rename(steps[step], root / trash)
        if removed:
            disk.sync_path(root)
        remove_leftovers(root)
    except OSError as error:
        warn_user(f"{root}: step {saved} is saved, but old steps could not be removed: {error}")


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves have left in ``root``, and what was renamed to be removed."""
    for path in sorted(root.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            disk.discard(path)
