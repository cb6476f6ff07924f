"""Show where the time and the memory of a training step go."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding.slices import local_part
from parallel_ext.training.left_as_found import left_as_found
from parallel_ext.training.profile_report import (
    RankProfile,
    StepMemory,
    StepProfile,
    draw_profile,
    print_profile,
)
from parallel_ext.training.step_events import FIXED_PARTS, Exchanges, sort_events

_STEP, _FORWARD = "parallel_ext profile_step", "parallel_ext profile_step: forward"


def profile_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    warmup: int = 2,
    path: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> StepProfile:
    """Run a training step, and show where its time and its memory go.

    Every rank calls it. The step is a forward with the loss, a backward, and with an optimizer its
    ``step`` and ``zero_grad``; clipping is not in it. It leaves no trace, bit for bit: gradients
    are put aside as they are, and parameters, buffers, states of the optimizer, its groups, random
    numbers, the masks of ``lora_dropout`` and the counts of ``px.RoutingMetrics`` are what they
    were, also after an error. Without an optimizer no parameter changes; with one this needs a copy
    of the parameters and states on the CPU, which does not count as the step's memory. Hooks of
    modules, parameters and the optimizer run as in any step.

    Rank 0 prints a table, of its own step, and of all ranks the least and the most:

    - matrix products: linear layers, experts, adapters, the output head. An attention that is not
      a single op, as transformers' ``eager``, is part of these;
    - attention, of which torch has an op;
    - exchanges over each group of ranks, the wait for other ranks included, and how many bytes this
      rank gives;
    - optimizer;
    - other: norms, activations, the loss, copies, and what Python does meanwhile.

    On a GPU a moment at which kernels run at once counts for one that computes, so that exchanges
    are what nothing hides, and ``other`` has the moments in which the GPU waits.

    Args:
        model: a parallel model in training, perhaps inside PEFT's.
        batch: ``input_ids``, ``labels`` and what else forward takes, of this dp rank.
        optimizer: of the model; None to leave its step out.
        warmup: steps before the one that is profiled, at least 1. The time of the last of them is
            shown too, since a profiler slows a step down.
        path: rank 0 writes a picture of the table there, as PNG; needs matplotlib.
        show: print the table.

    Returns:
        The numbers of all ranks, on every rank.

    Raises:
        TypeError: the model was not parallelized.
        ValueError: it does not train, the batch has no labels, or ``warmup`` is less than 1.
        ImportError: ``path`` is given, and matplotlib is not installed.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> profile_step(model, batch, optimizer).ranks[0].seconds  # doctest: +SKIP
        0.41
    """
    mesh = state_of(model).mesh
    mesh.control.barrier("profile_step")

    def check() -> None:
        if not model.training:
            raise ValueError("profile_step: the model is in evaluation; call model.train() first")
        if batch.get("labels") is None:
            raise ValueError("profile_step: the batch has no labels, so that there is no loss")
        if warmup < 1:
            raise ValueError(f"profile_step: warmup must be at least 1, got {warmup}")
        if path is not None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError(
                "profile_step: the picture needs matplotlib, which is not installed; run "
                "pip install 'parallel_ext[plot]', or leave out path"
            )

    mesh.control.run_on_all("profile_step", check)
    with left_as_found(model, optimizer):
        for _ in range(warmup):
            began = time.perf_counter()
            _run(model, batch, optimizer, mesh)
            alone = time.perf_counter() - began
        own = _profiled(model, batch, optimizer, mesh, alone)
        records = (RankProfile, StepMemory, Exchanges)
        found = StepProfile(tuple(mesh.control.all_gather_object(own, *records)))

        def report() -> None:
            if mesh.rank == 0 and show:
                print_profile(found)
            if mesh.rank == 0 and path is not None:
                draw_profile(found, path)

        mesh.control.run_on_all("profile_step", report, patient=True)
    return found


def _run(
    model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, mesh: Mesh
) -> int:
    """Run a training step; return the bytes of the gradients."""
    with record_function(_FORWARD):
        loss = model(**batch).loss
    loss.backward()
    gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        for parameter in model.parameters():
            parameter.grad = None
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return gradients


def _profiled(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    alone: float,
) -> RankProfile:
    on = mesh.device.type
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on == "cuda" else [])]
    mesh.control.barrier("profile_step")
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        mesh.control.barrier("profile_step")  # the ranks need unequal times to start a profiler
        with record_function(_STEP):
            gradients = _run(model, batch, optimizer, mesh)
    events = profiler.profiler.kineto_results.events()
    seen = sort_events(events, _STEP, [_FORWARD], on)
    parts = {**dict.fromkeys(FIXED_PARTS, 0.0), **seen.seconds}
    held = _bytes([*model.parameters(), *model.buffers()])
    states = [] if optimizer is None else optimizer.state.values()
    values = (value for state in states for value in state.values())
    kept = _bytes(value for value in values if isinstance(value, torch.Tensor))
    memory = StepMemory(held, kept, gradients, seen.after[_FORWARD], held + kept + seen.peak)
    return RankProfile(seen.total, alone, parts, seen.exchanges, memory)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)
