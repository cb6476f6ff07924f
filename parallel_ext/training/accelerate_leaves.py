"""A loop around accelerate under ``px.Invariant``: each batch of a dp rank is a leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import IterableDataset

from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.training.leaf_rounds import LeafRounds, check_batches_of_step


class LeafSteps:
    """The steps of a model that an ``Accelerator`` has prepared, leaf by leaf.

    A forward in training begins a leaf, before anything of it runs, and :func:`end_leaves` ends it.
    After the last leaf of a step every rank has the gradients of all of them. Evaluation between
    two leaves is none.

    Args:
        model: parallel, whose ``px.Invariant`` has leaves.
        accelerator: that calls backward, and knows how many batches a step has.

    Attributes:
        count: of the leaves of a step.
        leaf_runs: whether a leaf has begun, whose backward is to come.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._model, self._state = model_of(model), state_of(model)
        self._accelerator, self.count = ref(accelerator), self._state.invariant.leaves
        self._rows = 0  # of each batch
        self._loop: LeafRounds | None = None  # of the step that has begun
        self._slices: Iterator[slice] = iter(())
        self._context = ExitStack()
        self.leaf_runs = False
        self._hook = self._model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing  # of a copy of the model, which nobody has prepared

    def stop_for(self, model: nn.Module) -> None:
        """Leave a model to another ``Accelerator``, if it is this one."""
        if model_of(model) is self._model:
            self._hook.remove()

    def __call__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a leaf with a training forward, unless one runs already."""
        state = self._state
        if state.leaf_loop is not self._loop:  # of px.train_leaves
            return
        trains = model.training and torch.is_grad_enabled()
        if trains and self.leaf_runs and any(p.grad is not None for p in model.parameters()):
            raise RuntimeError(
                "Accelerator: under px.Invariant every batch has an accelerator.backward(loss), "
                "which ends its leaf; loss.backward() does not"
            )
        if trains and not self.leaf_runs:
            tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
            self._begin(next(len(tensor) for tensor in tensors if tensor.dim() > 0))
        state.in_leaf = state.leaf_is_batch = trains

    def _begin(self, rows: int) -> None:
        """Begin a leaf, with which a step may begin, if the batches of a step can be its leaves."""
        state, accelerator = self._state, self._accelerator()
        control, advice = state.mesh.control, "give every dp rank as many"
        require_equal(control, "Accelerator", {"rows": rows}, noun="the batch's ", advice=advice)
        check_batches_of_step("Accelerator", state, accelerator.gradient_accumulation_steps)
        begun = f"Accelerator: under px.Invariant(leaves={self.count})"
        loader = accelerator.gradient_state.active_dataloader
        if loader is not None and isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"{begun} an epoch must be a multiple of a step's rows, but an IterableDataset has "
                "no length; pass one that has"
            )
        filled = loader is not None and loader.end_of_dataloader and loader.remainder > 0
        if filled or self._loop is not None and rows != self._rows:
            raise ValueError(
                f"{begun} all batches of a step have as many rows, but the last one of this epoch "
                f"has not its {self._rows or rows} on each dp rank; pass drop_last=True to the "
                "DataLoader, or leave the rest out"
            )
        if self._loop is None:
            self._rows, loop = rows, LeafRounds(self._model, state, rows * self.count)
            self._context.enter_context(loop.running())
            self._loop, self._slices = loop, iter(loop)
            next(self._slices)
        self.leaf_runs = True

    def end_leaf(self, loss: torch.Tensor) -> None:
        """End a leaf whose backward has run, and with the last one the step, as accelerate's."""
        accelerator = self._accelerator()
        self._loop.ran_backward(loss)
        self.leaf_runs = self._state.in_leaf = self._state.leaf_is_batch = False
        if next(self._slices, None) is not None:
            if accelerator.sync_gradients and accelerator.gradient_state.end_of_dataloader:
                raise ValueError(
                    f"Accelerator: under px.Invariant(leaves={self.count}) a step is that many "
                    "batches of dp ranks, but this epoch ends within one; leave the rest out"
                )
            return
        self._context.close()
        self._loop = None
        if not accelerator.sync_gradients:
            raise RuntimeError(
                f"Accelerator.backward: all leaves of px.Invariant(leaves={self.count}) have run, "
                "but accelerate waits for more batches; begin an epoch with a step"
            )


def end_leaves(
    running: Sequence[LeafSteps], accelerator: Accelerator, loss: torch.Tensor, **options: Any
) -> None:
    """Run the backward of a loss of leaves, divided by the number of leaves of a step.

    The mean over them is the loss of a step, as in accelerate with as many batches of one process.
    """
    if accelerator.scaler is not None:
        raise NotImplementedError(
            'Accelerator.backward: mixed_precision="fp16" is not served under px.Invariant; '
            'use "bf16"'
        )
    # Divided once: a number over 3 and over 3 again may have other bits than over 9.
    loss = loss / running[0].count
    loss.backward(**options)
    for steps in running:
        steps.end_leaf(loss)


def _nothing(*_: Any) -> None:
    """Stand for :class:`LeafSteps` in a copy of its model."""
