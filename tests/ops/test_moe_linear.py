"""The product of each expert with the rows that are its own."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    TOLERANCE,
    grad_outputs,
    relative_error,
    with_gradients,
)

from parallel_ext.ops import moe_linear

FP64 = torch.float64
COUNTS = pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0], [5], [1, 1, 1, 1]], ids=str)


def _plain(rows: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = rows.split(counts)
    return torch.cat([part @ own.T for part, own in zip(parts, weight, strict=True)])


def _tensors(counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(sum(counts), 7).to(dtype), torch.randn(len(counts), 4, 7).to(dtype)]


def _ours(
    tensors: list[torch.Tensor], counts: list[int], grad: torch.Tensor, *scale: float
) -> list[torch.Tensor]:
    """Output and gradients of rows and weight, in memory that held NaN."""
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        return with_gradients(lambda r, w: moe_linear(r, w, counts, *scale), tensors, grad)
    finally:
        torch.use_deterministic_algorithms(False)


@COUNTS
@ALL_DTYPES
def test_products_equal_those_of_each_and_the_scale_is_of_the_weights_gradient(dtype, counts):
    tensors = _tensors(counts, dtype)
    wide = [tensor.double() for tensor in tensors]
    for layout, grad in grad_outputs((sum(counts), 4), dtype).items():
        expected = with_gradients(lambda r, w: _plain(r, w, counts), wide, grad.double())
        for scale in (1 / 3, 1.0, 5.0):
            actual = _ours(tensors, counts, grad, scale)
            scaled = [*expected[:2], scale * expected[2]]
            for ours, theirs in zip(actual, scaled, strict=True):
                assert relative_error(ours, theirs) <= TOLERANCE[dtype], (layout, scale)
            idle = [expert for expert, count in enumerate(counts) if not count]
            assert not actual[2][idle].any(), (layout, scale)


@COUNTS
@ALL_DTYPES
def test_a_scale_of_two_to_a_power_is_exact(dtype, counts):
    tensors, grad = _tensors(counts, dtype), torch.randn(sum(counts), 4).to(dtype)
    plain = _ours(tensors, counts, grad)
    assert all(map(torch.equal, _ours(tensors, counts, grad, 1.0), plain))
    scaled = _ours(tensors, counts, grad, 0.25)
    assert all(map(torch.equal, scaled, [*plain[:2], 0.25 * plain[2]]))
