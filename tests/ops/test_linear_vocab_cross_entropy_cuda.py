"""CUDA kernels of the fused head's gradients, whose source runs here on a CPU, beside torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from cuda_threads import Mutant, call, of_type, placed
from reference_ops import ALL_DTYPES, TOLERANCE, wide_type

FP64 = torch.float64

SOURCE = "vocab/linear_cross_entropy_cuda.cu"

EXPORTS = """
#define EXPORT(name, scalar_t, wide_t)                                                            \\
  extern "C" void scale_##name(scalar_t* numbers, int64_t count, const wide_t* factor) {          \\
    KERNELS::scale_on_cuda(numbers, count, factor, 0);                                            \\
  }                                                                                               \\
  extern "C" void gradient_##name(const wide_t* expected_rows, const scalar_t* head,              \\
                                  const int64_t* labels, const wide_t* factors,                   \\
                                  const wide_t* column_row, int64_t num_tokens,                   \\
                                  int64_t hidden_size, int64_t num_rows, int64_t vocab_start,     \\
                                  double scale, scalar_t* grad) {                                 \\
    KERNELS::frozen_gradient_on_cuda(                                                             \\
        parallel_ext::FrozenHeadOnCuda<scalar_t>{expected_rows, head, labels, factors,            \\
                                                 column_row, num_tokens, hidden_size, num_rows,   \\
                                                 vocab_start, wide_t(scale)},                     \\
        grad, 0);                                                                                 \\
  }
"""

Kernels = ctypes.CDLL | Mutant

MOST_ROWS = 7  # of a head


def _is_near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = TOLERANCE[actual.dtype]
    return torch.allclose(actual.double(), expected.to(actual.dtype).double(), bound, bound)


def _scaled(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    for count, offset in ((0, 0), (1, 0), (40, 0), (3001, 0), (50, 1)):
        for factor in (0.3, -2.0, 0.0):
            numbers = placed(offset, torch.randn(count).to(dtype))
            given = torch.tensor(factor, dtype=wide_type(dtype))
            expected = numbers.double() * given.double()
            call(of_type(kernels, "scale", dtype), numbers, count, given)
            yield f"{count} numbers from {offset} on by {factor}", _is_near(numbers, expected)
    numbers = torch.tensor([float("nan"), 1.0]).to(dtype)
    call(of_type(kernels, "scale", dtype), numbers, 2, torch.ones((), dtype=wide_type(dtype)))
    yield "by 1", bool(numbers[0].isnan()) and numbers[1].item() == 1


def _gradients(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    wide = wide_type(dtype)
    for tokens, hidden, rows, offset in (
        *((5, 16, MOST_ROWS, 0), (70, 40, MOST_ROWS, 0), (6, 37, MOST_ROWS, 0)),
        *((4, 16, MOST_ROWS, 1), (4, 8, 0, 0), (0, 8, MOST_ROWS, 0), (3, 1000, 2, 0)),
    ):
        for smoothed in (False, True):
            expected_rows = torch.randn(tokens, hidden, dtype=wide)
            # Two rows in front and one behind, which a wrong kernel reads instead of anything.
            head = placed(offset, torch.randn(rows + 3, hidden).to(dtype))[2 : 2 + rows]
            labels = torch.arange(tokens) % (MOST_ROWS + 4) + 8  # from 2 below the first row on
            factors = torch.randn(4, tokens, dtype=wide)
            factors[3] = 0
            factors[1] *= smoothed
            factors[2, 2::3] = 0  # as of a gradient of the log-sum-exp alone
            factors[:, 1::3] = 0
            expected_rows[1::3] = float("nan")  # of what is ignored
            column_row = torch.randn(hidden, dtype=wide) if smoothed else None
            grad = torch.full((tokens, hidden), float("nan")).to(dtype)
            call(
                of_type(kernels, "gradient", dtype),
                *(expected_rows, head, labels, factors, column_row),
                *(tokens, hidden, rows, 10, 0.7, grad),
            )
            expected = expected_rows.double() * factors[0].double()[:, None]
            if smoothed:
                expected -= factors[1].double()[:, None] * column_row.double()
            for token in range(tokens):
                row = labels[token].item() - 10
                if 0 <= row < rows:
                    factor = factors[0, token].double() - factors[2, token].double()
                    expected[token] += 0.7 * factor * head[row].double()
            expected[1::3] = 0
            name = f"{tokens} x {hidden}, {rows} rows from {offset} on, smoothed {smoothed}"
            yield name, _is_near(grad, expected)


def _failures(kernels: Kernels, dtype: torch.dtype) -> Iterator[str]:
    torch.manual_seed(0)
    for compared in (_scaled, _gradients):
        yield from (name for name, right in compared(kernels, dtype) if not right)
    if kernels.take_failed_checks() > 0:
        yield "a barrier, or a pack where CUDA cannot read it"


@ALL_DTYPES
def test_kernels_make_what_torch_makes(kernels, dtype):
    assert [*_failures(kernels, dtype)] == []


MUTATIONS = {
    "no rest": ("i < count; i += thread.num_x", "i < whole; i += thread.num_x"),
    "zeros multiplied": ("probability != 0 || of_column != 0 || of_label != 0", "true"),
    "only the label's": ("probability != 0 || of_column != 0 ||", ""),
    "another rank's row": ("0 <= row && row < head.num_rows", "row < head.num_rows"),
    "a row too many": ("row < head.num_rows", "row <= head.num_rows"),
    "unaligned packs": ("address(head.expected_rows) | address(head.head) |", "0 |"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert next(_failures(mutants[mutation], FP64), None) is not None
