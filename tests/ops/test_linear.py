"""Linear layers cut by output features (column) and by input features (row)."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    MUTATIONS,
    NOTICED,
    TOLERANCE,
    assert_within,
    counted,
    doubles,
    grad_outputs,
    on_ranks,
    relative_error,
    with_gradients,
    worst,
)
from torch.nn import functional

from parallel_ext.ops import (
    Group,
    column_linear,
    row_linear,
    vocab_cross_entropy,
)
from parallel_ext.sharding.layout import split

FP64 = torch.float64
TOKENS = [(), (2,), (2, 3), (0,), (2, 0)]  # leading dimensions of the input


def _linear_tensors(
    tokens: tuple[int, ...], in_features: int, out_features: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Input, weight and bias; an input of three dimensions is not contiguous."""
    if len(tokens) == 2:
        input = torch.randn(tokens[1], tokens[0], in_features, dtype=dtype).transpose(0, 1)
    else:
        input = torch.randn(*tokens, in_features, dtype=dtype)
    weight = torch.randn(out_features, in_features, dtype=dtype)
    return [input, weight, torch.randn(out_features, dtype=dtype)]


def _own_features(kind: str, weight: torch.Tensor, group: Group, rank: int) -> slice:
    return slice(*split(weight.size(0 if kind == "column" else 1), group.size)[rank])


def _errors_of_one_linear(
    group: Group, kind: str, tensors: list[torch.Tensor], grad: torch.Tensor, mutation: str = "none"
) -> dict[str, float]:
    """Output and gradients of this rank's shard against its part of the unsharded layer's."""
    expected = with_gradients(functional.linear, doubles(tensors), grad.double())
    op_group, rank = MUTATIONS[mutation](group)
    input, weight, *bias = tensors
    held = _own_features(kind, weight, group, rank)
    own = _own_features(kind, weight, group, group.rank)
    if kind == "column":
        local = [input, weight[held], *(part[held] for part in bias)]
        op, local_grad, shares = column_linear, grad[..., held], [(..., own), ..., own, own]
    else:
        local, local_grad = [input[..., held], weight[:, held], *bias], grad
        op, shares = row_linear, [..., (..., own), (..., own), ...]
    actual = with_gradients(lambda *args: op(*args, group=op_group), local, local_grad)
    names = ["output", "input", "weight", "bias"][: len(actual)]
    results = zip(names, actual, expected, shares[: len(actual)], strict=True)
    return {name: relative_error(got, wanted, share) for name, got, wanted, share in results}


def _linear_errors(
    group: Group, kind: str, dtype: torch.dtype, in_features: int, out_features: int
) -> dict[str, float]:
    errors = {}
    for tokens in TOKENS:
        for has_bias in (True, False):
            tensors = _linear_tensors(tokens, in_features, out_features, dtype)[: 2 + has_bias]
            for layout, grad in grad_outputs((*tokens, out_features), dtype).items():
                found = _errors_of_one_linear(group, kind, tensors, grad)
                where = f"tokens {tokens}, bias {has_bias}, gradient {layout}"
                errors.update({f"{where}: {name}": error for name, error in found.items()})
    return errors


COLUMN_AND_ROW = pytest.mark.parametrize("kind", ["column", "row"])


@ALL_SIZES
@COLUMN_AND_ROW
def test_linear_equals_unsharded_when_features_are_not_divisible(kind, size):
    assert_within(on_ranks(size, _linear_errors, kind, FP64, 7, 13))


@pytest.mark.parametrize(
    ("kind", "in_features", "out_features"),
    [("column", 7, 2), ("column", 7, 0), ("column", 0, 5), ("row", 2, 7), ("row", 0, 7)],
)
def test_linear_equals_unsharded_when_ranks_hold_no_feature(kind, in_features, out_features):
    assert_within(on_ranks(3, _linear_errors, kind, FP64, in_features, out_features))


@ALL_DTYPES
@COLUMN_AND_ROW
def test_linear_is_as_accurate_as_its_dtype(kind, dtype):
    assert_within(on_ranks(2, _linear_errors, kind, dtype, 37, 13), TOLERANCE[dtype])


def _mutated_errors(group: Group, kind: str, mutation: str) -> dict[str, float]:
    tensors, grad = _linear_tensors((3,), 8, 8, FP64), torch.randn(3, 8, dtype=FP64)
    return _errors_of_one_linear(group, kind, tensors, grad, mutation)


@COLUMN_AND_ROW
def test_linear_comparison_notices_broken_layers(kind):
    assert worst(on_ranks(2, _mutated_errors, kind, "none"))[0] <= TOLERANCE[FP64]
    for mutation in ("no exchange", "swapped shards"):
        assert worst(on_ranks(2, _mutated_errors, kind, mutation))[0] > NOTICED, mutation


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("out_features", [5, 0])
@pytest.mark.parametrize("dtype", [FP64, torch.bfloat16])
def test_column_linear_lays_rows_as_far_apart_as_asked(dtype, tokens, out_features):
    tensors = _linear_tensors(tokens, 7, out_features, dtype)
    padded = column_linear(*tensors, row_stride=8)
    assert torch.equal(padded, column_linear(*tensors))
    if len(tokens) == 2:
        assert padded.stride() == (8 * max(1, tokens[1]), 8, 1)
    if len(tokens) == 1:
        assert padded.stride() == (8, 1)


def _padded_logits(kind: str) -> torch.Tensor:
    logits = column_linear(*_linear_tensors((600,), 7, 33, torch.bfloat16), row_stride=64)
    if kind == "logits":
        return logits
    logits.detach_().requires_grad_()
    loss = vocab_cross_entropy(logits, torch.arange(600) % 33, 33, (0, 33))
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("kind", ["logits", "their gradient"])
def test_the_gap_between_rows_of_bf16_is_filled(kind):
    """oneDNN's GEMMs of CPUs with AMX read it, and a NaN there is one in their product."""
    used = [torch.full([600, 64], float("nan"), dtype=torch.bfloat16) for _ in range(8)]
    del used  # its memory is what the next tensors get
    rows = _padded_logits(kind)
    assert rows.stride() == (64, 1)
    assert (rows.as_strided([599, 31], [64, 1], 33) == 0).all()
    assert torch.isfinite(rows @ torch.ones(33, 16, dtype=torch.bfloat16)).all()


@COLUMN_AND_ROW
def test_the_gap_between_the_rows_of_a_gradient_is_never_read(kind):
    op = column_linear if kind == "column" else row_linear
    tensors = _linear_tensors((2, 3), 7, 5, FP64)
    gradient = torch.full((2, 3, 8), float("nan"), dtype=FP64)[..., :5].copy_(torch.randn(2, 3, 5))
    with_gap = with_gradients(op, tensors, gradient)
    without = with_gradients(op, tensors, gradient.contiguous())
    assert max(map(relative_error, with_gap, without)) <= TOLERANCE[FP64]


AUTOCAST_DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("input_dtype", "weight_dtype"), AUTOCAST_DTYPES)
@pytest.mark.parametrize("op", [column_linear, row_linear])
def test_autocast_gives_the_dtypes_of_torchs_linear(op, input_dtype, weight_dtype, lower):
    input, weight, bias = _linear_tensors((2, 3), 7, 5, torch.float32)
    tensors = [input.to(input_dtype), weight.to(weight_dtype), bias.to(weight_dtype)]
    results = []
    for linear in (functional.linear, op):
        with torch.autocast("cpu", dtype=lower):
            results.append(with_gradients(linear, tensors, torch.ones(2, 3, 5)))
    expected, actual = results
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert max(map(relative_error, actual, expected)) <= TOLERANCE[lower]


def _autocast_sums_in_the_lower_precision(group: Group) -> tuple[torch.dtype, int]:
    input, weight, _ = _linear_tensors((3,), 8, 4, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, counts = counted(lambda: row_linear(input, weight, group=group))
    return output.dtype, counts["all_reduce_bytes"]


def test_autocast_sends_half_the_bytes():
    results = on_ranks(2, _autocast_sums_in_the_lower_precision)
    assert results == [(torch.bfloat16, 3 * 4 * 2)] * 2


FROZEN = {"input": 0, "weight": 1, "bias": 2}


def _sums_beside_a_frozen_tensor(group: Group, kind: str, frozen: str) -> int:
    """How many sums over the ranks a backward takes."""
    op = column_linear if kind == "column" else row_linear
    tensors = _linear_tensors((3,), 4, 4, FP64)
    for place, tensor in enumerate(tensors):
        tensor.requires_grad_(place != FROZEN[frozen])
    _, counts = counted(op(*tensors, group=group).sum().backward)
    return counts.get("all_reduce", 0)


@COLUMN_AND_ROW
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_backward_sums_the_gradient_of_a_columns_input_alone(kind, frozen):
    sums = int(kind == "column" and frozen != "input")
    assert on_ranks(2, _sums_beside_a_frozen_tensor, kind, frozen) == [sums] * 2
