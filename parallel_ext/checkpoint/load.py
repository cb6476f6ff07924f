"""Loading a training checkpoint into a model of any layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint import rng, scheduler_state
from parallel_ext.checkpoint.manifest import (
    LOOP_NAME,
    RNG_NAME,
    Manifest,
    bits_of,
    holds_tensors,
    is_beside_model,
    read_manifest,
)
from parallel_ext.checkpoint.optimizer_state import restore
from parallel_ext.checkpoint.scheduler_state import Scheduler
from parallel_ext.checkpoint.source import Contents, contents_of
from parallel_ext.checkpoint.steps import latest_save, manifest_of_step, name_of_step, step_of_name
from parallel_ext.checkpoint.verify import read_small_files
from parallel_ext.distributed.errors import CheckpointError, warn_user
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.io.reading import Wanted, read_shards
from parallel_ext.io.safe_open import one_error, shown
from parallel_ext.io.same_directory import check_all_see
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import state_of


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


def load_checkpoint(
    root: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    *,
    step: int | None = None,
    progress: bool | None = None,
) -> Resumed:
    """Put a training checkpoint into a model, its optimizer and its scheduler, in place.

    Every rank calls it. Mesh and ZeRO stage may be others than when it was saved: each rank reads
    its own slices, and every chunk that it reads is compared with the hash that was written. What
    is not passed is not loaded. On the mesh of the save, random numbers continue where they were;
    on another, every rank is seeded again from (saved seed, step, rank), with a warning. The masks
    of ``lora_dropout`` continue where they were on any mesh: they depend on a key, the number of
    the forward, and the place of an element in the whole batch, of which a dp rank holds its share
    in order; those of CogAgent, which sorts tokens, change with the number of dp ranks.

    Names, shapes, dtypes and groups are checked before anything changes. If a file is found damaged
    afterwards, model and optimizer hold a mixture: load another step before training continues.

    Args:
        root: as of ``save_checkpoint``.
        model: a parallel model of the same configuration, filled or not yet trained. Where an
            adapter was saved: PEFT's around the same base, with an adapter of the same
            configuration, which is filled; the base stays as it is.
        optimizer: of the class and the groups of parameters that were saved; built after
            ``px.data_parallel``.
        scheduler: of the class that was saved, to be given its ``state_dict()``.
        step: the one to load; when None the latest.
        progress: whether rank 0 shows a bar. When None it does on a terminal, where the load takes
            longer than a second.

    Returns:
        The step and the data state, among others.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or of another model or
            optimizer; on all ranks, with the rank that failed. For ranks that do not come or differ
            as ``save_checkpoint``.

    Example:
        >>> step = load_checkpoint("ckpts", model, optimizer).step  # doctest: +SKIP
    """
    arrive("load_checkpoint")
    state, where = state_of(model), f"load_checkpoint from {os.fspath(root)}"
    mesh, op_name = state.mesh, where if step is None else f"{where}, step {step}"
    with one_error(where), ExitStack() as cleanup:
        given = type(optimizer).__name__, type(scheduler).__name__
        mesh.control.barrier(f"{op_name}, into optimizer {given[0]}, scheduler {given[1]}")
        mesh.control.run_on_all(op_name, mesh.background.finish, patient=mesh.background.busy)
        chosen = mesh.control.run_on_all(op_name, lambda: _choose(Path(root), step, mesh))
        found, save_id = mesh.control.all_gather_object(chosen)[0]
        path = Path(found)
        check_all_see(path, path, mesh.control, op_name)  # a copy of it on each host will do
        contents = mesh.control.run_on_all(op_name, lambda: contents_of(model))
        opened = mesh.control.run_on_all(op_name, lambda: _Opened(path, save_id, contents, cleanup))
        wanted, apply = mesh.control.run_on_all(
            op_name, lambda: opened.match(optimizer, scheduler, mesh)
        )
        read_shards(wanted, opened.file_of, mesh, op_name, progress)
        mesh.control.run_on_all(op_name, apply)
        _warn_of_other_bits(opened.manifest, path, bits_of(state.invariant, mesh.device))
        same = opened.states is not None
        return Resumed(opened.manifest.step, opened.loop["data_state"], path, same)


def _warn_of_other_bits(manifest: Manifest, path: Path, own: str) -> None:
    saved = manifest.saved_by.get("bits")
    if saved and saved != own:
        warn_user(
            f"{path} was trained with {shown(saved)}, and resumes with {own or 'ordinary sums'}: "
            "to rounding the same training, not in bits"
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
            if is_beside_model(name) and holds_tensors(name):
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
        for what, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if given is not None and self.loop[what] is None:
                raise CheckpointError(f"{self.path} was saved without the {what}'s state")
        apply = [partial(self.contents.restore_dropout_masks, self.loop["dropout_masks"])]
        if optimizer is not None:
            saved = {
                name: spec
                for name, (file, spec) in self.manifest.tensors.items()
                if is_beside_model(file)
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
