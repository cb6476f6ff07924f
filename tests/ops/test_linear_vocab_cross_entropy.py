"""The output head and its loss in one op, on shards, against plain torch in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import (
    FP64,
    IGNORED,
    INF,
    NAN,
    OPTIONS_ON_RANKS,
    RANDOM_OPTIONS,
    TRAINED,
    labels_of,
    linear_errors,
    options_named,
    random_call,
)
from reference_memory import allocated
from reference_ops import (
    BOTH_PATHS,
    NOTICED,
    assert_all_raise,
    assert_within,
    counted_both_ways,
    on_ranks,
    own_range,
    relative_error,
    worst,
)
from torch.nn import functional

from parallel_ext import release_workspaces
from parallel_ext.ops import (
    ALONE,
    Group,
    LossOptions,
    linear_vocab_cross_entropy,
    linear_vocab_cross_entropy_statistics,
)


def _operands(
    num_tokens: int, hidden: int, vocab_size: int, dtype: torch.dtype = FP64, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return (
        torch.randn(num_tokens, hidden).to(dtype),
        torch.randn(vocab_size, hidden).to(dtype),
        torch.randn(vocab_size).to(dtype) if bias else None,
    )


def _errors_of_one_option(
    group: Group, name: str, vocab_sizes: list[int], trained: str, mutation: str = "none"
) -> dict[str, float]:
    errors = {}
    for vocab_size in vocab_sizes:
        labels = labels_of(vocab_size)
        operands = _operands(len(labels), 3, vocab_size)
        for reduction in ("none", "sum", "mean"):
            options = {**options_named(name, vocab_size), "reduction": reduction}
            found = linear_errors(group, operands, labels, options, trained, mutation=mutation)
            errors.update({f"V={vocab_size} {reduction}: {k}": v for k, v in found.items()})
    return errors


@OPTIONS_ON_RANKS
def test_each_option_equals_unsharded_for_a_trained_and_a_frozen_head(name, size, aten):
    """Also where a rank's shard is empty: 1 on 2."""
    for trained in ("trained", "frozen"):
        results = on_ranks(size, _errors_of_one_option, name, [1, 5, 65], trained, aten=aten)
        assert_within(results)


@pytest.mark.parametrize("trained", ["trained", "frozen"])
def test_the_comparison_notices_a_broken_exchange(trained):
    results = on_ranks(2, _errors_of_one_option, "all", [128], trained, "swapped shards")
    assert worst(results)[0] > NOTICED


def _errors_of_tiles(
    group: Group, trained: str, reduction: str, num_tokens: int, vocab_size: int, option: str
) -> dict[str, float]:
    """The second backward makes the tiles again."""
    labels = torch.randint(0, vocab_size, (num_tokens,))
    labels[::7] = IGNORED
    options = {**options_named(option, vocab_size), "reduction": reduction}
    operands = _operands(num_tokens, 3, vocab_size)
    return linear_errors(group, operands, labels, options, trained)


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "option", "aten"),
    [
        *((300, 20001, "all", False), (2100, 70, "all", False)),
        (4200, 7, "label_smoothing", True),  # as on a GPU: a frozen head has expected rows
    ],
)
@pytest.mark.parametrize(
    ("trained", "reduction"),
    [
        *(("trained", "mean"), ("trained", "none"), ("frozen", "none")),
        *(("only the bias trained", "none"), ("only the head trained", "mean")),
    ],
)
def test_tiles_of_ids_or_tokens_equal_unsharded(
    trained, reduction, num_tokens, vocab_size, option, aten
):
    arguments = trained, reduction, num_tokens, vocab_size, option
    assert_within(on_ranks(2, _errors_of_tiles, *arguments, aten=aten))


def _errors_of_random_options(
    group: Group,
    seed: int,
    num_tokens: int,
    vocab_size: int,
    trained: str,
    bias: bool,
    statistics: bool,
    options: dict[str, Any],
) -> dict[str, float]:
    torch.manual_seed(seed)
    labels, options = random_call(num_tokens, vocab_size, options)
    operands = _operands(num_tokens, 2, vocab_size, bias=bias or trained == "only the bias trained")
    return linear_errors(group, operands, labels, options, trained, statistics)


@given(
    size=st.integers(1, 4),
    aten=st.booleans(),
    seed=st.integers(0, 2**31),
    num_tokens=st.one_of(st.integers(1, 200), st.integers(1000, 2100)),
    vocab_size=st.sampled_from([1, 2, 3, 5, 10, 65, 127, 301]),
    trained=st.sampled_from(list(TRAINED)),
    bias=st.booleans(),
    statistics=st.booleans(),
    options=RANDOM_OPTIONS,
)
@settings(max_examples=60)
def test_random_combinations_of_options_equal_unsharded(
    size, aten, seed, num_tokens, vocab_size, trained, bias, statistics, options
):
    arguments = (seed, num_tokens, vocab_size, trained, bias, statistics, options)
    assert_within(on_ranks(size, _errors_of_random_options, *arguments, aten=aten))


def _errors_of_dtype(
    group: Group,
    dtype: torch.dtype,
    trained: str,
    reduction: str,
    num_tokens: int,
    hidden: int,
    sure: float,
    vocab_size: int = 1025,
) -> dict[str, tuple[float, float]]:
    """Of ours and of plain torch in the same dtype, both against fp64.

    The hidden states are random, or ``sure`` times the direction of their label's row.
    """
    labels = torch.randint(0, vocab_size, (num_tokens,))
    operands = _operands(num_tokens, hidden, vocab_size, dtype, bias=False)
    if sure:
        operands[0].copy_(sure * functional.normalize(operands[1][labels].double()))
    labels[::5] = IGNORED
    options = {"reduction": reduction, "label_smoothing": 0.0 if sure else 0.1}
    ours = linear_errors(group, operands, labels, options, trained)
    whole = [each.double().requires_grad_() for each in operands[:2]]
    same = [each.detach().clone().requires_grad_() for each in operands[:2]]
    torch.manual_seed(1)
    loss = functional.cross_entropy(functional.linear(*whole), labels, **options)
    own = functional.cross_entropy(functional.linear(*same).float(), labels, **options)
    grad = torch.randn_like(loss)
    expected = torch.autograd.grad(loss, whole, grad)
    actual = torch.autograd.grad(own, same, grad.float())
    limit = {
        "loss": relative_error(own, loss),
        "input": relative_error(actual[0], expected[0]),
        "head": relative_error(actual[1], expected[1]),
    }
    return {key: (value, limit[key.split()[-1]]) for key, value in ours.items()}


LOWER = [torch.float32, torch.bfloat16, torch.float16]
BF16 = torch.bfloat16
PRECISION = [  # dtype, reduction, tokens, size of the hidden states, how sure they are
    *((dtype, "none", 600, 16, 0.0) for dtype in LOWER),  # a tile
    *((dtype, "mean", 1300, 16, 0.0) for dtype in LOWER),  # two
    *((BF16, "mean", 1100, 64, sure) for sure in (3.0, 6.0)),
    # The head's gradient in bf16, and in fp32.
    *((BF16, "mean", *sizes, 0.0) for sizes in ((40, 1), (40, 33), (40, 1030), (1100, 33))),
]


def _assert_within_twice(results: list[dict[str, tuple[float, float]]], floor: float) -> None:
    for errors in results:
        for case, (ours, single) in errors.items():
            assert ours <= max(2 * single, floor), (case, ours, single)


@pytest.mark.parametrize("trained", ["trained", "frozen"])
@pytest.mark.parametrize(("dtype", "reduction", "num_tokens", "hidden", "sure"), PRECISION)
def test_error_of_each_dtype_is_at_most_twice_that_of_one_process(
    dtype, reduction, num_tokens, hidden, sure, trained
):
    floor = 1e-6 if dtype == torch.float32 else 2e-4
    arguments = dtype, trained, reduction, num_tokens, hidden, sure
    _assert_within_twice(on_ranks(2, _errors_of_dtype, *arguments), floor)


@pytest.mark.parametrize("trained", ["trained", "frozen"])
def test_a_rank_may_hold_no_row_of_a_head_in_bf16(trained):
    arguments = BF16, trained, "mean", 40, 16, 0.0, 2
    _assert_within_twice(on_ranks(3, _errors_of_dtype, *arguments), 2e-4)


HOSTILE: dict[str, Callable[..., Any]] = {
    "NaN in a token": lambda x, head, bias, labels: x[1, 0].fill_(NAN),
    "inf in a token": lambda x, head, bias, labels: x[1, 0].fill_(INF),
    # Of an ignored token torch gives NaN, we 0.
    "NaN in a row": lambda x, head, bias, labels: (head[7, 1].fill_(NAN), labels[4].fill_(0)),
    "a masked id": lambda x, head, bias, labels: bias[3].fill_(-INF),
    "a masked shard": lambda x, head, bias, labels: (bias[5:].fill_(-INF), labels.clamp_(max=2)),
    "logits of a thousand": lambda x, head, bias, labels: x.mul_(1000),
    "logits of minus a thousand": lambda x, head, bias, labels: (head.zero_(), bias.sub_(1000)),
    "all ignored": lambda x, head, bias, labels: labels.fill_(IGNORED),
}


def _errors_of_hostile(group: Group, case: str) -> dict[str, float]:
    """Of ten ids, of which rank 0 of two holds five."""
    errors = {}
    for trained, reduction in product(("trained", "frozen"), ("none", "sum", "mean")):
        operands, labels = _operands(6, 3, 10), torch.tensor([0, 4, 5, 9, IGNORED, 7])
        HOSTILE[case](*operands, labels)
        found = linear_errors(group, operands, labels, {"reduction": reduction}, trained)
        errors.update({f"{trained}, {reduction}: {name}": each for name, each in found.items()})
    return errors


@BOTH_PATHS
@pytest.mark.parametrize("case", HOSTILE)
def test_nan_and_infinities_give_what_torch_gives(case, aten):
    assert_within(on_ranks(2, _errors_of_hostile, case, aten=aten))


def _loss(group: Group, trained: bool, **options: Any) -> torch.Tensor:
    """Of 2100 tokens, which are three tiles, and 10 ids, with gradients."""
    input, head, _ = _operands(2100, 3, 10)
    start, stop = own_range(10, group)
    return linear_vocab_cross_entropy(
        input.requires_grad_(),
        head[start:stop].clone().requires_grad_(trained),
        torch.arange(2100) % 10,
        10,
        (start, stop),
        group=group,
        options=LossOptions(**options),
    )


def _messages(group: Group, trained: bool, reduction: str) -> list[dict[str, int]]:
    return counted_both_ways(lambda: _loss(group, trained, reduction=reduction))


@pytest.mark.parametrize(
    ("trained", "reduction", "exchanges"),
    [(False, "mean", 1), (False, "none", 1), (True, "none", 1), (True, "mean", 3)],
)
def test_one_exchange_or_one_for_each_tile_of_a_trained_head(trained, reduction, exchanges):
    """Three numbers a token and the range, and one sum of the input's gradient."""
    gathered = {"all_gather": exchanges, "all_gather_bytes": (2100 * 3 + exchanges * 2) * 8}
    summed = {"all_reduce": 1, "all_reduce_bytes": 2100 * 3 * 8}
    expected = [{**gathered, "in_shared_memory": exchanges}, {**summed, "in_shared_memory": 1}]
    assert on_ranks(2, _messages, trained, reduction) == [expected] * 2


def _bits(group: Group) -> list[bytes]:
    return [
        _loss(group, trained, reduction=reduction, label_smoothing=0.1).detach().numpy().tobytes()
        for trained in (False, True)
        for reduction in ("none", "sum", "mean")
    ]


def test_the_loss_has_the_same_bits_on_every_rank():
    first, *others = on_ranks(3, _bits)
    assert all(other == first for other in others)


@pytest.mark.parametrize("trained", [True, False])
def test_a_backward_without_retained_graph_runs_once(trained):
    loss = _loss(ALONE, trained)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def _allocated_mib(num_tokens: int, trained: bool, dtype: torch.dtype) -> float:
    """The most that forward and backward hold at a time beside the operands."""
    input, head, _ = _operands(num_tokens, 64, 4096, dtype, bias=False)
    input.requires_grad_(), head.requires_grad_(trained)
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    release_workspaces()
    return allocated(
        lambda: linear_vocab_cross_entropy(input, head, labels, 4096, (0, 4096)).backward()
    )


@pytest.mark.parametrize("trained", [True, False])
def test_memory_is_a_tile_and_what_a_token_has_whatever_the_number_of_tokens(trained):
    """A tile is 16 MiB, the head's gradient 1; whole logits would be 64 MiB, then 128."""
    small, large = (_allocated_mib(tokens, trained, torch.float32) for tokens in (4096, 8192))
    assert small <= 22
    assert large - small <= 5  # 1 MiB for each [T, H], of which there are few


def test_the_gradient_of_the_head_is_handed_out_without_a_copy():
    head = torch.randn(10, 3, requires_grad=True)
    labels = torch.tensor([1, 2])
    linear_vocab_cross_entropy(torch.randn(2, 3), head, labels, 10, (0, 10)).backward()
    first, head.grad = head.grad, None
    linear_vocab_cross_entropy(torch.randn(2, 3), head, labels, 10, (0, 10)).backward()
    assert first.data_ptr() != head.grad.data_ptr()
    assert not torch.equal(first, head.grad)


def _held_by_kept_losses(through_statistic: bool) -> float:
    head, labels = torch.randn(4096, 64, requires_grad=True), torch.zeros(8, dtype=torch.int64)
    losses = []

    def backwards() -> None:
        for _ in range(8):
            result = linear_vocab_cross_entropy_statistics(
                torch.randn(8, 64), head, labels, 4096, (0, 4096), log_sum_exp=True
            )
            more = result.log_sum_exp.sum() if through_statistic else 0.0
            (result.loss + more).backward()
            head.grad = None
            losses.append(result.loss)

    release_workspaces()
    return allocated(backwards)


def test_a_kept_loss_keeps_no_gradient_whatever_a_backward_came_through():
    """Eight gradients of the head are 8 MiB."""
    assert _held_by_kept_losses(True) < _held_by_kept_losses(False) + 4


def _misused(group: Group, changed: dict[str, Any]) -> torch.Tensor:
    start, stop = own_range(10, group)
    arguments = {
        "input": torch.zeros(2, 3),
        "head_weight": torch.zeros(stop - start, 3),
        "labels": torch.tensor([1, 9]),
        "vocab_size": 10,
        "vocab_range": (start, stop),
        **changed,
    }
    names = [each.name for each in fields(LossOptions)]
    options = {name: arguments.pop(name) for name in names if name in arguments}
    return linear_vocab_cross_entropy(**arguments, options=LossOptions(**options), group=group)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"labels": torch.tensor([1, 10])}, "IndexError", "label 10 at position 1 is outside the"),
        ({"labels": torch.tensor([1])}, "ValueError", "labels of shape [1] do not fit the 2 tok"),
        (
            {"head_weight": torch.zeros(10, 3)},
            "ValueError",
            "the rows of head_weight hold 10 of the vocabulary, but this rank's shard is [",
        ),
        ({"vocab_range": (0, 11)}, "ValueError", "the shard [0, 11) is not inside [0, 10)"),
        ({"vocab_range": (0, 5)}, "ValueError", "shards begin and end at [0, 5, 0, 5], which is"),
        ({"input": torch.zeros(2, 4)}, "ValueError", "does not fit the local head_weight of shape"),
        ({"bias": torch.zeros(3)}, "ValueError", "bias of shape [3] does not fit the local head_w"),
        (
            {"weight": torch.ones(5)},
            "ValueError",
            "weight of shape [5] does not fit the vocabulary",
        ),
        ({"label_smoothing": 1.0}, "ValueError", "label_smoothing must be in [0, 1), got 1"),
        ({"softcap": 0.0}, "ValueError", "softcap must be a finite number > 0, or None"),
        ({"reduction": "average"}, "ValueError", "reduction must be 'none', 'sum' or 'mean', got"),
    ],
)
def test_bad_arguments_are_named_on_all_ranks(changed, error, text):
    assert_all_raise(_misused, changed, error=error, text=text)
