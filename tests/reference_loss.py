"""Cross entropy with all options on whole logits in plain torch, and ours on shards beside it."""

from __future__ import annotations

from typing import Any

import torch
from reference_ops import MUTATIONS, own_range, relative_error
from torch.nn import functional

from parallel_ext.layout import split
from parallel_ext.ops import Group, VocabStatistics, vocab_cross_entropy_statistics

FP64 = torch.float64
NAN, INF = float("nan"), float("inf")
IGNORED = -100


def labels_of(vocab_size: int) -> torch.Tensor:
    """Labels of every shard, its ends included, and ignored ones between them."""
    last = vocab_size - 1
    in_sevenths = [vocab_size * k // 7 for k in range(1, 7)]
    return torch.tensor([IGNORED, 0, last, *in_sevenths, IGNORED, last])


def special_logits(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten columns, of which the first five are rank 0's of two; the label is 3 or 7."""
    lowest, largest = torch.finfo(dtype).min, torch.finfo(dtype).max
    rows: list[tuple[int, dict[int | range, float]]] = [
        (3, {0: NAN}),
        (3, {3: NAN}),
        (7, {range(0, 5): NAN}),
        (7, {range(5, 10): NAN}),
        (3, {range(0, 10): NAN}),
        (3, {0: INF}),
        (3, {3: INF}),
        (7, {0: INF, 9: INF}),
        (3, {0: INF, 9: NAN}),
        (3, {0: -INF}),
        (3, {3: -INF}),
        (7, {range(0, 5): -INF}),
        (3, {range(0, 5): -INF}),
        (3, {range(5, 10): -INF}),
        (7, {range(0, 5): -INF, 9: INF}),
        (7, {range(0, 5): -INF, 9: NAN}),
        (3, {range(0, 3): -INF, range(4, 10): -INF}),
        (3, {range(0, 10): -INF}),
        (3, {range(0, 10): lowest, 3: largest}),
        (7, {range(0, 10): lowest, 3: 0.0, 7: 0.0}),
    ]
    logits = torch.randn(len(rows), 10).to(dtype)
    for row, (_, values) in zip(logits, rows, strict=True):
        for columns, value in values.items():
            row[columns] = value
    return logits, torch.tensor([label for label, _ in rows])


def dense_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> VocabStatistics:
    """What ``vocab_cross_entropy_statistics`` promises, of logits [T, V] on one process."""
    z = logits if logit_scale == 1 else logit_scale * logits
    if softcap is not None:
        z = softcap * (z / softcap).tanh()
    loss = functional.cross_entropy(
        z,
        labels,
        None if weight is None else weight.to(z.dtype),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    log_sum_exp = z.logsumexp(1)
    if z_loss > 0:
        valid = labels != ignore_index
        squares = torch.where(valid, z_loss * log_sum_exp.square(), 0.0)
        of_reduction = {"none": squares, "sum": squares.sum()}
        loss = loss + of_reduction.get(reduction, squares.sum() / valid.sum())
    entropy = torch.special.entr(z.softmax(1)).sum(1)
    return VocabStatistics(loss, log_sum_exp, entropy, z.argmax(1))


def _same_ids(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return 0.0 if torch.equal(actual, expected) else INF


def statistics_errors(
    group: Group,
    logits: torch.Tensor,
    labels: torch.Tensor,
    options: dict[str, Any],
    mutation: str = "none",
) -> dict[str, float]:
    """Everything the op returns, and the gradient of all of it, against plain torch in fp64.

    Each token has gradients of its own, that of the loss where there is one for each.
    """
    vocab_size, own = logits.size(1), own_range(logits.size(1), group)
    whole = logits.double().requires_grad_()
    expected = dense_statistics(whole, labels, **options)
    grads = [torch.randn_like(value) for value in expected[:3]]
    (expected_grad,) = torch.autograd.grad(expected[:3], whole, grads)

    op_group, rank = MUTATIONS[mutation](group)
    columns = logits[:, slice(*split(vocab_size, group.size)[rank])].detach().requires_grad_()
    actual = vocab_cross_entropy_statistics(
        columns,
        labels,
        vocab_size,
        own,
        log_sum_exp=True,
        entropy=True,
        argmax=True,
        group=op_group,
        **options,
    )
    wide = FP64 if logits.dtype == FP64 else torch.float32
    assert [value.dtype for value in actual] == [wide] * 3 + [torch.int64]
    (grad,) = torch.autograd.grad(
        actual[:3], columns, [grad.to(wide) for grad in grads], materialize_grads=True
    )
    assert grad.dtype == logits.dtype
    assert [value.requires_grad for value in actual] == [True] * 3 + [False]
    return {
        "loss": relative_error(actual.loss, expected.loss),
        "log_sum_exp": relative_error(actual.log_sum_exp, expected.log_sum_exp),
        "entropy": relative_error(actual.entropy, expected.entropy),
        "argmax": _same_ids(actual.argmax, expected.argmax),
        "gradient": relative_error(grad, expected_grad, (..., slice(*own))),
    }
