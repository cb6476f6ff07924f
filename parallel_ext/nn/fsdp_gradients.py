"""Gradients that FSDP holds back under ``no_sync``: dropped and put aside like any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class HeldGradients:
    """The gradients that FSDP holds back for one model that it has sharded.

    FSDP keeps them with the gathered parameters, where ``zero_grad`` does not reach them, so that
    the next backward would add what its caller believes gone.

    Args:
        model: after ``fully_shard``, whose root it is.
    """

    def __init__(self, model: nn.Module) -> None:
        # torch has no public way to what a parameter has accumulated.
        self._groups: list[Any] = [
            group
            for module in model.modules()
            if hasattr(module, "reset_iter_state")
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]
        self._parameters = [p for group in self._groups for p in group.fsdp_params]
        self._root = model._get_fsdp_state()
        self._anchors: list[tuple[Any, torch.Tensor]] = []

    def anchor(self) -> None:
        """Tie the held gradients to the ``.grad`` of their shards, made where there is none."""
        self._anchors = []
        for parameter in self._parameters:
            if any(gradient is not None for gradient in _take(parameter)):
                shard = parameter.sharded_param
                if shard.grad is None:
                    shard.grad = torch.zeros_like(shard)
                self._anchors.append((parameter, shard.grad))

    def drop_if_forgotten(self) -> None:
        """Drop the held gradients whose ``.grad`` was set to None since they were anchored."""
        for parameter, gradient in self._anchors:
            if parameter.sharded_param.grad is not gradient:
                _put(parameter, (None, None))
        self._anchors = []

    def drop(self) -> None:
        """Drop all held gradients."""
        self._anchors = []
        for parameter in self._parameters:
            _put(parameter, (None, None))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let backwards find no held gradients, and hold none back, inside the context."""
        kept, anchors = [_take(parameter) for parameter in self._parameters], self._anchors
        reduces = [(group.reduce_grads, group.all_reduce_grads) for group in self._groups]
        self.drop()
        for group in self._groups:
            group.reduce_grads = group.all_reduce_grads = True
        try:
            yield
        finally:
            for parameter, gradients in zip(self._parameters, kept, strict=True):
                _put(parameter, gradients)
            for group, (one, other) in zip(self._groups, reduces, strict=True):
                group.reduce_grads, group.all_reduce_grads = one, other
            self._anchors = anchors

    def check_end_of_backward(self) -> None:
        """Raise if FSDP has left gradients of this backward unsummed.

        FSDP loses count of a module that reentrant checkpointing recomputes twice in one backward.

        Raises:
            RuntimeError: gradients were left, which the optimizer would miss.
        """
        summing = all(group.reduce_grads for group in self._groups)
        if summing and any(g is not None for p in self._parameters for g in _take(p)):
            self.drop()
            raise RuntimeError(
                "FSDP has left gradients of this backward unsummed, as it does when several "
                "forwards under reentrant checkpointing share one backward; call "
                'gradient_checkpointing_enable({"use_reentrant": False}), or one backward each'
            )

    def backward_broke_off(self) -> bool:
        """Return whether an earlier backward has raised, after which FSDP would finish no other."""
        queued = self._root._state_ctx.post_backward_final_callback_queued
        return queued and torch._C._current_graph_task_id() == -1


def _take(parameter: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    gathered = getattr(parameter, "_unsharded_param", None)  # made by the first forward
    return None if gathered is None else gathered.grad, parameter.unsharded_accumulated_grad


def _put(parameter: Any, gradients: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
    if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
        gathered.grad = gradients[0]
    parameter.unsharded_accumulated_grad = gradients[1]
