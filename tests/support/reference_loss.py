"""Cross entropy with all options on whole logits in plain torch, and ours on shards beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from reference_ops import MUTATIONS, own_range, relative_error
from torch.nn import functional

from parallel_ext.ops import (
    Group,
    LossOptions,
    VocabStatistics,
    linear_vocab_cross_entropy_statistics,
    vocab_cross_entropy_statistics,
)
from parallel_ext.sharding.layout import split

FP64 = torch.float64
NAN, INF = float("nan"), float("inf")
IGNORED = -100


def class_weight(vocab_size: int) -> torch.Tensor:
    """Uneven class weights, some of them 0, whose mean is not 1."""
    return torch.arange(vocab_size, dtype=FP64).add(2).remainder(5) * 0.7


# Options alone; weight=True stands for uneven class weights.
ALONE: dict[str, dict[str, Any]] = {
    "none": {},
    "weight": {"weight": True},
    "label_smoothing": {"label_smoothing": 0.1},
    "label_smoothing and weight": {"label_smoothing": 0.3, "weight": True},
    "z_loss": {"z_loss": 1e-2},
    "z_loss and weight": {"z_loss": 1e-2, "weight": True},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": -0.3},
    "all": {
        "weight": True,
        "label_smoothing": 0.2,
        "z_loss": 1e-2,
        "softcap": 4.0,
        "logit_scale": 1.7,
    },
}


# All options at once on any ranks and both paths, and each of them alone somewhere.
OPTIONS_ON_RANKS = pytest.mark.parametrize(
    ("name", "size", "aten"),
    [("all", size, aten) for size in (1, 2, 3, 4) for aten in (False, True)]
    + [(name, 3, number % 2 == 1) for number, name in enumerate(ALONE) if name != "all"],
)


def options_named(name: str, vocab_size: int) -> dict[str, Any]:
    options = dict(ALONE[name])
    if options.pop("weight", False):
        options["weight"] = class_weight(vocab_size)
    return options


# Any combination of them; weight=True stands for random ones.
RANDOM_OPTIONS = st.fixed_dictionaries(
    {
        "weight": st.sampled_from([None, True]),
        "ignore_index": st.sampled_from([IGNORED, -1, 0, 7]),
        "reduction": st.sampled_from(["none", "sum", "mean"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 0.999]),
        "z_loss": st.sampled_from([0.0, 1e-4, 1.0]),
        "softcap": st.sampled_from([None, 2.0, 30.0]),
        "logit_scale": st.sampled_from([1.0, 0.25, -2.0, 0.0]),
    }
)


def random_call(
    num_tokens: int, vocab_size: int, options: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Labels, many of them ignored, and a draw of RANDOM_OPTIONS with its class weights."""
    weight = 2 * torch.rand(vocab_size, dtype=FP64) if options["weight"] else None
    labels = torch.randint(0, vocab_size, (num_tokens,))
    labels[torch.rand(num_tokens) < 0.3] = options["ignore_index"]
    return labels, {**options, "weight": weight}


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
        options=LossOptions(**options),
    )
    wide = FP64 if logits.dtype == FP64 else torch.float32
    assert [value.dtype for value in actual] == [wide] * 3 + [torch.int64]
    (grad,) = torch.autograd.grad(
        actual[:3], columns, [grad.to(wide) for grad in grads], materialize_grads=True
    )
    assert grad.dtype == logits.dtype
    assert [value.requires_grad for value in actual] == [True] * 3 + [False]
    return {  # of loss and entropy, which may be the small difference of numbers near 1, to 1 nat
        "loss": relative_error(actual.loss + 1, expected.loss + 1),
        "log_sum_exp": relative_error(actual.log_sum_exp, expected.log_sum_exp),
        "entropy": relative_error(actual.entropy + 1, expected.entropy + 1),
        "argmax": _same_ids(actual.argmax, expected.argmax),
        "gradient": relative_error(grad, expected_grad, (..., slice(*own))),
    }


# Which of (input, head, bias) have gradients.
TRAINED = {
    "trained": (True, True, True),
    "frozen": (True, False, False),
    "only the bias trained": (True, False, True),
    "only the head trained": (False, True, False),
}


def linear_errors(
    group: Group,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    labels: torch.Tensor,
    options: dict[str, Any],
    trained: str = "trained",
    statistics: bool = False,
    mutation: str = "none",
) -> dict[str, float]:
    """The head with its loss, and all gradients, against plain torch in fp64.

    ``operands`` are the whole input, head and bias or None. With ``statistics`` these have
    gradients too. The backward runs twice.
    """
    wide = FP64 if operands[0].dtype == FP64 else torch.float32
    vocab_size = len(operands[1])
    own = own_range(vocab_size, group)
    op_group, rank = MUTATIONS[mutation](group)
    held = slice(*split(vocab_size, group.size)[rank])
    present = [tensor is not None for tensor in operands]
    needed = [want and there for want, there in zip(TRAINED[trained], present, strict=True)]
    whole = [
        None if each is None else each.double().requires_grad_(want)
        for each, want in zip(operands, needed, strict=True)
    ]
    expected = dense_statistics(functional.linear(*whole), labels, **options)
    grads = [torch.randn_like(value) for value in expected[:3]]
    count = 3 if statistics else 1
    wanted = [each for each, want in zip(whole, needed, strict=True) if want]
    expected_grads = torch.autograd.grad(expected[:count], wanted, grads[:count])

    input, head, bias = operands
    ours = [
        input.detach().clone(),
        head[held].clone(),
        None if bias is None else bias[held].clone(),
    ]
    for each, want in zip(ours, needed, strict=True):
        if want:
            each.requires_grad_()
    actual = linear_vocab_cross_entropy_statistics(
        ours[0],
        ours[1],
        labels,
        vocab_size,
        own,
        bias=ours[2],
        log_sum_exp=statistics,
        entropy=statistics,
        argmax=statistics,
        group=op_group,
        options=LossOptions(**options),
    )
    outputs = [value for value in actual[:count]]
    wanted = [each for each, want in zip(ours, needed, strict=True) if want]
    errors = {"loss": relative_error(actual.loss, expected.loss)}
    assert actual.loss.dtype == wide
    if statistics:
        errors["log_sum_exp"] = relative_error(actual.log_sum_exp, expected.log_sum_exp)
        errors["entropy"] = relative_error(actual.entropy, expected.entropy)
        errors["argmax"] = _same_ids(actual.argmax, expected.argmax)
    names = [name for name, want in zip(("input", "head", "bias"), needed, strict=True) if want]
    for time in ("first", "second"):
        ours_grads = torch.autograd.grad(
            outputs, wanted, [grad.to(wide) for grad in grads[:count]], retain_graph=True
        )
        for name, grad, answer in zip(names, ours_grads, expected_grads, strict=True):
            assert grad.dtype == input.dtype
            rows = slice(None) if name == "input" else slice(*own)
            errors[f"{time} gradient of {name}"] = relative_error(grad, answer, rows)
    return errors
