"""The products of all experts in one call, as on GPUs for which torch has grouped products."""

from __future__ import annotations

import pytest
import torch
from reference_ops import TOLERANCE, aten_path, relative_error
from torch.profiler import ProfilerActivity, profile

from parallel_ext.ops import moe_linear

BF16 = torch.bfloat16
IN, OUT = 16, 24


def _measured(
    rows: torch.Tensor,
    weight: torch.Tensor,
    counts: list[int] | torch.Tensor,
    scale: float,
    grad: torch.Tensor,
) -> tuple[list[torch.Tensor], int]:
    """Return output and gradients on a GPU's path, in memory that held NaN; and grouped calls."""
    leaves = [rows.detach().requires_grad_(), weight.detach().requires_grad_()]
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        with aten_path(True), profile(activities=[ProfilerActivity.CPU]) as recorded:
            output = moe_linear(*leaves, counts, scale)
            gradients = torch.autograd.grad(output, leaves, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    calls = sum(event.name == "aten::_grouped_mm" for event in recorded.events())
    return [output.detach(), *gradients], calls


def _tensors(counts: list[int], dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    shapes = (sum(counts), IN), (len(counts), OUT, IN), (sum(counts), OUT)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("counts", [[3, 0, 4], [5], [0, 0, 9, 0], [1] * 5], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_products_of_all_experts_are_three_calls(counts: list[int], scale: float) -> None:
    rows, weight, grad = _tensors(counts)
    actual, calls = _measured(rows, weight, counts, scale, grad)
    wide = (each.double() for each in (rows, weight))
    expected, _ = _measured(*wide, counts, scale, grad.double())
    assert calls == 3
    for ours, truth in zip(actual, expected, strict=True):
        assert relative_error(ours, truth) <= TOLERANCE[BF16]
    idle = [expert for expert, count in enumerate(counts) if not count]
    assert not actual[2][idle].any()


@pytest.mark.parametrize("counts", [[3, 0, 4], [5], [0, 0, 9, 0]], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_counts_on_the_device_are_those_on_the_host(counts: list[int], dtype: torch.dtype) -> None:
    rows, weight, grad = _tensors(counts, dtype)
    expected, calls = _measured(rows, weight, counts, 0.25, grad)
    actual, same_calls = _measured(rows, weight, torch.tensor(counts), 0.25, grad)
    assert same_calls == calls
    assert all(map(torch.equal, actual, expected))


def test_experts_are_not_mixed_up() -> None:
    counts = [2, 3]
    rows, weight, grad = _tensors(counts)
    actual, _ = _measured(rows, weight, counts, 1.0, grad)
    swapped, _ = _measured(rows, weight, counts[::-1], 1.0, grad)
    assert all(relative_error(a, b) > 0.1 for a, b in zip(actual, swapped, strict=True))


def test_what_torch_has_no_grouped_product_for_is_computed_expert_by_expert() -> None:
    counts = [3, 0, 4]
    rows, weight, grad = _tensors(counts)
    odd = rows[:, :-1].contiguous(), weight[..., :-1].contiguous(), grad
    unaligned = torch.cat([rows.flatten()[:1], rows.flatten()])[1:].view(rows.shape), weight, grad
    narrow = rows, weight[:, :-1].contiguous(), grad[:, :-1].contiguous()
    wide = [each.float() for each in (rows, weight, grad)]
    for case in (odd, unaligned, narrow, wide):
        truth, _ = _measured(*(e.double() for e in case[:2]), counts, 1.0, case[2].double())
        actual, calls = _measured(*case[:2], counts, 1.0, case[2])
        assert calls == 0
        for ours, exact in zip(actual, truth, strict=True):
            assert relative_error(ours, exact) <= TOLERANCE[case[0].dtype]


def test_a_scale_that_rounds_is_part_of_each_product() -> None:
    counts = [3, 0, 4]
    rows, weight, grad = _tensors(counts)
    actual, calls = _measured(rows, weight, counts, 1 / 3, grad)
    assert calls == 1  # of the forward
    truth, _ = _measured(rows.double(), weight.double(), counts, 1 / 3, grad.double())
    for ours, exact in zip(actual, truth, strict=True):
        assert relative_error(ours, exact) <= TOLERANCE[BF16]


def test_gradients_in_other_strides_are_those_of_dense_ones() -> None:
    counts = [3, 4]
    rows, weight, grad = _tensors(counts)
    expected, _ = _measured(rows, weight, counts, 1.0, grad)
    strided, calls = _measured(rows, weight, counts, 1.0, grad.t().contiguous().t())
    assert calls == 3
    assert all(map(torch.equal, strided, expected))


def test_the_cpu_computes_expert_by_expert() -> None:
    counts = [3, 4]
    rows, weight, _ = _tensors(counts)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        moe_linear(rows, weight, counts)
    assert not any(event.name == "aten::_grouped_mm" for event in recorded.events())
