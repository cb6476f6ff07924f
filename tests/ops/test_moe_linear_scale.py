"""The scale of the gradient of the experts' weights."""

from __future__ import annotations

import pytest
import torch
from reference_ops import ALL_DTYPES, TOLERANCE, grad_outputs, relative_error

from parallel_ext.ops import moe_linear

FP64 = torch.float64


def _gradients(
    tensors: list[torch.Tensor], counts: list[int], grad: torch.Tensor, *scale: float
) -> list[torch.Tensor]:
    """Output and gradients of rows and weight, in memory that held NaN."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        output = moe_linear(*leaves, counts, *scale)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
    finally:
        torch.use_deterministic_algorithms(False)


COUNTS = pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0], [5], [1, 1, 1, 1]], ids=str)


@COUNTS
@pytest.mark.parametrize("scale", [1 / 3, 1.0, 5.0])
@ALL_DTYPES
def test_the_scale_multiplies_the_gradient_of_the_weight_alone(dtype, scale, counts):
    rows, weight = (
        torch.randn(sum(counts), 7, dtype=dtype),
        torch.randn(len(counts), 4, 7).to(dtype),
    )
    for layout, grad in grad_outputs((sum(counts), 4), dtype).items():
        output, grad_rows, grad_weight = _gradients([rows, weight], counts, grad, scale)
        wide = _gradients([rows.double(), weight.double()], counts, grad.double())
        assert relative_error(output, wide[0]) <= TOLERANCE[dtype], layout
        assert relative_error(grad_rows, wide[1]) <= TOLERANCE[dtype], layout
        assert relative_error(grad_weight, scale * wide[2]) <= TOLERANCE[dtype], layout
        for expert, count in enumerate(counts):
            assert count or not grad_weight[expert].any(), layout


@COUNTS
@ALL_DTYPES
def test_a_scale_of_two_to_a_power_is_exact(dtype, counts):
    tensors = [torch.randn(sum(counts), 7).to(dtype), torch.randn(len(counts), 4, 7).to(dtype)]
    grad = torch.randn(sum(counts), 4).to(dtype)
    plain = _gradients(tensors, counts, grad)
    assert all(map(torch.equal, _gradients(tensors, counts, grad, 1.0), plain))
    scaled = _gradients(tensors, counts, grad, 0.25)
    assert all(map(torch.equal, scaled, [*plain[:2], 0.25 * plain[2]]))


def test_products_with_a_scale_pass_gradcheck():
    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The weight, with half its gradient, which the scale makes whole again.
        same = 0.5 * weight + (0.5 * weight).detach()
        return moe_linear(rows, same, [2, 0, 3], 2.0)

    rows = torch.randn(5, 3, dtype=FP64, requires_grad=True)
    weight = torch.randn(3, 2, 3, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradcheck(product, (rows, weight))
