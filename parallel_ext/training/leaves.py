"""Training steps whose bits do not depend on how many dp ranks share a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.errors import check_positive
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.parallel.state import model_of, state_of
from parallel_ext.sharding.digests import content_digest
from parallel_ext.training.leaf_balance import sharing_balance_loss
from parallel_ext.training.leaf_loop import LeafLoop
from parallel_ext.training.leaf_rounds import LeafRounds
from parallel_ext.training.leaf_runs import LeafRuns


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
        batch: what the model's forward takes by name, with ``labels``; every tensor or list has B
            rows, as int64 ids [B, S]. ``num_items_in_batch`` is the number of labels that count in
            all batches of this optimizer step; of this batch when left out.

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
    control = state_of(model).mesh.control
    count = control.run_on_all("train_leaves", lambda: _count_of_labels(batch))
    items = {"num_items_in_batch": count, **batch}
    with leaves(model, len(batch["labels"]), batch) as own:
        for leaf in own:
            own.backward(model(**_part(items, leaf)).loss)
    return own.loss


@contextmanager
def leaves(
    model: nn.Module, rows: int, batch: Mapping[str, Any] | None = None
) -> Iterator[LeafLoop]:
    """Run the leaves of a global batch in a loop of your own, with the same bits on any layout.

    Every rank enters the context with the same batch, runs its leaves, and leaves with the
    gradients of the whole batch in ``.grad``, added to those that were there before. A forward with
    labels needs ``num_items_in_batch=`` inside.

    For the load balancing loss of a mixture (``output_router_logits``) it needs ``batch``, of which
    it runs all leaves forward once, under the autocast that it is entered with. ``aux_loss`` of a
    leaf's output is then its share of that of the batch, and in its loss.

    Args:
        model: parallel, with ``px.Invariant``, in training mode.
        rows: of the global batch, which ``px.Invariant(leaves=)`` divides in order.
        batch: the global batch, of which the leaves take their rows: arguments of the forward by
            name, every tensor or list with ``rows`` rows.

    Raises:
        ValueError: the model is not such a model; a tensor of ``batch`` has other rows; or a leaf
            left a trained parameter without a gradient.
        RuntimeError: the leaves of another batch are running, or not all of these ran.
        DisagreementError: the ranks have different ``rows`` or batches.
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
    items = {} if batch is None else batch

    def check() -> None:
        if state.invariant is None:
            raise ValueError("leaves: make the model with px.parallelize(..., invariant=)")
        if not module.training:
            raise ValueError("leaves: call model.train() before")
        if state.leaf_loop is not None:
            raise RuntimeError("leaves: those of another batch are running")
        check_positive("leaves: rows", rows)
        others = {name: len(v) for name, v in items.items() if _has_rows(v) and len(v) != rows}
        if others:
            raise ValueError(
                f"leaves: every tensor of the batch must have its {rows} rows, but there are "
                f"{others}"
            )

    state.mesh.control.barrier("leaves")
    state.mesh.control.run_on_all("leaves", check)
    compared = {"rows": rows, **{name: _digest(value) for name, value in items.items()}}
    advice = "every rank passes those of the whole batch"
    require_equal(state.mesh.control, "leaves", compared, noun="the batch's ", advice=advice)
    own = (LeafRuns if state.leaf_sums is None else LeafRounds)(module, state, rows)
    balance = sharing_balance_loss(model, own, items, lambda _, leaf: _part(items, leaf))
    with own.running(), nullcontext() if batch is None else balance:
        yield own


def _part(batch: Mapping[str, Any], leaf: slice) -> dict[str, Any]:
    return {name: value[leaf] if _has_rows(value) else value for name, value in batch.items()}


def _digest(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_digest, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {content_digest(value)}"


def _count_of_labels(batch: Mapping[str, Any]) -> torch.Tensor:
    if "labels" not in batch:
        raise ValueError(f"train_leaves: the batch has no labels, only {', '.join(batch)}")
    targets = batch["labels"][..., 1:] if "shift_labels" not in batch else batch["shift_labels"]
    return (targets != batch.get("ignore_index", -100)).sum()


def _has_rows(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or isinstance(value, torch.Tensor) and value.dim() > 0
