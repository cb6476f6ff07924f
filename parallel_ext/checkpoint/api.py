"""Training checkpoints of parallel models: saved, and resumed on any layout."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint.load import Resumed, load_step
from parallel_ext.checkpoint.save import save_step
from parallel_ext.checkpoint.scheduler_state import Scheduler
from parallel_ext.checkpoint.source import contents_of
from parallel_ext.io.safe_open import one_error
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import state_of


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Scheduler | None = None,
    data_state: Any = None,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    asynchronous: bool = False,
    progress: bool | None = None,
) -> Path:
    """Write all that training needs to resume, on any number of ranks, as ``root/step-<step>``.

    Every rank calls it. The directory is one that plain ``from_pretrained`` reads, with a folder
    ``parallel_state`` beside the model's files; of a model with an adapter, one that plain
    ``PeftModel.from_pretrained`` reads: the adapter and its ``modules_to_save``, and of the base
    only what PEFT saves too (embeddings that have an adapter). Each tensor is written once,
    unpadded and under its HuggingFace name, by one of all ranks, and hashed on the way; rows stream
    to the rank that writes them. The directory appears under its name when it is complete, and
    ``root/LATEST`` names it then. A save that is killed, or loses its power, leaves the last
    checkpoint as it is, and what it left behind is removed by the next. One job at a time saves
    into a root: the file ``.lock`` is there meanwhile, and stops nobody once its holder is dead.
    Gradients are not saved: call it between ``optimizer.step()`` and the next backward.

    When ``asynchronous``, each rank copies what it will send or write to its host's memory, at most
    once its shard, and a thread writes it while training continues. One save is in flight at a
    time: the next save, load or :func:`wait_for_checkpoint` waits for it, and raises the error with
    which it failed instead of doing its own work. End a job with :func:`wait_for_checkpoint`,
    before the process group is destroyed.

    Args:
        root: directory of all checkpoints of a job, the same place for all ranks.
        step: number of the training step. It must not be that of the last checkpoint there; an
            older save of the same step, of a run that was given up, is replaced.
        model: a parallel model, or PEFT's around one, with one adapter; or a module of the user's
            own that holds one, whose names are then those of its ``state_dict()``. What is trained
            beside an adapter is refused, since it would be lost.
        optimizer: built from the model's parameters. What it keeps of one are plain tensors of its
            shape, and numbers in tensors; or it is :class:`parallel_ext.Adafactor`, or torch's own
            where no parameter is sharded.
        scheduler: of the learning rate: any of torch's, or one whose ``state_dict()`` consists of
            plain values, such as numbers, text, lists, dicts and small tensors.
        data_state: where the data is, as JSON, for example the number of samples that all ranks
            together have taken; equal on all ranks.
        keep_last: how many checkpoints stay, with this one, in the order in which they were saved;
            all when None. Others are removed once this one is durable; what cannot be removed is a
            warning.
        keep_every: those whose step is a multiple of it stay too.
        asynchronous: return when the values are copied, not when they are on the disk; on a GPU
            when its stream is to copy them before it does anything else.
        progress: whether rank 0 shows a bar. When None it does on a terminal, where the save takes
            longer than a second and is not asynchronous.

    Returns:
        The directory, on every rank; of an asynchronous save the one that will be there.

    Raises:
        CheckpointError: it cannot be saved, for example since the disk is full, or another job
            saves there; on all ranks, with the rank that failed. Checkpoints that were there stay
            whole. It is a :class:`CollectiveTimeout` too where not all ranks called it, or one was
            killed or stopped meanwhile; a :class:`DisagreementError` where they were given
            different things.

    Example:
        >>> save_checkpoint("ckpts", 1200, model, optimizer, keep_last=2)  # doctest: +SKIP
    """
    arrive("save_checkpoint")
    state = state_of(model)
    with one_error(f"save_checkpoint of step {step} to {os.fspath(root)}"):
        return save_step(
            root,
            step,
            partial(contents_of, model),
            optimizer,
            scheduler,
            data_state,
            state.mesh,
            state.invariant,
            keep_last,
            keep_every,
            asynchronous,
            progress,
        )


def wait_for_checkpoint(model: nn.Module) -> None:
    """Wait until no asynchronous save is in flight; every rank calls it.

    Args:
        model: the parallel model that was saved.

    Raises:
        CheckpointError: the save failed, as ``save_checkpoint`` would have; raised once, by the
            first call after it. Or not all ranks called it.

    Example:
        >>> wait_for_checkpoint(model)  # doctest: +SKIP
    """
    mesh, op_name = state_of(model).mesh, "wait_for_checkpoint"
    with one_error(op_name):
        mesh.control.barrier(op_name)
        mesh.control.run_on_all(op_name, mesh.background.finish, patient=mesh.background.busy)


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
    state = state_of(model)
    contents = partial(contents_of, model)
    with one_error(f"load_checkpoint from {os.fspath(root)}"):
        return load_step(
            root, contents, optimizer, scheduler, step, state.mesh, state.invariant, progress
        )
