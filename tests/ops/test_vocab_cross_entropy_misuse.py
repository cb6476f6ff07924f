"""What the cross entropy on shards refuses, what it leaves alone, and bugs that others had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_loss import FP64, IGNORED, INF, NAN, dense_statistics, labels_of
from reference_memory import allocated
from reference_ops import (
    BOTH_PATHS,
    TOLERANCE,
    assert_refused,
    aten_path,
    data_bytes,
    on_ranks,
    own_range,
    relative_error,
    with_gradients,
)

from parallel_ext import _C, release_workspaces
from parallel_ext.ops import (
    Group,
    LossOptions,
    vocab_cross_entropy,
    vocab_cross_entropy_statistics,
)

EVERYTHING: dict[str, Any] = {
    "weight": torch.rand(101, generator=torch.Generator().manual_seed(0)),
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "softcap": 10.0,
    "logit_scale": 0.7,
}


def _loss(
    group: Group,
    labels: list[int],
    logits: torch.Tensor | None = None,
    reduction: str = "mean",
    vocab_range: tuple[int, int] | None = None,
    **options: Any,
) -> torch.Tensor:
    """The loss over the ids [0, 10), of which each of two ranks holds five."""
    return vocab_cross_entropy(
        torch.zeros(len(labels), 5) if logits is None else logits,
        torch.tensor(labels),
        10,
        own_range(10, group) if vocab_range is None else vocab_range,
        options=LossOptions(reduction=reduction, **options),
        group=group,
    )


def _refused_options(text: str, **options: Any) -> tuple[Callable[..., Any], str]:
    return lambda group: _loss(group, [0], **options), f"ValueError: vocab_cross_entropy: {text}"


REFUSALS = {
    "label too large": (
        lambda group: _loss(group, [0, 9, IGNORED, 10, -1]),
        "IndexError: vocab_cross_entropy: label 10 at position 3 is outside the vocabulary [0, "
        "10) and is not ignore_index -100",
    ),
    "negative label": (
        lambda group: _loss(group, [0, -1]),
        "IndexError: vocab_cross_entropy: label -1 at position 1 is outside the vocabulary [0, 10)",
    ),
    "gathered logits": (
        lambda group: _loss(group, [0, 1], torch.zeros(2, 10)),
        "ValueError: vocab_cross_entropy: logits hold 10 of the vocabulary, but this rank's shard "
        "is [",
    ),
    "padded logits": (
        lambda group: _loss(group, [0, 1], torch.zeros(2, 8)),
        "ValueError: which is 5; pass this rank's shard, neither gathered nor padded",
    ),
    "range outside the vocabulary": (
        lambda group: _loss(group, [0, 1], vocab_range=(6, 11)),
        "ValueError: vocab_cross_entropy: the shard [6, 11) is not inside [0, 10)",
    ),
    "the same range on both": (
        lambda group: _loss(group, [0, 1], vocab_range=(0, 5)),
        "ValueError: vocab_cross_entropy: the ranks' shards begin and end at [0, 5, 0, 5], which "
        "is some of the 10 ids twice, or not at all; pass each rank's own",
    ),
    "an id on no rank": (
        lambda group: _loss(
            group,
            [0, 1],
            torch.zeros(2, 5 - group.rank),
            vocab_range=(5 * group.rank, 5 + 4 * group.rank),
        ),
        "ValueError: begin and end at [0, 5, 5, 9]",
    ),
    "a range within another": (
        lambda group: _loss(
            group,
            [0, 1],
            torch.zeros(2, 3 if group.rank else 10),
            vocab_range=(5, 8) if group.rank else (0, 10),
        ),
        "ValueError: begin and end at [0, 10, 5, 8]",
    ),
    "range in reverse": (
        lambda group: _loss(group, [0, 1], vocab_range=(5, 0)),
        "ValueError: vocab_cross_entropy: the shard [5, 0) is not inside [0, 10)",
    ),
    "labels of another length": (
        lambda group: _loss(group, [0, 1], torch.zeros(3, 5)),
        "ValueError: vocab_cross_entropy: labels of shape [2] do not fit the 3 tokens; one label "
        "for each is expected",
    ),
    "unknown reduction": (
        lambda group: _loss(group, [0], reduction="average"),
        "ValueError: vocab_cross_entropy: reduction must be 'none', 'sum' or 'mean', got 'average'",
    ),
    "group size": (
        lambda group: _loss(group._replace(size=3), [0], vocab_range=(0, 5)),
        "ValueError: has 2 ranks, but group_size is 3",
    ),
    "label smoothing of one": _refused_options(
        "label_smoothing must be in [0, 1), got 1", label_smoothing=1.0
    ),
    "negative label smoothing": _refused_options(
        "label_smoothing must be in [0, 1), got -0.1", label_smoothing=-0.1
    ),
    "label smoothing of NaN": _refused_options(
        "label_smoothing must be in [0, 1), got nan", label_smoothing=NAN
    ),
    "negative z-loss": _refused_options("z_loss must be a finite number >= 0, got -1", z_loss=-1.0),
    "infinite z-loss": _refused_options("z_loss must be a finite number >= 0, got inf", z_loss=INF),
    "negative softcap": _refused_options(
        "softcap must be a finite number > 0, or None for no cap, got -30", softcap=-30.0
    ),
    "softcap of zero": _refused_options(
        "softcap must be a finite number > 0, or None for no cap, got 0", softcap=0.0
    ),
    "logit scale of NaN": _refused_options("logit_scale must be finite, got nan", logit_scale=NAN),
    "weight of a shard": _refused_options(
        "weight of shape [5] does not fit the vocabulary of 10; pass one number for each id, the "
        "whole 10 on every rank",
        weight=torch.ones(5),
    ),
    "negative weight": _refused_options(
        "weight -1 of id 3 is not a finite number >= 0",
        weight=torch.ones(10).index_fill(0, torch.tensor([3]), -1.0),
    ),
    "weight of NaN": _refused_options(
        "weight nan of id 9 is not a finite number >= 0",
        weight=torch.ones(10).index_fill(0, torch.tensor([9]), NAN),
    ),
    "trained weight": _refused_options(
        "weight requires a gradient, and there is none; pass weight.detach()",
        weight=torch.ones(10, requires_grad=True),
    ),
}


@BOTH_PATHS
@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case, aten):
    assert_refused(__name__, case, aten)


@BOTH_PATHS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nothing_is_written_to_and_backward_may_run_again(dtype, aten):
    logits = torch.randn(11, 101, dtype=FP64).to(dtype).requires_grad_()
    labels, options = labels_of(101), dict(EVERYTHING)
    seen = [logits, labels, options["weight"]]
    before = [data_bytes(tensor) for tensor in seen]
    with aten_path(aten):
        loss, *statistics = vocab_cross_entropy_statistics(
            logits,
            labels,
            101,
            (0, 101),
            log_sum_exp=True,
            entropy=True,
            options=LossOptions(**options),
        )
        total = loss + statistics[0].sum() + statistics[1].sum()
        first, second = (torch.autograd.grad(total, logits, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)
    assert first[0].data_ptr() != second[0].data_ptr()
    assert [data_bytes(tensor) for tensor in seen] == before
    assert [tensor._version for tensor in seen] == [0, 0, 0]


@BOTH_PATHS
def test_statistics_alone_have_a_gradient_and_unused_ones_cost_none(aten):
    """Also of tokens that are ignored."""
    labels = torch.full((3,), IGNORED)
    logits = torch.randn(3, 7, dtype=FP64)
    for name in ("log_sum_exp", "entropy"):
        expected = with_gradients(
            lambda x, name=name: getattr(dense_statistics(x, labels), name), [logits], torch.ones(3)
        )
        with aten_path(aten):
            actual = with_gradients(
                lambda x, name=name: getattr(
                    vocab_cross_entropy_statistics(x, labels, 7, (0, 7), **{name: True}), name
                ),
                [logits],
                torch.ones(3),
            )
        for ours, theirs in zip(actual, expected, strict=True):
            assert relative_error(ours, theirs) <= TOLERANCE[FP64]


def test_statistics_are_returned_where_asked_for():
    logits, labels = torch.randn(3, 7, requires_grad=True), torch.tensor([0, 3, 6])
    result = vocab_cross_entropy_statistics(logits, labels, 7, (0, 7), argmax=True)
    assert result.log_sum_exp is None
    assert result.entropy is None
    assert torch.equal(result.argmax, logits.argmax(1))
    assert torch.equal(result.loss, vocab_cross_entropy(logits, labels, 7, (0, 7)))
    assert not result.argmax.requires_grad


def _message_bytes(group: Group, asked: dict[str, bool], options: dict[str, Any]) -> dict[str, int]:
    labels = labels_of(10)
    start, stop = own_range(10, group)
    logits = torch.randn(len(labels), stop - start, requires_grad=True)
    _C.reset_collective_counts()
    result = vocab_cross_entropy_statistics(
        logits, labels, 10, (start, stop), LossOptions(**options), group=group, **asked
    )
    result.loss.backward()
    return _C.collective_counts()


@pytest.mark.parametrize(
    ("numbers", "asked", "options"),
    [
        (3, {}, {"weight": torch.ones(10), "z_loss": 1.0, "softcap": 2.0, "logit_scale": 0.5}),
        (3, {"log_sum_exp": True}, {}),
        (4, {"entropy": True}, {}),
        (4, {"argmax": True}, {}),
        (5, {}, {"label_smoothing": 0.1}),
        (7, {"log_sum_exp": True, "entropy": True, "argmax": True}, {"label_smoothing": 0.1}),
    ],
)
def test_one_message_holds_only_what_was_asked_for(numbers, asked, options):
    num_bytes = 4 * (numbers * len(labels_of(10)) + 2)  # and the range
    sent = {"all_gather": 1, "all_gather_bytes": num_bytes, "in_shared_memory": 1}
    assert on_ranks(2, _message_bytes, asked, options) == [sent] * 2


def _layout(how: str) -> torch.Tensor:
    """[4096, 1024]"""
    if how == "transposed":
        return torch.randn(1024, 4096).mT
    if how == "one row for all":
        return torch.randn(1024).expand(4096, 1024)
    return torch.randn(4096, 1024 + (9000 if how == "part of wider rows" else 0))[:, :1024]


@pytest.mark.parametrize("how", ["plain", "transposed", "one row for all", "part of wider rows"])
def test_memory_is_one_gradient_and_what_a_token_has(how):
    logits, labels = _layout(how).requires_grad_(), torch.zeros(4096, dtype=torch.int64)
    options = {**EVERYTHING, "weight": torch.ones(1024)}
    release_workspaces()

    def gradient() -> None:
        loss = vocab_cross_entropy(logits, labels, 1024, (0, 1024), LossOptions(**options))
        torch.autograd.grad(loss, logits)  # a leaf would copy it to have its own strides

    assert 16 <= allocated(gradient) <= 17
