"""The options of the cross entropy on shards, alone and together, and its statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import (
    ALONE,
    FP64,
    IGNORED,
    INF,
    NAN,
    OPTIONS_ON_RANKS,
    RANDOM_OPTIONS,
    dense_statistics,
    labels_of,
    options_named,
    random_call,
    special_logits,
    statistics_errors,
)
from reference_ops import (
    ALL_SIZES,
    BOTH_PATHS,
    NOTICED,
    TOLERANCE,
    assert_within,
    on_ranks,
    own_range,
    relative_error,
    worst,
)

from parallel_ext.ops import Group, LossOptions, vocab_cross_entropy_statistics


def _errors_of_one_option(
    group: Group, name: str, vocab_sizes: list[int], mutation: str = "none"
) -> dict[str, float]:
    errors = {}
    for vocab_size in vocab_sizes:
        labels = labels_of(vocab_size)
        logits = 3 * torch.randn(len(labels), vocab_size, dtype=FP64)
        for reduction in ("none", "sum", "mean"):
            options = {**options_named(name, vocab_size), "reduction": reduction}
            found = statistics_errors(group, logits, labels, options, mutation)
            errors.update({f"V={vocab_size} {reduction}: {k}": v for k, v in found.items()})
    return errors


@OPTIONS_ON_RANKS
def test_each_option_equals_unsharded_also_with_empty_shards(name, size, aten):
    """1 on 2, 5 on 4, 65 on 3, and more blocks of columns than one."""
    assert_within(on_ranks(size, _errors_of_one_option, name, [1, 5, 65, 9001], aten=aten))


@pytest.mark.parametrize("name", ALONE)
def test_the_comparison_notices_a_broken_option(name):
    assert worst(on_ranks(2, _errors_of_one_option, name, [128], "swapped shards"))[0] > NOTICED


def _errors_of_random_options(
    group: Group, seed: int, num_tokens: int, vocab_size: int, options: dict[str, Any]
) -> dict[str, float]:
    torch.manual_seed(seed)
    labels, options = random_call(num_tokens, vocab_size, options)
    logits = 3 * torch.randn(num_tokens, vocab_size, dtype=FP64)
    return statistics_errors(group, logits, labels, options)


@given(
    size=st.integers(1, 4),
    aten=st.booleans(),
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 9),
    vocab_size=st.sampled_from([1, 2, 3, 5, 10, 65, 127, 3001]),
    options=RANDOM_OPTIONS,
)
@settings(max_examples=100)
def test_random_combinations_of_options_equal_unsharded(
    size, aten, seed, num_tokens, vocab_size, options
):
    assert_within(
        on_ranks(size, _errors_of_random_options, seed, num_tokens, vocab_size, options, aten=aten)
    )


def _loss_errors_of_scale(group: Group, dtype: torch.dtype, scale: float) -> dict[str, float]:
    """Of loss and log-sum-exp alone, by the same rounded logits."""
    errors, labels = {}, labels_of(5001)
    logits = (scale * torch.randn(len(labels), 5001, dtype=FP64)).to(dtype)
    start, stop = own_range(5001, group)
    for name in ALONE:
        for reduction in ("none", "sum", "mean"):
            options = {**options_named(name, 5001), "reduction": reduction}
            expected = dense_statistics(logits.double(), labels, **options)
            actual = vocab_cross_entropy_statistics(
                logits[:, start:stop],
                labels,
                5001,
                (start, stop),
                log_sum_exp=True,
                group=group,
                options=LossOptions(**options),
            )
            for value, reference, of in zip(actual[:2], expected[:2], ("loss", "lse"), strict=True):
                errors[f"{name} {reduction}: {of}"] = relative_error(value, reference)
    return errors


@BOTH_PATHS
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_is_within_1e_6_of_fp64_whatever_the_dtype(dtype, scale, aten):
    assert_within(on_ranks(2, _loss_errors_of_scale, dtype, scale, aten=aten), 1e-6)


def _errors_of_dtype(group: Group, dtype: torch.dtype) -> dict[str, float]:
    errors, labels = {}, labels_of(4999)
    logits = (3 * torch.randn(len(labels), 4999, dtype=FP64)).to(dtype)
    for name in ALONE:
        options = {**options_named(name, 4999), "reduction": "none"}
        found = statistics_errors(group, logits, labels, options)
        errors.update({f"{name}: {case}": error for case, error in found.items()})
    return errors


@BOTH_PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_options_are_as_accurate_as_the_dtype(dtype, aten):
    assert_within(on_ranks(2, _errors_of_dtype, dtype, aten=aten), TOLERANCE[dtype])


# Special values beside the options that read every logit, class weights of 0 among them.
SPECIAL_OPTIONS: dict[str, dict[str, Any]] = {
    "weight": {"weight": torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0] * 2)},
    "label_smoothing": {"label_smoothing": 0.1},
    "both": {"label_smoothing": 0.1, "weight": torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0] * 2)},
    "logit_scale": {"logit_scale": 2.0, "z_loss": 0.1},
    "softcap": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1},
}


def _errors_of_special_logits(
    group: Group, dtype: torch.dtype, options: dict[str, Any]
) -> dict[str, float]:
    """Loss, log-sum-exp, arg-max and the loss' gradient of each row on its own.

    Against torch in the same dtype, whose sums overflow where ours do.
    """
    errors, own = {}, own_range(10, group)
    for row, (logits, label) in enumerate(zip(*special_logits(dtype), strict=True)):
        whole = logits[None].clone().requires_grad_()
        columns = logits[None, slice(*own)].detach().requires_grad_()
        expected = dense_statistics(whole, label[None], **options)
        actual = vocab_cross_entropy_statistics(
            columns,
            label[None],
            10,
            own,
            log_sum_exp=True,
            argmax=True,
            group=group,
            options=LossOptions(**options),
        )
        (expected_grad,) = torch.autograd.grad(expected.loss, whole)
        (grad,) = torch.autograd.grad(actual.loss, columns)
        errors[f"row {row}: loss"] = relative_error(actual.loss, expected.loss)
        errors[f"row {row}: lse"] = relative_error(actual.log_sum_exp, expected.log_sum_exp)
        errors[f"row {row}: gradient"] = relative_error(grad, expected_grad, (..., slice(*own)))
        if "softcap" not in options:  # which makes large logits equal, in fp32 sooner than in fp64
            errors[f"row {row}: argmax"] = abs(actual.argmax - expected.argmax).item()
    return errors


@BOTH_PATHS
@pytest.mark.parametrize("dtype", [FP64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SPECIAL_OPTIONS)
def test_nan_and_infinite_logits_with_options_give_what_torch_gives(name, dtype, aten):
    results = on_ranks(2, _errors_of_special_logits, dtype, SPECIAL_OPTIONS[name], aten=aten)
    assert_within(results, TOLERANCE[dtype])


def _argmax_of(group: Group, logits: torch.Tensor) -> list[int]:
    start, stop = own_range(logits.size(1), group)
    labels = torch.full((logits.size(0),), IGNORED)
    return vocab_cross_entropy_statistics(
        logits[:, start:stop], labels, logits.size(1), (start, stop), argmax=True, group=group
    ).argmax.tolist()


@BOTH_PATHS
@ALL_SIZES
def test_ties_go_to_the_lowest_id(size, aten):
    logits = torch.zeros(6, 9001)
    logits[0, [70, 8000]] = 1.0
    logits[1, [8000, 9000]] = 1.0
    logits[2] = -INF
    logits[3, 100:] = -INF
    logits[4, [5000, 8000]] = NAN
    logits[5, [4000, 8000]] = INF
    ids = on_ranks(size, _argmax_of, logits, aten=aten)
    assert ids == [[70, 8000, 0, 0, 5000, 4000]] * size
