"""``save_state`` and ``load_state`` of accelerate: parallel models are checkpoints of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import RNG_STATE_NAME
from torch import nn

from parallel_ext.checkpoint.load import load_checkpoint
from parallel_ext.checkpoint.save import save_checkpoint
from parallel_ext.checkpoint.scheduler_state import Scheduler
from parallel_ext.checkpoint.steps import complete_steps
from parallel_ext.nn.temporarily import temporarily
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.owners import owners_in
from parallel_ext.parallel.state import is_parallel, state_of

LEFT_OUT: dict[str, Any] = {}
"""What stands for the values of a parallel model among those that accelerate is to write."""

_STEP = "accelerate_step"  # of accumulation, in the data state

_saves: ContextVar[bool] = ContextVar("save_state is running", default=False)


def saves_apart() -> bool:
    """Return whether ``save_state`` asks for values that px.save_checkpoint writes."""
    return _saves.get()


class _Prepared(NamedTuple):
    """A parallel model with what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scheduler: Scheduler | None


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


class _Parts:
    """The parallel models that an ``Accelerator`` has prepared, apart from all else.

    Attributes:
        prepared: the models, each with its optimizer and scheduler.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        models = {id(state_of(m)): m for m in accelerator._models if is_parallel(m)}
        optimizers: dict[int, list[Any]] = {}
        self._others: list[Any] = []
        for optimizer in accelerator._optimizers:
            owners = owners_in(unwrapped(optimizer)).values()
            if (model := next((owned.model for owned in owners), None)) is None:
                self._others.append(optimizer)
                continue
            models.setdefault(id(state_of(model)), model)
            optimizers.setdefault(id(state_of(model)), []).append(optimizer)
        ours = {id(unwrapped(each)) for found in optimizers.values() for each in found}
        schedulers: dict[int, list[Any]] = {}
        self._other_schedulers: list[Any] = []
        for scheduler in accelerator._schedulers:
            inner = getattr(scheduler, "scheduler", scheduler)
            of = id(unwrapped(getattr(inner, "optimizer", None)))
            if of in ours:
                schedulers.setdefault(of, []).append(inner)
            else:
                self._other_schedulers.append(scheduler)
        self.prepared = []
        for key, model in models.items():
            optimizer = self._only("optimizer", optimizers.get(key, []))
            optimizer = optimizer and unwrapped(optimizer)
            scheduler = self._only("scheduler", schedulers.get(id(optimizer), []))
            self.prepared.append(_Prepared(model, optimizer, scheduler))

    @staticmethod
    def _only(what: str, found: list[Any]) -> Any:
        if len(found) > 1:
            raise NotImplementedError(
                f"Accelerator.save_state: {len(found)} {what}s train one parallel model, but a "
                f"checkpoint holds one; give one {what} several param_groups"
            )
        return found[0] if found else None

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Hide optimizers and schedulers of parallel models from accelerate, inside the context."""
        others = {"_optimizers": self._others, "_schedulers": self._other_schedulers}
        token = _saves.set(True)
        try:
            with temporarily(self._accelerator, **others):
                yield
        finally:
            _saves.reset(token)

    def roots(self, directory: str | os.PathLike[str]) -> Iterator[tuple[Path, _Prepared]]:
        """Iterate over the models, each with the root of its checkpoints inside a directory."""
        for number, prepared in enumerate(self.prepared):
            root = Path(directory)
            yield (root / f"model_{number}" if number else root), prepared


def save_state(
    plain: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any
) -> str | os.PathLike[str]:
    """Extend ``Accelerator.save_state`` to write parallel models by ``px.save_checkpoint``.

    The directory that accelerate chooses becomes the root of a checkpoint; of a second model it is
    ``model_1`` inside. Beside it stands what accelerate writes of everything else: custom objects,
    samplers, the scaler, plain models. Every rank calls it.

    Raises:
        NotImplementedError: several optimizers or schedulers train one parallel model.
        CheckpointError: as ``px.save_checkpoint``; on all ranks.
    """
    parts = _Parts(self)
    if not parts.prepared:
        return plain(self, *args, **kwargs)
    arrive("Accelerator.save_state")
    control = state_of(parts.prepared[0].model).mesh.control

    def leave_out(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        weights[:] = [each for each in weights if each is not LEFT_OUT]

    def others() -> Any:
        with self.register_save_state_pre_hook(leave_out), parts.left_out():
            location = plain(self, *args, **kwargs)
        # The checkpoint holds the random numbers of all ranks, so accelerate's file is removed.
        Path(location, f"{RNG_STATE_NAME}_{self.process_index}.pkl").unlink(missing_ok=True)
        return location

    location = control.run_on_all("Accelerator.save_state", others, patient=True)

    def last_step() -> int:
        return max(complete_steps(root), default=-1) if control.rank == 0 else -1

    for root, prepared in parts.roots(location):
        last = control.run_on_all("Accelerator.save_state", last_step)
        step = max(self.save_iteration, control.all_gather_object(last)[0] + 1)
        save_checkpoint(root, step, *prepared, {_STEP: self.step}, keep_last=1)
    return location


def load_state(
    plain: Callable[..., Any],
    self: Accelerator,
    input_dir: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Extend ``Accelerator.load_state`` to read parallel models by ``px.load_checkpoint``.

    The layout may be another than when it was saved. Every rank calls it.

    Raises:
        ValueError: a rank does not see the directory; on all ranks.
        CheckpointError: as ``px.load_checkpoint``; on all ranks.
    """
    parts = _Parts(self)
    if not parts.prepared:
        plain(self, input_dir, *args, **kwargs)
        return
    arrive("Accelerator.load_state")
    control = state_of(parts.prepared[0].model).mesh.control
    loaded: list[int] = []

    def load(models: list[nn.Module], input_dir: str) -> None:
        models[:] = [model for model in models if not is_parallel(model)]
        for root, prepared in parts.roots(input_dir):
            resumed = load_checkpoint(root, *prepared)
            loaded.append((resumed.data_state or {}).get(_STEP, self.step))

    # Where a rank raises before it is in `load`, the others would wait for it there.
    control.run_on_all("Accelerator.load_state", lambda: _check_folder(self, input_dir))
    with self.register_load_state_pre_hook(load), parts.left_out():
        control.run_on_all(
            "Accelerator.load_state", lambda: plain(self, input_dir, *args, **kwargs)
        )
    self.step = loaded[0]


def _check_folder(accelerator: Accelerator, input_dir: str | None) -> None:
    """Raise a ValueError unless there is what accelerate is to load from, as it would."""
    if input_dir is not None:
        folder, is_there = input_dir, os.path.isdir(os.path.expanduser(input_dir))
    elif accelerator.project_configuration.automatic_checkpoint_naming:
        folder = os.path.join(accelerator.project_dir, "checkpoints")
        is_there = os.path.isdir(folder) and bool(os.listdir(folder))
    else:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    if not is_there:
        raise ValueError(f"Tried to find {folder} but folder does not exist")
