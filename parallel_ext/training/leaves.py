"""Training steps whose bits do not depend on how many dp ranks share a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.control import require_equal
from parallel_ext.nn.blocks import BlockExperts
from parallel_ext.nn.forward_counter import ForwardCounter
from parallel_ext.nn.loss import BalanceOfLeaves
from parallel_ext.ops import Group
from parallel_ext.parallel.forward import wants_balance
from parallel_ext.parallel.state import ParallelState, model_of, state_of
from parallel_ext.sharding.blocks import split_in_blocks
from parallel_ext.sharding.layout import split
from parallel_ext.sharding.tree import Node
from parallel_ext.sharding.tree import push as _push
from parallel_ext.training.leaf_rounds import LeafRounds

_CHUNK = 1 << 22  # numbers of a gradient that the dp ranks exchange at a time


def train_leaves(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Run forward and backward of a global batch, with the same bits on any number of ranks.

    Every rank calls it with the same batch, whose rows ``px.Invariant(leaves=)`` divides in order.
    Each dp rank runs its leaves one by one. Their gradients are added over a tree that depends on
    the number of leaves alone, and left in ``.grad`` on every dp rank (after ``px.data_parallel``
    its rows of them); those of calls before are added to. :func:`leaves` does the same for a loop
    of your own. For the load balancing loss of a mixture (``output_router_logits``) all leaves
    first run forward once more, since it depends on how often the whole batch chose each expert.

    Args:
        model: parallel, with ``px.Invariant``, in training mode.
        batch: what the model's forward takes by name, with ``labels``; every tensor has B rows,
            as int64 ids [B, S]. ``num_items_in_batch`` is the number of labels that count in all
            batches of this optimizer step; of this batch when left out.

    Returns:
        The loss of the batch, a scalar, the same on every rank: the mean over its labels, or the
        sum divided by ``num_items_in_batch``.

    Raises:
        ValueError: the model is not such a model, or the batch has no labels or tensors of
            different rows.
        DisagreementError: the ranks have different batches.
        CollectiveTimeout: not all ranks called it.

    Example:
        >>> loss = train_leaves(model, {"input_ids": ids, "labels": ids})  # doctest: +SKIP
    """
    rows, control = _rows_of(batch), state_of(model).mesh.control
    control.barrier("train_leaves")
    require_equal(
        *(control, "train_leaves", {n: _digest(value) for n, value in batch.items()}),
        noun="the batch's",
        advice="every rank passes the whole batch",
    )
    items = {"num_items_in_batch": _count_of_labels(batch), **batch}

    def run(leaf: slice) -> Any:
        return model(**{n: v[leaf] if _has_rows(v) else v for n, v in items.items()})

    with leaves(model, rows) as own, _balanced(model, own, batch, run):
        for leaf in own:
            own.backward(run(leaf).loss)
    return own.loss


@contextmanager
def _balanced(
    model: nn.Module,
    own: Leaves | LeafRounds,
    batch: Mapping[str, Any],
    run: Callable[[slice], Any],
) -> Iterator[None]:
    """Give the leaves inside the context their shares of the load balancing loss, if it is asked.

    Before, all leaves run forward once, to count the choices of the whole batch.
    """
    module, state = model_of(model), state_of(model)
    if not wants_balance(module, state, batch):
        yield
        return
    state.balance = BalanceOfLeaves(module.num_experts, module.num_experts_per_tok, state.mesh)
    try:
        with torch.no_grad():
            for leaf, is_own in own.rounds():
                logits = run(leaf).router_logits
                mask = batch.get("attention_mask")
                if is_own:
                    state.balance.count(logits, None if mask is None else mask[leaf])
        state.balance.sum_over_dp()
        yield
    finally:
        state.balance = None


@contextmanager
def leaves(model: nn.Module, rows: int) -> Iterator[Leaves | LeafRounds]:
    """Run the leaves of a global batch in a loop of your own, with the same bits on any layout.

    Every rank enters the context with the same batch, runs its leaves, and leaves with the
    gradients of the whole batch in ``.grad``, added to those that were there before. A forward with
    labels needs ``num_items_in_batch=`` inside.

    Args:
        model: parallel, with ``px.Invariant``, in training mode.
        rows: of the global batch, which ``px.Invariant(leaves=)`` divides in order.

    Raises:
        ValueError: the model is not such a model; or a leaf left a trained parameter without a
            gradient.
        RuntimeError: the leaves of another batch are running, or not all of these ran.
        DisagreementError: the ranks have different ``rows``.
        CollectiveTimeout: not all ranks entered it.

    Example:
        >>> with leaves(model, rows=len(ids)) as own:  # doctest: +SKIP
        ...     for leaf in own:
        ...         part = {"input_ids": ids[leaf], "labels": ids[leaf]}
        ...         own.backward(model(**part, num_items_in_batch=count).loss)
        >>> own.loss  # doctest: +SKIP
        tensor(2.3)
    """
    state, module = state_of(model), model_of(model)
    state.mesh.control.barrier("leaves")
    if state.invariant is None:
        raise ValueError("leaves: make the model with px.parallelize(..., invariant=)")
    if not module.training:
        raise ValueError("leaves: call model.train() before")
    if state.in_leaf:
        raise RuntimeError("leaves: those of another batch are running")
    if type(rows) is not int or rows < 1:
        raise ValueError(f"leaves: rows must be an integer of at least 1, got {rows!r}")
    require_equal(state.mesh.control, "leaves", {"rows": rows}, advice="pass the global batch's")
    if state.leaf_sums is not None:
        rounds = LeafRounds(module, state, split_in_blocks(rows, state.invariant.leaves))
        with rounds.running():
            yield rounds
        rounds.finish()
        return
    own = Leaves(module, state, rows)
    with own._running():
        yield own
    own._finish()


class Leaves:
    """The leaves of one global batch; what :func:`leaves` returns to its context.

    Iterating gives the rows of each leaf of this rank, as a slice of the batch. Where experts are
    sharded over dp ranks, all of these run as many leaves as the one with most: one that has fewer
    is given a leaf again, of which nothing counts, so that it takes part in their exchanges.

    Attributes:
        loss: after the context the sum of the losses of all leaves, a scalar, the same on every
            rank.
    """

    loss: torch.Tensor | None = None

    def __init__(self, model: nn.Module, state: ParallelState, rows: int) -> None:
        self._state = state
        self._ranges = split_in_blocks(rows, state.invariant.leaves)
        self._runs = split(len(self._ranges), state.mesh.dp_size)
        self._left: int | None = None  # rounds of leaves, when they have begun
        self._counters = [
            each
            for module in model.modules()
            for each in vars(module).values()
            if isinstance(each, ForwardCounter)
        ]
        self._experts = [
            module
            for module in model.modules()
            if isinstance(module, BlockExperts) and module.dp_ranks > 1
        ]
        meet = self._experts[0].dp_ranks if self._experts else 1
        first = state.mesh.dp_rank // meet * meet
        self._meeting = range(first, first + meet)  # the dp ranks that share the experts of one
        self._shared = [
            (module, name, parameter)
            for module in self._experts
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        apart = {parameter for _, _, parameter in self._shared}
        self._trained = [p for p in model.parameters() if p.requires_grad and p not in apart]
        self._losses: list[torch.Tensor] = []  # of the leaf that is running
        self._nodes: list[Node] = []  # of losses and gradients of this rank's leaves
        self._nodes_of_experts: list[list[Node]] = [[] for _ in self._meeting]

    def __iter__(self) -> Iterator[slice]:
        if self._left is not None:
            raise RuntimeError("leaves: they can be run once")
        self._left = self._count_of_rounds()
        first, _ = self._runs[self._state.mesh.dp_rank]
        for number, (leaf, is_own) in enumerate(self.rounds()):
            yield leaf
            taken = self._taken()
            if is_own:
                _push(self._nodes, (first + number, 1, taken), len(self._ranges), _add)
            self._take_experts(number)
            self._left -= 1

    def rounds(self) -> Iterator[tuple[slice, bool]]:
        """Yield the rows of each leaf that this rank runs, and whether it counts."""
        own = range(*self._runs[self._state.mesh.dp_rank])
        for number in range(self._count_of_rounds()):
            is_own = number < len(own)
            leaf = own[number] if is_own else 0
            start, stop = self._ranges[leaf]
            for counter in self._counters:
                counter.first_row = start
            for module in self._experts:
                module.has_leaf = is_own
            for routing in self._state.routings:
                routing.leaf = leaf
            yield slice(start, stop), is_own

    def _count_of_rounds(self) -> int:
        first, stop = self._runs[self._state.mesh.dp_rank]
        lengths = [stop - start for start, stop in self._runs]
        return max(lengths) if self._experts else stop - first

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
        self._losses.append(loss.detach())

    def _taken(self) -> list[torch.Tensor]:
        """Return the loss of a leaf and its gradients, which the parameters have no more."""
        if not self._losses:
            raise ValueError("leaves: a leaf ran without a backward(loss) of its leaves")
        values = [sum(self._losses)]
        self._losses = []
        return [_wide(value) for value in values] + _take_gradients(self._trained)

    def _take_experts(self, number: int) -> None:
        """Take the gradients of the experts for the leaves of one round, each by itself."""
        for place, dp_rank in enumerate(self._meeting):
            copies = [module.weights[name][place] for module, name, _ in self._shared]
            gradients = _take_gradients(copies)
            first, stop = self._runs[dp_rank]
            if first + number < stop:
                nodes = self._nodes_of_experts[place]
                _push(nodes, (first + number, 1, gradients), len(self._ranges), _add)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run leaves inside the context, each of which finds no gradients."""
        kept = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        for module, name, parameter in self._shared:
            module.weights[name] = [parameter.detach().requires_grad_() for _ in self._meeting]
        for counter in self._counters:
            counter.count += 1  # the leaves of a batch are one forward
        self._state.in_leaf = True
        try:
            yield
        finally:
            self._state.in_leaf = False
            for counter in self._counters:
                counter.first_row = None
            for module in self._experts:
                module.weights, module.has_leaf = {}, True
            for routing in self._state.routings:
                routing.leaf = None
            for parameter, gradient in zip(self._trained, kept, strict=True):
                parameter.grad = gradient

    def _finish(self) -> None:
        """Add the gradients of all leaves to those that the parameters have."""
        if self._left is None or self._left:
            raise RuntimeError(
                "leaves: the context ended before the last leaf of this rank had run"
            )
        mesh, count = self._state.mesh, len(self._ranges)
        shared = [parameter for _, _, parameter in self._shared]
        parameters = [*self._trained, *shared]
        like = [parameters[0].new_empty(()), *self._trained]
        self.loss, *gradients = _over_group(self._nodes, like, self._runs, count, mesh.dp)
        nodes: list[Node] = []
        for node in chain.from_iterable(self._nodes_of_experts):
            _push(nodes, node, count, _add)
        meet = len(self._meeting)
        runs = [
            (first, stop)
            for (first, _), (_, stop) in zip(
                self._runs[::meet], self._runs[meet - 1 :: meet], strict=True
            )
        ]
        gradients += _over_group(nodes, shared, runs, count, mesh.edp)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _take_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters, which have them no more."""
    gradients = []
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise ValueError(
                "leaves: a trained parameter got no gradient; set requires_grad of those that "
                "the batch does not use to False"
            )
        gradients.append(_wide(gradient))
    return gradients


def _rows_of(batch: Mapping[str, Any]) -> int:
    if "labels" not in batch:
        raise ValueError(f"train_leaves: the batch has no labels, only {', '.join(batch)}")
    rows = {name: len(value) for name, value in batch.items() if _has_rows(value)}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        raise ValueError(
            f"train_leaves: every tensor of a batch must have its rows, at least one, got {rows}"
        )
    return rows["labels"]


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{value.dtype} {tuple(value.shape)} {xxhash.xxh3_128_hexdigest(content)}"


def _count_of_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    targets = batch["labels"][..., 1:] if "shift_labels" not in batch else batch["shift_labels"]
    return (targets != batch.get("ignore_index", -100)).sum()


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a.add_(b) for a, b in zip(left, right, strict=True)]


def _over_group(
    nodes: list[Node],
    like: Sequence[torch.Tensor],
    runs: Sequence[tuple[int, int]],
    count: int,
    group: Group,
) -> list[torch.Tensor]:
    """Return sums over all leaves, from the nodes of each rank of a group.

    Args:
        nodes: of this rank.
        like: tensors of the shapes and dtypes of what is summed.
        runs: of the leaves of each rank.
        count: of all leaves.
        group: whose ranks have all leaves.
    """
    if not like:
        return []
    if group.size == 1:
        ((_, _, values),) = nodes
        return values
    of_ranks: list[list[Node]] = [[] for _ in runs]
    for of_rank, run in zip(of_ranks, runs, strict=True):
        for number in range(*run):
            _push(of_rank, (number, 1, None), count, lambda left, right: None)
    everyones = [(start, width) for of_rank in of_ranks for start, width, _ in of_rank]
    sums = []
    for index, each in enumerate(like):
        dtype = torch.promote_types(each.dtype, torch.float32)
        total = torch.empty(each.shape, dtype=dtype, device=each.device)
        own = [value[index].flatten().split(_CHUNK) for _, _, value in nodes]
        for number, part in enumerate(total.view(-1).split(_CHUNK)):
            mine = torch.cat([part[:0], *(value[number] for value in own)])
            sizes = [len(of_rank) * len(part) for of_rank in of_ranks]
            values = ops.gather_from_region(mine, sizes, group).split(len(part))
            merged: list[Node] = []
            for (start, width), value in zip(everyones, values, strict=True):
                _push(merged, (start, width, value), count, torch.add)
            ((_, _, whole),) = merged
            part.copy_(whole)
        sums.append(total)
    return sums
