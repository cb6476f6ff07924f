"""Let a model, its optimizer and the random numbers be afterwards what they were before."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from parallel_ext.nn.forward_counter import forward_counters
from parallel_ext.parallel.state import ParallelState, model_of, state_of
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.slices import local_part

Restore = Callable[[], Any]
"""Puts what was kept of a value back, and returns the value."""


@contextmanager
def left_as_found(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Leave no trace of the training steps in the block, bit for bit, also after an error.

    Kept aside are gradients, as they are. Copied, on the CPU, are buffers and, with an optimizer,
    the parameters and states that its steps change. Random numbers of torch, Python and NumPy, the
    masks of ``lora_dropout`` and the counts of ``px.RoutingMetrics`` continue where they were.

    Args:
        optimizer: that steps in the block; None where none does.
    """
    own, state = model_of(model), state_of(model)
    to_shards(own)
    kept: list[Restore] = [_random_numbers(state.mesh.device)]
    kept += [_kept(buffer) for buffer in model.buffers()]
    counters = [(counter, counter.count) for counter in forward_counters(model)]
    if optimizer is not None:
        kept.append(_kept_optimizer(optimizer))
    try:
        with gradients_aside(model, state):
            yield
    finally:
        to_shards(own)
        for restore in kept:
            restore()
        for counter, count in counters:
            counter.count = count


@contextmanager
def gradients_aside(model: nn.Module, state: ParallelState) -> Iterator[None]:
    """Let the block find no gradients, also none that wait for a sum; they are back behind it."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        with ExitStack() as stack:
            for waiting in (state.partials, state.fsdp_gradients, state.routing_counter):
                if waiting is not None:
                    stack.enter_context(waiting.aside())
            yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _kept(value: Any) -> Restore:
    """Keep a copy of a value; what is put back is the same object where it is a tensor."""
    if isinstance(value, torch.Tensor):
        held = local_part(value.detach())
        saved = held.to("cpu", copy=True)

        def put_back() -> torch.Tensor:
            held.copy_(saved)
            return value

        return put_back
    if isinstance(value, dict):
        of_keys = {key: _kept(inner) for key, inner in value.items()}
        return lambda: {key: restore() for key, restore in of_keys.items()}
    saved_value = copy.deepcopy(value)
    return lambda: saved_value


def _kept_optimizer(optimizer: torch.optim.Optimizer) -> Restore:
    groups = optimizer.param_groups
    parameters = [_kept(parameter) for group in groups for parameter in group["params"]]
    options = [_kept({k: v for k, v in group.items() if k != "params"}) for group in groups]
    states = {parameter: _kept(state) for parameter, state in optimizer.state.items()}
    attributes = dict(vars(optimizer))

    def restore() -> None:
        for put_back in parameters:
            put_back()
        for group, put_back in zip(groups, options, strict=True):
            trained = group["params"]
            group.clear()
            group.update({"params": trained, **put_back()})
        optimizer.state.clear()
        for parameter, put_back in states.items():
            optimizer.state[parameter] = put_back()
        vars(optimizer).clear()  # where a scheduler, for example, notes that there was a step
        vars(optimizer).update(attributes)

    return restore


def _random_numbers(device: torch.device) -> Restore:
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy = numpy.random.get_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)

    return restore
