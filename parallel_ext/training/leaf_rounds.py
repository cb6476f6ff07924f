"""Leaves in rounds: in each every dp rank runs one leaf, so that FSDP's collectives meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.forward_counter import ForwardCounter
from parallel_ext.nn.sharded_module import to_shards
from parallel_ext.ops.group import Range
from parallel_ext.parallel.state import ParallelState
from parallel_ext.sharding.tree import Node, push


class LeafRounds:
    """The leaves of one global batch, of which neighbours run at the same time.

    Iterating gives the rows of each leaf of this rank, as a slice of the batch. All dp ranks run
    equally many: one that has none in the last round is given the last leaf as well, of which
    nothing counts. What FSDP shards is summed by :class:`parallel_ext.nn.leaf_sums.LeafSums`; loss
    and other gradients are exchanged after each round.

    Args:
        model: that was parallelized.
        state: of the model.
        ranges: rows of each leaf.

    Attributes:
        loss: after :meth:`finish` the sum of the losses of all leaves, a scalar, the same on every
            rank.
    """

    loss: torch.Tensor | None = None

    def __init__(self, model: nn.Module, state: ParallelState, ranges: Sequence[Range]) -> None:
        to_shards(model)
        self._state, self._ranges = state, ranges
        self._left: int | None = None  # rounds, when they have begun
        trained = [p for p in model.parameters() if p.requires_grad]
        self._sharded = [p for p in trained if hasattr(p, "to_local")]
        self._others = [p for p in trained if not hasattr(p, "to_local")]
        self._counters = [
            each
            for module in model.modules()
            for each in vars(module).values()
            if isinstance(each, ForwardCounter)
        ]
        self._loss: torch.Tensor | None = None  # of the leaf that is running
        self._totals: list[torch.Tensor] = []  # of what is sharded, after the last round
        self._nodes: list[Node] = []  # of the loss and other gradients

    def __iter__(self) -> Iterator[slice]:
        if self._left is not None:
            raise RuntimeError("leaves: they can be run once")
        mesh, count = self._state.mesh, len(self._ranges)
        firsts = range(0, count, mesh.dp_size)
        self._left = len(firsts)
        for first in firsts:
            # FSDP would miss gradients that come through casts which an earlier leaf has made.
            torch.clear_autocast_cache()
            start, stop = self._ranges[min(first + mesh.dp_rank, count - 1)]
            for counter in self._counters:
                counter.first_row = start
            if self._state.leaf_sums is not None:
                self._state.leaf_sums.begin_round(first, count)
            yield slice(start, stop)
            self._end_round(first)
            self._left -= 1

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the loss of the leaf that is running, and add it to :attr:`loss`.

        Args:
            loss: a scalar, divided by a number of the whole batch and not of the leaf.

        Raises:
            RuntimeError: no leaf is running, or this one had its backward.
        """
        if not self._left:
            raise RuntimeError("leaves: backward outside of the loop over the leaves")
        if self._loss is not None:
            raise RuntimeError(
                "leaves: under px.data_parallel a leaf has one backward; add its losses before"
            )
        loss.backward()
        self.ran_backward(loss)

    def ran_backward(self, loss: torch.Tensor) -> None:
        """Take the loss of the leaf that is running, whose backward has run."""
        self._loss = loss.detach()

    def _end_round(self, first: int) -> None:
        """Take loss and gradients of a round, which the parameters have no more."""
        if self._loss is None:
            raise ValueError("leaves: a leaf ran without a backward(loss) of its leaves")
        if any(parameter.grad is None for parameter in (*self._sharded, *self._others)):
            raise ValueError(
                "leaves: a trained parameter got no gradient; set requires_grad of those that "
                "the batch does not use to False"
            )
        own = [self._loss, *(parameter.grad for parameter in self._others)]
        mesh, count, self._loss = self._state.mesh, len(self._ranges), None
        of_ranks: list[list[torch.Tensor]] = [[] for _ in range(mesh.dp_size)]
        for value in own:
            wide = value.to(torch.promote_types(value.dtype, torch.float32)).reshape(-1)
            sizes = [wide.numel()] * mesh.dp_size
            gathered = ops.gather_from_region(wide, sizes, mesh.dp).view(mesh.dp_size, -1)
            for of_rank, each in zip(of_ranks, gathered, strict=True):
                of_rank.append(each.clone().view(value.shape))
        for leaf, values in enumerate(of_ranks, first):
            if leaf < count:
                push(self._nodes, (leaf, 1, values), count, _add)
        self._totals = [parameter.grad for parameter in self._sharded]
        for parameter in (*self._sharded, *self._others):
            parameter.grad = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run leaves inside the context, each of which finds no gradients."""
        trained = [*self._sharded, *self._others]
        kept = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        for counter in self._counters:
            counter.count += 1  # the leaves of a batch are one forward
        self._state.in_leaf = True
        held = self._state.held
        try:
            with nullcontext() if held is None else held.aside():  # also under px.no_sync
                yield
        finally:
            self._state.in_leaf = False
            if self._state.leaf_sums is not None:
                self._state.leaf_sums.reset()
            for counter in self._counters:
                counter.first_row = None
            for parameter, gradient in zip(trained, kept, strict=True):
                parameter.grad = gradient

    def finish(self) -> None:
        """Add the gradients of all leaves to those that the parameters have."""
        if self._left != 0:
            raise RuntimeError(
                "leaves: the context ended before the last leaf of this rank had run"
            )
        ((_, _, (self.loss, *others)),) = self._nodes
        sums = zip((*self._sharded, *self._others), (*self._totals, *others), strict=True)
        for parameter, gradient in sums:
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a.add_(b) for a, b in zip(left, right, strict=True)]
