"""Gradients that FSDP holds back under ``no_sync``: dropped and put aside like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parallel_ext.sharding._torch_private import (
    at_end_of_backward,
    fsdp_parameters,
    gathered_parameter,
    held_gradients,
    running_backward,
    set_held_gradients,
)


class FSDPGradients:
    """The gradients that FSDP holds back for one model that it has sharded.

    FSDP keeps them with the gathered parameters, where ``zero_grad`` does not reach them, so that
    the next backward would add what its caller believes gone.

    Args:
        model: after ``fully_shard``, whose root it is.
        collectives: how often FSDP has run each, by what it does.
    """

    def __init__(self, model: nn.Module, collectives: dict[str, int]) -> None:
        self._model, self.collectives = model, collectives
        self._parameters = list(fsdp_parameters(model))
        self._anchors: list[tuple[Any, torch.Tensor]] = []
        self._syncs, self._running = True, False

    def are_of_gathered(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether one of some parameters is what FSDP gathers, now or put aside."""
        gathered = {id(gathered_parameter(parameter)) for parameter in self._parameters}
        return any(id(parameter) in gathered for parameter in parameters)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside the context hold their gradients back; drop them if it raises."""
        before = self._syncs
        self._set_sync(False)
        try:
            yield
            self._anchor()
        except BaseException:
            self.drop()
            raise
        finally:
            self._set_sync(before)

    def _set_sync(self, syncs: bool) -> None:
        self._syncs = syncs
        type(self._model).set_requires_gradient_sync(self._model, syncs)  # its own is refused

    def _anchor(self) -> None:
        """Tie the held gradients to the ``.grad`` of their shards, made where there is none."""
        self._anchors = []
        for parameter in self._parameters:
            if any(gradient is not None for gradient in held_gradients(parameter)):
                shard = parameter.sharded_param
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                self._anchors.append((parameter, shard.grad))

    def begin_backward(self) -> None:
        """Drop the held gradients whose ``.grad`` was set to None since they were anchored.

        Called in a backward, after FSDP has queued its own end of it.
        """
        self._running = True
        at_end_of_backward(self._end_backward)
        for parameter, gradient in self._anchors:
            if parameter.sharded_param.grad is not gradient:
                set_held_gradients(parameter, (None, None))
        self._anchors = []

    def reset(self) -> None:
        """Let FSDP and this object forget a backward that has raised, and all held gradients."""
        self._running = False
        self._model.reset_iter_state()
        self.drop()

    def drop(self) -> None:
        """Drop all held gradients."""
        self._anchors = []
        for parameter in self._parameters:
            set_held_gradients(parameter, (None, None))

    def is_waiting(self) -> bool:
        """Return whether gradients of a backward under ``no_sync`` still wait for their sum."""
        if not self._syncs:
            return self._holds_any()
        return any(each.sharded_param.grad is gradient for each, gradient in self._anchors)

    def _holds_any(self) -> bool:
        return any(g is not None for p in self._parameters for g in held_gradients(p))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let backwards find no held gradients, and hold none back, inside the context."""
        kept, anchors = [held_gradients(parameter) for parameter in self._parameters], self._anchors
        syncs = self._syncs
        self.drop()
        self._set_sync(True)
        try:
            yield
        finally:
            for parameter, gradients in zip(self._parameters, kept, strict=True):
                set_held_gradients(parameter, gradients)
            self._set_sync(syncs)
            self._anchors = anchors

    def _end_backward(self) -> None:
        """Raise a RuntimeError if FSDP has left gradients of this backward unsummed.

        FSDP loses count of a module that reentrant checkpointing recomputes twice in one backward.
        """
        self._running = False
        if self._syncs and self._holds_any():
            self.drop()
            raise RuntimeError(
                "FSDP has left gradients of this backward unsummed, as it does when several "
                "forwards under reentrant checkpointing share one backward; call "
                'gradient_checkpointing_enable({"use_reentrant": False}), or one backward each'
            )

    def backward_broke_off(self) -> bool:
        """Return whether an earlier backward has raised, after which FSDP would finish no other."""
        return self._running and running_backward() == -1
