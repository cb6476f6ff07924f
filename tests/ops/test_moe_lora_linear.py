"""A linear layer of each expert with its low-rank adapter, on the rows that are its own."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    NOTICED,
    TOLERANCE,
    grad_outputs,
    relative_error,
)

from parallel_ext.ops import moe_lora_linear

FP64 = torch.float64
SCALE = 0.75
NAMES = ["output", "rows", "weight", "lora_a", "lora_b"]


def _plain(
    rows: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    counts: list[int],
) -> torch.Tensor:
    """What PEFT makes of it: the product with the changed weight of each expert."""
    changed = weight + SCALE * torch.einsum("eor,eri->eoi", lora_b, lora_a)
    return torch.cat([x @ w.T for x, w in zip(rows.split(counts), changed, strict=True)])


def _tensors(
    counts: list[int], r: int, dtype: torch.dtype, factors: torch.dtype
) -> list[torch.Tensor]:
    """Rows, weight, lora_a, lora_b; the factors as strided as PEFT's layout makes them."""
    experts = len(counts)
    return [
        torch.randn(sum(counts), 7).to(dtype),
        torch.randn(experts, 4, 7).to(dtype),
        torch.randn(experts, r, 7).to(factors),
        torch.randn(4, r, experts).to(factors).permute(2, 0, 1),
    ]


def _ours(
    tensors: list[torch.Tensor], counts: list[int], grad: torch.Tensor, grad_scale: float = 1.0
) -> list[torch.Tensor]:
    """Output and all gradients, in memory that held NaN."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        output = moe_lora_linear(*leaves, counts, scale=SCALE, weight_grad_scale=grad_scale)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]
    finally:
        torch.use_deterministic_algorithms(False)


def _in_its_dtype(
    tensors: list[torch.Tensor], counts: list[int], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The same by plain torch, product by product, rounded each time to the dtype of the rows."""
    leaves = [tensor.detach().to(grad.dtype).requires_grad_() for tensor in tensors]
    rows, *of_experts = leaves
    output = torch.cat(
        [
            x @ w.T + SCALE * ((x @ a.T) @ b.T)
            for x, w, a, b in zip(rows.split(counts), *of_experts, strict=True)
        ]
    )
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def _expected(
    tensors: list[torch.Tensor], counts: list[int], grad: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    output = _plain(*leaves, counts)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]


@pytest.mark.parametrize("factors", ["of the base", "fp32"])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0], [5], [1, 1, 1, 1]], ids=str)
@ALL_DTYPES
def test_products_and_gradients_are_those_of_the_changed_weights(dtype, counts, factors):
    low = torch.float32 if factors == "fp32" else dtype
    for r in (1, 9):
        tensors = _tensors(counts, r, dtype, low)
        for layout, grad in grad_outputs((sum(counts), 4), dtype).items():
            expected = _expected(tensors, counts, grad)
            rounded = _in_its_dtype(tensors, counts, grad)
            for name, ours, theirs, own in zip(
                NAMES, _ours(tensors, counts, grad), expected, rounded, strict=True
            ):
                assert ours.dtype == (low if name.startswith("lora") else dtype), name
                # A sum whose terms cancel is far from its true value in plain torch, too.
                tolerance = max(TOLERANCE[dtype], TOLERANCE[ours.dtype])
                tolerance = max(tolerance, 2 * relative_error(own, theirs))
                assert relative_error(ours, theirs) <= tolerance, (name, layout, r)


@pytest.mark.parametrize("grad_scale", [1 / 3, 5.0])
def test_the_scale_multiplies_the_gradients_of_weight_and_factors_alone(grad_scale):
    counts = [2, 0, 3]
    tensors, grad = _tensors(counts, 3, FP64, FP64), torch.randn(5, 4, dtype=FP64)
    expected = _expected(tensors, counts, grad)
    for name, ours, theirs in zip(
        NAMES, _ours(tensors, counts, grad, grad_scale), expected, strict=True
    ):
        wanted = theirs if name in ("output", "rows") else grad_scale * theirs
        assert relative_error(ours, wanted) <= 1e-10, name


def test_an_expert_without_rows_has_gradients_of_zero():
    tensors = _tensors([2, 0], 3, FP64, FP64)
    _, _, *gradients = _ours(tensors, [2, 0], torch.ones(2, 4, dtype=FP64))
    for gradient in gradients:
        assert gradient[0].any()
        assert not gradient[1].any()


def test_the_comparison_notices_factors_of_another_expert():
    counts, grad = [2, 3], torch.randn(5, 4, dtype=FP64)
    tensors = _tensors(counts, 2, FP64, FP64)
    swapped = [*tensors[:3], tensors[3].flip(0)]
    expected = _expected(tensors, counts, grad)
    errors = map(relative_error, _ours(swapped, counts, grad), expected)
    assert dict(zip(NAMES, errors, strict=True))["output"] > NOTICED
