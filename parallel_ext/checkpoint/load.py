"""Loading a training checkpoint into a model of any layout."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel_ext.checkpoint import rng, scheduler_state
from parallel_ext.checkpoint.manifest import (
    LOOP_NAME,
    RNG_NAME,
    STATE_FOLDER,
    Manifest,
    bits_of,
    read_manifest,
)
from parallel_ext.checkpoint.optimizer_state import restore
from parallel_ext.checkpoint.scheduler_state import Scheduler
from parallel_ext.checkpoint.source import Contents
from parallel_ext.checkpoint.steps import latest_save, manifest_of_step, name_of_step, step_of_name
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.reading import Wanted, read_shards
from parallel_ext.io.safe_open import shown
from parallel_ext.io.same_directory import check_all_see
from parallel_ext.parallel.plan import Invariant


@dataclass(frozen=True)
class Resumed:
    """The point from which training resumes; equal on every rank.

    Attributes:
        step: the saved step.
        data_state: what ``save_checkpoint`` was given.
        path: the directory that was loaded.
        same_random_numbers: whether every rank draws the numbers that it would have drawn.
    """

    step: int
    data_state: Any
    path: Path
    same_random_numbers: bool


def load_step(
    root: str | os.PathLike[str],
    contents_of: Callable[[], Contents],
    optimizer: torch.optim.Optimizer | None,
    scheduler: Scheduler | None,
    step: int | None,
    mesh: Mesh,
    invariant: Invariant | None = None,
    progress: bool | None = None,
) -> Resumed:
    """Load a training checkpoint into the contents of a model, its optimizer and its scheduler.

    It does the work of :func:`parallel_ext.load_checkpoint`, whose docstring says the rest.

    Args:
        root, optimizer, scheduler, step, progress: as of ``load_checkpoint``.
        contents_of: returns what is to be loaded; may raise.
        mesh: the ranks of the model.
        invariant: of the model.
    """
    op_name = f"load_checkpoint from {os.fspath(root)}" + ("" if step is None else f", step {step}")
    given = type(optimizer).__name__, type(scheduler).__name__
    mesh.control.barrier(f"{op_name}, into optimizer {given[0]}, scheduler {given[1]}")
    mesh.control.run_on_all(op_name, mesh.background.finish, patient=mesh.background.busy)
    chosen = mesh.control.run_on_all(op_name, lambda: _choose(Path(root), step, mesh))
    found, save_id = mesh.control.all_gather_object(chosen)[0]
    path = Path(found)
    check_all_see(path, path, mesh.control, op_name)  # a copy of it on each host will do
    with ExitStack() as cleanup:
        contents = mesh.control.run_on_all(op_name, contents_of)
        opened = mesh.control.run_on_all(op_name, lambda: _Opened(path, save_id, contents, cleanup))
        wanted, apply = mesh.control.run_on_all(
            op_name, lambda: opened.match(optimizer, scheduler, mesh)
        )
        read_shards(wanted, opened.file_of, mesh, op_name, progress)
        mesh.control.run_on_all(op_name, apply)
    _warn_of_other_bits(opened.manifest, path, bits_of(invariant, mesh.device))
    same = opened.states is not None
    return Resumed(opened.manifest.step, opened.loop["data_state"], path, same)


def _warn_of_other_bits(manifest: Manifest, path: Path, own: str) -> None:
    saved = manifest.saved_by.get("bits")
    if saved and saved != own:
        warnings.warn(
            f"{path} was trained with {shown(saved)}, and resumes with {own or 'ordinary sums'}: "
            "to rounding the same training, not in bits",
            stacklevel=4,
        )


def _choose(root: Path, step: int | None, mesh: Mesh) -> tuple[str, str] | None:
    """Return the directory to load, as rank 0 sees it, and the id of its save; None elsewhere."""
    if mesh.rank != 0:
        return None
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"load_checkpoint: step must be a whole number from 0 on, got {step!r}")
    if step is not None:
        path = root / name_of_step(step)
        return str(path), manifest_of_step(path).save_id
    found = latest_save(root)
    if found is None:
        number, hint = step_of_name(root.name), ""
        if number is not None:
            hint = f"; of a step give the root, {root.parent}, and step={number}"
        raise CheckpointError(f"{root} holds no training checkpoint{hint}")
    return str(found[0]), found[1]


class _Opened:
    """A training checkpoint whose files have been opened and found consistent."""

    def __init__(self, path: Path, save_id: str, contents: Contents, cleanup: ExitStack) -> None:
        self.path, self.manifest, self.contents = path, read_manifest(path), contents
        if self.manifest.save_id != save_id:
            raise CheckpointError(
                f"{path} is of the save {self.manifest.save_id} here, but rank 0 sees {save_id}"
            )
        files = self.manifest.files
        self.states: dict[str, torch.Tensor] | None = None  # of random numbers, on the same mesh
        self.loop = read_small_files(path, self.manifest)
        self.file_of = dict(contents.open(path, self.manifest, cleanup))
        self._of_model = frozenset(self.file_of)
        for name in files:
            if name.startswith(STATE_FOLDER) and name.endswith(".safetensors") and name != RNG_NAME:
                file = cleanup.enter_context(self.manifest.open(path, name))
                self.file_of.update(dict.fromkeys(file.tensors, file))

    def match(
        self,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Scheduler | None,
        mesh: Mesh,
    ) -> tuple[list[tuple[Wanted, torch.Tensor]], Callable[[], None]]:
        """Return what is to be read into which tensors, and the function that then applies it.

        No model, optimizer or scheduler changes yet.
        """
        wanted, layout = [], self.contents.layout
        for name, shard in self.contents.values(mesh.rank).items():
            for part in layout.parts_of(name):
                if part.name not in self._of_model:  # a buffer, which other directories may lack
                    raise CheckpointError(f"{self.path}: {part.name} is missing")
                dtype = self.file_of[part.name].tensors[part.name].dtype
                if dtype != shard.dtype:
                    raise CheckpointError(
                        f"{self.path}: {part.name} was saved as {dtype}, but the model has "
                        f"{shard.dtype}; build the model in the dtype that was trained"
                    )
                wanted.append((Wanted(part.name, layout[name], part), shard))
        for op_name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if given is not None and self.loop[op_name] is None:
                raise CheckpointError(f"{self.path} was saved without the {op_name}'s state")
        apply = [partial(self.contents.restore_dropout_masks, self.loop["dropout_masks"])]
        if optimizer is not None:
            saved = {
                name: spec
                for name, (file, spec) in self.manifest.tensors.items()
                if file.startswith(STATE_FOLDER)
            }
            description = self.loop["optimizer"]
            places, give = restore(optimizer, self.contents, description, saved, mesh.rank)
            wanted += places
            apply.append(give)
        if scheduler is not None:
            where = self.path / LOOP_NAME
            state = scheduler_state.saved_for(scheduler, self.loop["scheduler"], where)
            apply.append(partial(scheduler.load_state_dict, state))
        if self.loop["random"]["mesh"] == rng.mesh_sizes(mesh):
            with self.manifest.open(self.path, RNG_NAME) as file:
                self.states = rng.read(file, mesh)
        apply.append(partial(self._restore_random_numbers, mesh))

        def apply_all() -> None:
            for function in apply:
                function()

        return wanted, apply_all

    def _restore_random_numbers(self, mesh: Mesh) -> None:
        """Restore the saved random numbers, or on another mesh seed this rank again."""
        if self.states is None:
            rng.reseed(self.loop["random"], self.manifest.step, mesh)
        else:
            rng.restore(self.states, mesh)
