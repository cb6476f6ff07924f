"""The activation between an expert's products, times the weight of each row."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    BOTH_PATHS,
    TOLERANCE,
    aten_path,
    data_bytes,
    doubles,
    grad_outputs,
    relative_error,
    threads,
    wide_type,
    with_gradients,
)
from torch.nn import functional

from parallel_ext.ops import moe_gated_silu

FP64 = torch.float64


def _plain(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up * weights.unsqueeze(-1)


def _inputs(rows: int, inner: int, dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    numbers = (scale * torch.randn(rows, 2 * inner)).to(dtype)
    return [numbers, torch.rand(rows).to(wide_type(dtype))]


@BOTH_PATHS
@ALL_DTYPES
@pytest.mark.parametrize("sizes", [(5, 37), (0, 3), (3, 0), (40, 16)], ids=str)
def test_it_equals_the_plain_formula_and_rounds_once(sizes, dtype, aten):
    tensors = _inputs(*sizes, dtype, scale=4.0)
    one_rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
    for name, grad in grad_outputs(sizes, dtype).items():
        expected = with_gradients(_plain, doubles(tensors), grad.double())
        with aten_path(aten):
            actual = with_gradients(moe_gated_silu, tensors, grad)
        for ours, theirs in zip(actual, expected, strict=True):
            allowed = one_rounding.get(ours.dtype, TOLERANCE[ours.dtype])
            assert relative_error(ours, theirs) <= allowed, name


@BOTH_PATHS
def test_large_numbers_give_what_torch_gives(aten):
    gate = torch.tensor([-1e4, -100.0, -90.0, 0.0, 90.0, 1e4, float("nan"), float("inf")])
    gate_up = torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0)
    grad = torch.ones(1, 8)
    with aten_path(aten):
        actual = with_gradients(moe_gated_silu, [gate_up, torch.ones(1)], grad)
    expected = with_gradients(_plain, [gate_up, torch.ones(1)], grad)
    assert torch.allclose(actual[0], expected[0], rtol=1e-6, atol=1e-30, equal_nan=True)
    finite = expected[1].isfinite()
    assert torch.allclose(actual[1][finite], expected[1][finite], rtol=1e-6, atol=1e-30)


def test_strided_halves_of_a_larger_tensor():
    whole, weights = torch.randn(6, 20, dtype=FP64), torch.rand(6, dtype=FP64)
    assert (
        relative_error(moe_gated_silu(whole[:, 4:16], weights), _plain(whole[:, 4:16], weights))
        <= TOLERANCE[FP64]
    )


def test_the_bits_do_not_depend_on_the_threads():
    tensors, grad = _inputs(300, 70, torch.float32), torch.randn(300, 70)
    found = set()
    for count in (1, 2, 3):
        with threads(count):
            results = with_gradients(moe_gated_silu, tensors, grad)
        found.add(b"".join(map(data_bytes, results)))
    assert len(found) == 1
