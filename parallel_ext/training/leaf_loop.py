"""The loop over the leaves of a batch: which of them a dp rank runs, and what they sum to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.nn.blocks import BlockExperts, UsedApart
from parallel_ext.nn.forward_counter import forward_counters
from parallel_ext.parallel.state import ParallelState
from parallel_ext.sharding.blocks import split_in_blocks
from parallel_ext.sharding.tree import Node, push


class LeafLoop(ABC):
    """The leaves of one global batch; what :func:`leaves` returns to its context.

    Iterating gives the rows of each leaf of this rank, as a slice of the batch. A rank may be given
    a leaf of which nothing counts, so that it takes part in what the others exchange.

    Attributes:
        loss: after the context the sum of the losses of all leaves, a scalar, the same on every
            rank.
    """

    loss: torch.Tensor | None = None

    def __init__(self, model: nn.Module, state: ParallelState, rows: int) -> None:
        self._model, self._state = model, state
        self._ranges = split_in_blocks(rows, state.invariant.leaves)
        self._left: int | None = None  # rounds, when they have begun
        modules = [*model.modules()]
        self._counters = list(forward_counters(model))
        self._all_experts = [module for module in modules if isinstance(module, BlockExperts)]
        self._experts = [module for module in self._all_experts if module.dp_ranks > 1]
        self._name_of = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._trained = [*self._name_of]
        self._shared = [  # by the leaves of several dp ranks, and whole here
            (module, name, parameter)
            for module in modules
            if isinstance(module, UsedApart) and module.dp_ranks > 1
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and not hasattr(parameter, "to_local")
        ]
        self._whole_shared = [parameter for _, _, parameter in self._shared]
        self._sharded = [p for p in self._trained if hasattr(p, "to_local")]
        apart = {*self._sharded, *self._whole_shared}
        self._others = [p for p in self._trained if p not in apart]
        self._nodes: list[Node] = []  # of the losses, and of the gradients of others
        self._apart: dict[nn.Parameter, list[torch.Tensor]] = {}  # of shared ones, in this round
        self._losses: list[torch.Tensor] = []  # of the leaf that is running

    @abstractmethod
    def _leaves_of_rounds(self) -> Sequence[tuple[int, bool]]:
        """Return the leaf that this rank runs in each round, and whether it counts."""

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Set aside, inside the context, earlier gradients that are not in ``.grad``.

        What the leaves of several dp ranks share has its gradients taken apart.
        """
        for module, name, parameter in self._shared:
            module.take_gradients[name] = partial(self._take, parameter)
        try:
            yield
        finally:
            for module, _, _ in self._shared:
                module.take_gradients = {}

    @contextmanager
    def _nothing_skipped(self) -> Iterator[None]:
        """Let every leaf inside the context run what a model may skip, so that all have gradients.

        Which leaves have an image, and which of them a rank has, then changes no parameter's sum.
        """
        if self._state.spec.skips is None:
            yield
            return
        path, _, method = self._state.spec.skips.rpartition(".")
        owner = vars(self._model.get_submodule(path))
        before = owner.get(method)
        owner[method] = lambda *needed: (True,) * len(needed)
        try:
            yield
        finally:
            del owner[method]
            if before is not None:
                owner[method] = before

    def _take(self, parameter: nn.Parameter, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Take the gradients of a parameter for the leaf of each dp rank that meets here."""
        taken = [*gradients]
        if parameter in self._apart:
            taken = [a + b for a, b in zip(self._apart[parameter], taken, strict=True)]
        self._apart[parameter] = taken
        return gradients[0]

    def _take_gradients(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Return the gradients of trained parameters, which lose them; each must have one."""
        gradients = []
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                raise ValueError(
                    f"leaves: {self._name_of[parameter]} is trained, but the batch gave it no "
                    "gradient; set requires_grad of what the batch does not use to False"
                )
            gradients.append(gradient)
        return gradients

    def _take_apart(self) -> list[list[torch.Tensor]]:
        """Return what :meth:`_take` has taken of each parameter; they have no gradients more."""
        self._take_gradients(self._whole_shared)
        apart, self._apart = self._apart, {}
        return [apart[parameter] for parameter in self._whole_shared]

    @abstractmethod
    def _end_round(self, number: int, loss: torch.Tensor) -> None:
        """Take the gradients of a round, which the parameters have no more."""

    @abstractmethod
    def _sums(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Return each trained parameter and its gradient of the batch; set :attr:`loss`."""

    def __iter__(self) -> Iterator[slice]:
        if self._left is not None:
            raise RuntimeError(
                "leaves: this loop has run already; call px.leaves again for the next batch"
            )
        self._left = len(self._leaves_of_rounds())
        for number, (leaf, _) in enumerate(self.rounds()):
            yield leaf
            if not self._losses:
                raise ValueError("leaves: a leaf ran without a backward(loss) of its leaves")
            loss, self._losses = sum(self._losses), []
            self._end_round(number, loss)
            self._left -= 1

    def rounds(self) -> Iterator[tuple[slice, bool]]:
        """Yield the rows of each leaf that this rank runs, and whether it counts."""
        for number, (leaf, counts) in enumerate(self._leaves_of_rounds()):
            start, stop = self._ranges[leaf]
            self._tell_layers(start, stop - start, counts, leaf)
            self._begin_round(number)
            yield slice(start, stop), counts

    def _tell_layers(
        self, first_row: int | None, rows: int, counts: bool, leaf: int | None
    ) -> None:
        """Say which leaf runs, which rows of the batch it has, and whether it counts."""
        others = self._state.spec.regions  # read images, or the tokens of one expert
        for counter in self._counters:
            counter.first_row, counter.rows = first_row, None if others else rows
        for module in self._experts:
            module.has_leaf = counts
        for routing in self._state.routings:
            routing.leaf = leaf

    def _begin_round(self, number: int) -> None:  # noqa: B027, nothing where a rank runs alone
        pass

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of a loss of the leaf that is running, and add it to :attr:`loss`.

        Args:
            loss: a scalar, divided by a number of the whole batch and not of the leaf.

        Raises:
            RuntimeError: no leaf is running, so that the gradients would be lost.
        """
        if not self._left:
            raise RuntimeError("leaves: backward outside of the loop over the leaves")
        loss.backward()
        self.ran_backward(loss)

    def ran_backward(self, loss: torch.Tensor) -> None:
        """Take a loss of the leaf that is running, whose backward has run."""
        self._losses.append(loss.detach())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run leaves inside the context, each of which finds no gradients.

        At its end the gradients of all leaves are added to those that the parameters had before.
        """
        kept = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        for counter in self._counters:
            counter.count += 1  # the leaves of a batch are one forward
        self._state.in_leaf, self._state.leaf_loop = True, self
        try:
            with self._aside(), self._nothing_skipped():
                yield
        finally:
            self._state.in_leaf, self._state.leaf_loop = False, None
            self._tell_layers(None, 0, True, None)
            for parameter, gradient in zip(self._trained, kept, strict=True):
                parameter.grad = gradient
        if self._left != 0:
            raise RuntimeError(
                "leaves: the context ended before the last leaf of this rank had run"
            )
        for parameter, gradient in self._sums():
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def push_sums(nodes: list[Node], node: Node, count: int) -> None:
    """Append sums of the next leaves, and merge neighbours that are both halves of a larger one.

    Values of single leaves stay as they are, sums are in fp32 (fp64 for fp64), those of all leaves
    in the dtype of the last node's.
    """
    start, width, values = node
    before = [*nodes, node]
    push(nodes, (start, width, None), count, lambda left, right: None)
    merged = before[len(nodes) - 1 :]
    if len(merged) > 1:
        covered = [(first, covers) for first, covers, _ in merged]
        is_whole = nodes[0][1] >= count
        of_values = zip(*(each for _, _, each in merged), strict=True)
        values = [
            _sum(each, covered, each[-1].dtype if is_whole else wide(each[-1].dtype))
            for each in of_values
        ]
    nodes[-1] = (*nodes[-1][:2], values)


def _sum(
    values: Sequence[torch.Tensor], nodes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> torch.Tensor:
    """Sum values of nodes that follow each other, which are not used any more."""
    if {dtype, *(value.dtype for value in values)} != {wide(dtype)}:
        return ops.sum_leaves(values, nodes, dtype)
    total = values[-1]
    for left in values[-2::-1]:  # in its memory
        total = left.add_(total)
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which leaves are summed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
