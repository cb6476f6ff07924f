"""Which old training checkpoints stay, and the removal of what is not needed any more."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path

from parallel_ext.checkpoint import disk
from parallel_ext.checkpoint.steps import (
    POINTER_NAME,
    TEMPORARY_NAME,
    TRASH_NAME,
    complete_steps,
    numbers_of_saves,
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
    """See that the numbers of checkpoints to keep make sense.

    Raises:
        ValueError: they do not.
    """
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
    """Which steps are not needed any more.

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
        warnings.warn(
            f"{root}: step {saved} is saved, but old steps could not be removed: {error}",
            stacklevel=2,
        )


def remove_leftovers(root: Path) -> None:
    """Remove what saves that were killed have left, and what was renamed to be removed.

    Args:
        root: where the checkpoints of a job are; this process is its one writer.

    Raises:
        OSError: the directory cannot be read.
    """
    for path in sorted(root.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            disk.discard(path)
