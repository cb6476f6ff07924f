"""The state of a learning rate scheduler: out of one, and for one of the same class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from parallel_ext.checkpoint.training_state import decode, differs_in_kind, encode
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safe_open import shown


class Scheduler(Protocol):
    """The methods that a learning rate scheduler must have."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """Return the class and the state of a scheduler, as JSON.

    Raises:
        CheckpointError: the state holds what a checkpoint cannot.
    """
    kind = type(scheduler).__name__
    return {"class": kind, "state": encode(scheduler.state_dict(), f"the state of {kind}")}


def saved_for(scheduler: Scheduler, description: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the saved state that ``scheduler.load_state_dict`` is to be given, checked.

    Args:
        scheduler: of the class that was saved; torch's would take the state of any other.
        description: an object, as it was read, to be one of :func:`describe`.

    Raises:
        CheckpointError: the state is not that of such a scheduler.
    """
    own = type(scheduler).__name__
    if (saved := description.get("class")) != own:
        raise CheckpointError(
            f"{path}: the state of {shown(saved)} was saved, but the scheduler is {own}"
        )
    state = decode(description.get("state"), f"{path}, the state of {own}")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: {shown(state)} is no state of a scheduler")
    _check(state, scheduler, f"{path}: the state of {own}: ")
    return state


def _check(saved: dict[str, Any], scheduler: Scheduler, where: str) -> None:
    """Raise unless saved values are of the kinds of the running ones, as far as can be seen.

    torch's schedulers make attributes of what they are given, also of a key such as ``step``.
    """
    own = scheduler.state_dict()
    for key, value in saved.items():
        if key not in own:
            if hasattr(scheduler, str(key)):
                raise CheckpointError(f"{where}{shown(key)} is no state, but something else of it")
        elif problem := differs_in_kind(value, own[key]):
            raise CheckpointError(f"{where}{shown(key)} {problem}")
