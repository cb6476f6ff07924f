"""The cross entropy of logits that are cut by vocabulary."""

from __future__ import annotations

import pytest
import torch
from reference_loss import FP64, IGNORED, NAN, labels_of, special_logits
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    BOTH_PATHS,
    MUTATIONS,
    NOTICED,
    TOLERANCE,
    assert_within,
    data_bytes,
    grad_outputs,
    on_ranks,
    own_range,
    relative_error,
    threads,
    wide_type,
    with_gradients,
    worst,
)
from torch.nn import functional

from parallel_ext.ops import Group, LossOptions, vocab_cross_entropy
from parallel_ext.sharding.layout import split


def _errors_of_one_loss(
    group: Group,
    logits: torch.Tensor,
    labels: torch.Tensor,
    grad: torch.Tensor,
    reduction: str,
    ignore_index: int = IGNORED,
    mutation: str = "none",
) -> dict[str, float]:
    """Loss and gradient of this rank's columns against those of torch on all columns.

    The loss, which is finer than the logits, is scaled so that the logits' tolerance bounds both.
    """
    expected_loss, expected_grad = with_gradients(
        lambda logits: functional.cross_entropy(
            logits, labels, reduction=reduction, ignore_index=ignore_index
        ),
        [logits.double()],
        grad,
    )
    op_group, rank = MUTATIONS[mutation](group)
    own = own_range(logits.size(1), group)
    loss, grad_logits = with_gradients(
        lambda columns: vocab_cross_entropy(
            columns,
            labels,
            logits.size(1),
            own,
            options=LossOptions(reduction=reduction, ignore_index=ignore_index),
            group=op_group,
        ),
        [logits[:, slice(*split(logits.size(1), group.size)[rank])]],
        grad,
    )
    assert loss.dtype == wide_type(logits.dtype)
    assert grad_logits.dtype == logits.dtype
    finer = TOLERANCE[logits.dtype] / TOLERANCE[loss.dtype]
    return {
        "loss": relative_error(loss, expected_loss) * finer,
        "gradient": relative_error(grad_logits, expected_grad, (..., slice(*own))),
    }


def _loss_grads(reduction: str, num_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if reduction == "none":
        return grad_outputs((num_tokens,), dtype)
    return {"scalar": torch.tensor(-1.7, dtype=dtype)}


def _loss_errors(
    group: Group,
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = IGNORED,
    mutation: str = "none",
) -> dict[str, float]:
    """The errors for all reductions."""
    errors = {}
    for reduction in ("none", "sum", "mean"):
        grads = _loss_grads(reduction, logits.size(0), wide_type(logits.dtype))
        for layout, grad in grads.items():
            found = _errors_of_one_loss(
                group, logits, labels, grad, reduction, ignore_index, mutation
            )
            errors.update({f"{reduction}, {layout}: {name}": e for name, e in found.items()})
    return errors


def _errors_of_random_logits(
    group: Group, vocab_size: int, dtype: torch.dtype, mutation: str = "none"
) -> dict[str, float]:
    labels = labels_of(vocab_size)
    logits = (3 * torch.randn(len(labels), vocab_size, dtype=FP64)).to(dtype)
    return _loss_errors(group, logits, labels, mutation=mutation)


@BOTH_PATHS
@ALL_SIZES
@pytest.mark.parametrize("vocab_size", [1, 101])
def test_loss_and_gradient_equal_unsharded_when_vocab_not_divisible(vocab_size, size, aten):
    assert_within(on_ranks(size, _errors_of_random_logits, vocab_size, FP64, aten=aten))


@BOTH_PATHS
@ALL_DTYPES
def test_loss_is_fp32_and_the_gradient_as_accurate_as_its_dtype(dtype, aten):
    assert_within(on_ranks(2, _errors_of_random_logits, 65535, dtype, aten=aten), TOLERANCE[dtype])


def test_the_comparison_notices_a_broken_loss():
    assert worst(on_ranks(2, _errors_of_random_logits, 128, FP64, "none"))[0] <= TOLERANCE[FP64]
    assert worst(on_ranks(2, _errors_of_random_logits, 128, FP64, "swapped shards"))[0] > NOTICED


def _errors_of_shifted_logits(group: Group, dtype: torch.dtype, shift: float) -> dict[str, float]:
    labels = labels_of(101)
    logits = (8 * torch.randn(len(labels), 101, dtype=FP64) + shift).to(dtype)
    return _loss_errors(group, logits, labels)


@BOTH_PATHS
@pytest.mark.parametrize("shift", [-1000.0, 1e30])
def test_accuracy_does_not_depend_on_a_shift_of_the_logits(shift, aten):
    """As torch's: the softmax subtracts the maximum first. At 1e30 all logits are equal."""
    dtype = torch.float32
    assert_within(on_ranks(2, _errors_of_shifted_logits, dtype, shift, aten=aten), TOLERANCE[dtype])


def _errors_of_ignored_tokens(group: Group, ignore_index: int) -> dict[str, float]:
    some_ignored = labels_of(9).masked_fill(labels_of(9) == IGNORED, ignore_index)
    ignored_labels = {"some": some_ignored, "all": torch.full_like(some_ignored, ignore_index)}
    logits, errors = torch.randn(len(some_ignored), 9, dtype=FP64), {}
    for ignored, labels in ignored_labels.items():
        found = _loss_errors(group, logits, labels, ignore_index)
        errors.update({f"{ignored} ignored, {case}": error for case, error in found.items()})
    return errors


@BOTH_PATHS
@pytest.mark.parametrize("ignore_index", [IGNORED, -1, 3, 9, -(2**63)])
def test_ignored_tokens_are_as_in_torch(ignore_index, aten):
    """Also inside the vocabulary, just past it, and when nothing is left to average."""
    assert_within(on_ranks(3, _errors_of_ignored_tokens, ignore_index, aten=aten))


def _errors_of_special_logits(group: Group, dtype: torch.dtype) -> dict[str, float]:
    """Each row on its own, so that no NaN hides another."""
    return {
        f"row {row}, {case}": error
        for row, (logits, label) in enumerate(zip(*special_logits(dtype), strict=True))
        for case, error in _loss_errors(group, logits[None], label[None]).items()
    }


@BOTH_PATHS
@pytest.mark.parametrize(
    ("dtype", "size"), [(FP64, 1), (torch.float32, 2), (torch.bfloat16, 2), (FP64, 3)]
)
def test_nan_and_infinite_logits_give_what_torch_gives(dtype, size, aten):
    assert_within(on_ranks(size, _errors_of_special_logits, dtype, aten=aten), TOLERANCE[dtype])


@BOTH_PATHS
def test_ignored_tokens_hide_nan_logits(aten):
    """Better than torch, whose gradient is NaN there: padding may hold anything."""
    logits, labels = torch.randn(3, 4, dtype=FP64), torch.tensor([1, IGNORED, 3])
    logits[1] = NAN
    kept = [0, 2]
    with_nan, without = (
        with_gradients(
            lambda columns, labels=labels: vocab_cross_entropy(columns, labels, 4, (0, 4)),
            [logits],
            torch.ones(()),
        )
        for logits, labels in ((logits, labels), (logits[kept], labels[kept]))
    )
    assert torch.equal(with_nan[0], without[0])
    assert torch.equal(with_nan[1][kept], without[1])
    assert with_nan[1][1].tolist() == [0.0] * 4


def _layouts_of_logits(num_tokens: int, vocab_size: int) -> dict[str, torch.Tensor]:
    padded = torch.full((num_tokens, vocab_size + 3), NAN, dtype=FP64)
    padded[:, :vocab_size] = torch.randn(num_tokens, vocab_size, dtype=FP64)
    every_second = torch.randn(num_tokens, vocab_size, 2, dtype=FP64)
    return {
        "rows apart": padded[:, :vocab_size],
        "columns apart": every_second[:, :, 0],
        "transposed": torch.randn(vocab_size, num_tokens, dtype=FP64).mT,
        "stride 0": torch.randn(vocab_size, dtype=FP64).expand(num_tokens, vocab_size),
    }


def _errors_of_layouts(group: Group, vocab_size: int) -> dict[str, float]:
    errors, labels = {}, labels_of(vocab_size)
    for layout, logits in _layouts_of_logits(len(labels), vocab_size).items():
        for tokens in (len(labels), 1, 0):
            found = _loss_errors(group, logits[:tokens], labels[:tokens])
            errors.update({f"{layout}, T={tokens}, {case}": e for case, e in found.items()})
    labels_apart = torch.stack([labels, labels], 1)[:, 0]
    found = _loss_errors(group, torch.randn(len(labels), vocab_size, dtype=FP64), labels_apart)
    return {**errors, **{f"labels apart, {case}": error for case, error in found.items()}}


@BOTH_PATHS
@pytest.mark.parametrize("vocab_size", [1, 9])
def test_logits_of_any_memory_layout_and_no_tokens_at_all(vocab_size, aten):
    assert_within(on_ranks(2, _errors_of_layouts, vocab_size, aten=aten))


def _loss_of_rows_apart(
    group: Group, vocab_size: int, gap: int, filling: float, dtype: torch.dtype
) -> tuple[list[bytes], tuple[int, ...]]:
    """Bits of the loss and of the gradient, and the gradient's strides."""
    start, stop = own_range(vocab_size, group)
    labels = labels_of(vocab_size)
    buffer = torch.full((len(labels), stop - start + gap), filling, dtype=dtype)
    columns = buffer[:, : stop - start]
    columns.copy_(torch.randn(len(labels), vocab_size)[:, start:stop])
    results = with_gradients(
        lambda columns: vocab_cross_entropy(
            columns, labels, vocab_size, (start, stop), group=group
        ),
        [columns],
        torch.ones(()),
    )
    return [data_bytes(result) for result in results], results[1].stride()


@BOTH_PATHS
@ALL_DTYPES
def test_what_lies_between_the_rows_is_never_read(dtype, aten):
    plain = on_ranks(2, _loss_of_rows_apart, 131, 0, 0.0, dtype, aten=aten)
    apart = on_ranks(2, _loss_of_rows_apart, 131, 5, NAN, dtype, aten=aten)
    assert [bits for bits, _ in apart] == [bits for bits, _ in plain]
    assert [strides for _, strides in apart] == [(66 + 5, 1), (65 + 5, 1)]


@BOTH_PATHS
@ALL_DTYPES
def test_the_loss_has_the_same_bits_on_every_rank(dtype, aten):
    results = on_ranks(3, _loss_of_rows_apart, 1001, 0, 0.0, dtype, aten=aten)
    assert len({bits[0] for bits, _ in results}) == 1
    assert len({bits[1] for bits, _ in results}) == 3


def _bits_with_threads(
    count: int, seed: int, shape: tuple[int, int], dtype: torch.dtype, reduction: str
) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator, dtype=FP64).to(dtype)
    labels = torch.randint(0, shape[1], shape[:1], generator=generator)
    with threads(count):
        results = with_gradients(
            lambda columns: vocab_cross_entropy(
                columns, labels, shape[1], (0, shape[1]), options=LossOptions(reduction=reduction)
            ),
            [logits],
            torch.ones(()),
        )
    return b"".join(map(data_bytes, results))


@ALL_DTYPES
@pytest.mark.parametrize("shape", [(67, 5003), (1, 70001)])
def test_the_bits_do_not_depend_on_the_number_of_threads(shape, dtype):
    one, two = (_bits_with_threads(count, 0, shape, dtype, "mean") for count in (1, 2))
    assert one == two


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_sum_over_more_tokens_than_one_thread_takes_has_the_same_bits(reduction):
    """fp64 shows the order of the additions, which the cast to fp32 would hide."""
    for seed in range(8):
        one, two = (
            _bits_with_threads(count, seed, (40_000, 2), FP64, reduction) for count in (1, 2)
        )
        assert one == two, f"seed {seed}"
