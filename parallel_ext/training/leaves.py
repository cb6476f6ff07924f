"""A training step whose bits do not depend on how many dp ranks share its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.control import require_equal
from parallel_ext.nn.forward_counter import ForwardCounter, one_forward_of
from parallel_ext.parallel.state import ParallelState, model_of, state_of
from parallel_ext.sharding.blocks import split_in_blocks
from parallel_ext.sharding.layout import split

_CHUNK = 1 << 22  # numbers of a gradient that the dp ranks exchange at a time

Node = tuple[int, int, Any]
"""The sum of the leaves from the first number on, so many or up to the last, and its value."""


def train_leaves(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Run forward and backward of a global batch, with the same bits on any number of ranks.

    Every rank calls it with the same batch, whose rows ``px.Invariant(leaves=)`` divides in order.
    Each dp rank runs its leaves one by one. Their gradients are added over a tree that depends on
    the number of leaves alone, and left in ``.grad`` on every dp rank; those of calls before are
    added to.

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
    state, own = state_of(model), model_of(model)
    mesh = state.mesh
    mesh.control.barrier("train_leaves")
    counters = [
        each
        for module in own.modules()
        for each in vars(module).values()
        if isinstance(each, ForwardCounter)
    ]
    rows = _check(own, state, batch)
    require_equal(
        *(mesh.control, "train_leaves", {n: _digest(value) for n, value in batch.items()}),
        noun="the batch's",
        advice="every rank passes the whole batch",
    )
    leaves = split_in_blocks(rows, state.invariant.leaves)
    runs = split(len(leaves), mesh.dp_size)
    items = {"num_items_in_batch": _count_of_labels(batch), **batch}
    trained = [parameter for parameter in own.parameters() if parameter.requires_grad]
    nodes: list[Node] = []
    with _gradients_aside(trained, state), one_forward_of(counters):
        for number in range(*runs[mesh.dp_rank]):
            start, stop = leaves[number]
            for counter in counters:
                counter.first_row = start
            loss = model(**{name: _rows(value, start, stop) for name, value in items.items()}).loss
            loss.backward()
            _push(nodes, (number, 1, _take(loss, trained)), len(leaves), _add)
        sums = _over_dp(nodes, trained, runs, len(leaves), state)
    loss, *gradients = sums
    for parameter, gradient in zip(trained, gradients, strict=True):
        gradient = gradient.to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return loss


def _check(model: nn.Module, state: ParallelState, batch: Mapping[str, Any]) -> int:
    """Return the rows of a batch."""
    if state.invariant is None:
        raise ValueError("train_leaves: make the model with px.parallelize(..., invariant=)")
    if not model.training:
        raise ValueError("train_leaves: call model.train() before")
    if "labels" not in batch:
        raise ValueError(f"train_leaves: the batch has no labels, only {', '.join(batch)}")
    rows = {n: len(v) for n, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
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


def _rows(value: Any, start: int, stop: int) -> Any:
    has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
    return value[start:stop] if has_rows else value


@contextmanager
def _gradients_aside(trained: list[nn.Parameter], state: ParallelState) -> Iterator[None]:
    """Run leaves inside the context, each of which finds no gradients."""
    kept = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    state.in_leaf = True
    try:
        yield
    finally:
        state.in_leaf = False
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient


def _take(loss: torch.Tensor, trained: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the loss of a leaf and its gradients, which the parameters have no more."""
    values = [loss.detach()]
    for parameter in trained:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise ValueError(
                "train_leaves: a trained parameter got no gradient; set requires_grad of those "
                "that the batch does not use to False"
            )
        values.append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
    return values


def _push(nodes: list[Node], node: Node, count: int, add: Callable[[Any, Any], Any]) -> None:
    """Add a node to those before it, and sum up what can be: the tree of ``csrc/base/tree.h``.

    Args:
        nodes: of leaves that follow each other; the last one ends where ``node`` begins.
        node: the next one.
        count: of all leaves.
        add: the sum of two values.
    """
    start, width, value = node
    while True:
        while width < count <= start + width and start % (2 * width) == 0:
            width *= 2  # the right half covers nothing
        if start % (2 * width) == 0 or not nodes or nodes[-1][1] != width:
            break
        start, _, left = nodes.pop()
        value, width = add(left, value), 2 * width
    nodes.append((start, width, value))


def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a.add_(b) for a, b in zip(left, right, strict=True)]


def _over_dp(
    nodes: list[Node],
    trained: list[nn.Parameter],
    runs: list[tuple[int, int]],
    count: int,
    state: ParallelState,
) -> list[torch.Tensor]:
    """Return the sums of loss and gradients over all leaves, from the nodes of each dp rank."""
    mesh = state.mesh
    if mesh.dp_size == 1:
        ((_, _, values),) = nodes
        return values
    of_ranks: list[list[Node]] = [[] for _ in runs]
    for of_rank, run in zip(of_ranks, runs, strict=True):
        for number in range(*run):
            _push(of_rank, (number, 1, None), count, lambda left, right: None)
    everyones = [(start, width) for of_rank in of_ranks for start, width, _ in of_rank]
    like = [torch.empty((), dtype=trained[0].dtype), *trained]  # the loss, and gradients
    sums = []
    for index, each in enumerate(like):
        dtype = torch.promote_types(each.dtype, torch.float32)
        total = torch.empty(each.shape, dtype=dtype, device=mesh.device)
        own = [value[index].flatten().split(_CHUNK) for _, _, value in nodes]
        for number, part in enumerate(total.view(-1).split(_CHUNK)):
            mine = torch.cat([part[:0], *(value[number] for value in own)])
            sizes = [len(of_rank) * len(part) for of_rank in of_ranks]
            values = ops.gather_from_region(mine, sizes, mesh.dp).split(len(part))
            merged: list[Node] = []
            for (start, width), value in zip(everyones, values, strict=True):
                _push(merged, (start, width, value), count, torch.add)
            ((_, _, whole),) = merged
            part.copy_(whole)
        sums.append(total)
    return sums
