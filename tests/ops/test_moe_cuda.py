"""CUDA kernels for a mixture of experts, whose source runs here on a CPU: a thread for each of a
block's, one block after the other. They make what the ops make there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_threads import C_TYPES, call, exports_of, kernels_on_cpu, of_type, placed
from reference_ops import ALL_DTYPES, TOLERANCE, relative_error

from parallel_ext.ops import moe_gated_silu, moe_route_plan

FP64 = torch.float64

# The functions of moe/rows_cuda.h by names without types.
EXPORTS = """
using parallel_ext::RowPicks;

extern "C" int64_t widest_piece(uint64_t bits) { return parallel_ext::widest_piece(bits); }
extern "C" void gather(const int64_t* rows, int64_t num_out, int64_t num_in, int64_t row_bytes,
                       const void* in, void* out) {
  parallel_ext::gather_rows_on_cuda({rows, num_out, 1, num_in}, row_bytes, in, out, 0);
}
extern "C" void sort(const int64_t* ids, int64_t size, int64_t num_experts, int64_t* counts,
                     int64_t* sources) {
  parallel_ext::sort_ids_on_cuda(ids, size, num_experts, counts, sources, 0);
}
extern "C" void zero_unused(const int64_t* counts, int64_t num_experts, int64_t bytes, void* out) {
  parallel_ext::zero_unused_on_cuda(counts, num_experts, bytes, out, 0);
}
#define EXPORT(name, scalar_t, wide_t)                                                          \\
  extern "C" void sum_##name(const int64_t* rows, int64_t num_out, int64_t most, int64_t num_in, \\
                             int64_t size, const scalar_t* in, scalar_t* out) {                 \\
    parallel_ext::sum_rows_on_cuda({rows, num_out, most, num_in}, size, in, out, 0);            \\
  }                                                                                             \\
  extern "C" void gate_##name(int64_t rows, int64_t inner, const scalar_t* gate_up,             \\
                              const wide_t* weights, scalar_t* out) {                           \\
    parallel_ext::gate_rows_on_cuda(rows, inner, gate_up, weights, out, 0);                     \\
  }                                                                                             \\
  extern "C" void gate_backward_##name(int64_t rows, int64_t inner, const scalar_t* grad,       \\
                                       const scalar_t* gate_up, const wide_t* weights,          \\
                                       scalar_t* grad_gate_up, wide_t* grad_weights) {          \\
    parallel_ext::gate_rows_backward_on_cuda(rows, inner, grad, gate_up, weights, grad_gate_up, \\
                                             grad_weights, 0);                                  \\
  }
"""


def _kernels(
    folder: Path, dtypes: list[torch.dtype], old: str | None = None, new: str = ""
) -> ctypes.CDLL:
    return kernels_on_cpu("moe/rows_cuda.cu", EXPORTS + exports_of(dtypes), folder, old, new)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return _kernels(tmp_path_factory.mktemp("kernels"), list(C_TYPES))


# Each yields what it compared, and whether it was right.
Compared = Iterator[tuple[str, bool]]


def _gathers(kernels: ctypes.CDLL, dtype: torch.dtype) -> Compared:
    index = torch.tensor([3, 0, 3, 6, 1])
    for width, offset in [(1, 0), (3, 0), (4, 0), (4, 1), (2, 1), (16, 0), (300, 0), (0, 0)]:
        rows = placed(offset, torch.randn(7, width, dtype=FP64).to(dtype))
        for picks in (index, index[:0]):
            out = placed(offset, torch.zeros(len(picks), width, dtype=dtype))
            row_bytes = width * dtype.itemsize
            call(kernels.gather, picks, len(picks), len(rows), row_bytes, rows, out)
            yield f"gather {len(picks)} x {width} + {offset}", torch.equal(out, rows[picks])


def _sums(kernels: ctypes.CDLL, dtype: torch.dtype) -> Compared:
    function = of_type(kernels, "sum", dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for num_out, most, width, offset in [
        *((5, 3, 37, 0), (5, 3, 64, 0), (5, 3, 64, 1), (40, 2, 520, 0)),
        *((4, 0, 16, 0), (0, 2, 16, 0), (3, 2, 0, 0)),
    ]:
        rows = placed(offset, torch.randn(7, width, dtype=FP64).to(dtype))
        parts = torch.randint(0, len(rows) + 1, (num_out, most))  # the last is none
        out = placed(offset, torch.full((num_out, width), torch.nan, dtype=dtype))
        call(function, parts, num_out, most, len(rows), width, rows, out)
        padded = torch.cat([rows, torch.zeros(1, width, dtype=dtype)]).to(wide)
        total = torch.zeros(num_out, width, dtype=wide)
        for j in range(most):
            total += padded[parts[:, j]]
        yield f"sum {num_out} x {most} x {width} + {offset}", torch.equal(out, total.to(dtype))


def _gates(kernels: ctypes.CDLL, dtype: torch.dtype) -> Compared:
    wide = torch.promote_types(dtype, torch.float32)
    allowed = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, TOLERANCE[dtype])
    for rows, inner, offset in [
        *((5, 37, 0), (5, 64, 0), (5, 64, 1), (3, 520, 0)),
        *((0, 4, 0), (3, 0, 0)),
    ]:
        gate_up = placed(
            offset, (4 * torch.randn(rows, 2 * inner, dtype=FP64)).to(dtype)
        ).requires_grad_()
        weights = torch.rand(rows, dtype=wide, requires_grad=True)
        grad = placed(offset, torch.randn(rows, inner, dtype=FP64).to(dtype))
        expected = moe_gated_silu(gate_up, weights)
        gradients = torch.autograd.grad(expected, [gate_up, weights], grad)
        name = f"{rows} x {inner} + {offset}"
        out = placed(offset, torch.full_like(expected, torch.nan))
        call(of_type(kernels, "gate", dtype), rows, inner, gate_up, weights, out)
        yield f"gate {name}", relative_error(out, expected) <= allowed
        grads = [[torch.full_like(each, torch.nan) for each in gradients] for _ in range(2)]
        for made in grads:
            function = of_type(kernels, "gate_backward", dtype)
            call(function, rows, inner, grad, gate_up, weights, *made)
        for made, again, right in zip(*grads, gradients, strict=True):
            bound = allowed if right is gradients[0] else TOLERANCE[wide]
            same = torch.equal(made, again)
            yield f"backward {name}", same and relative_error(made, right) <= bound


def _sorts(kernels: ctypes.CDLL, num_experts: int = 7) -> Compared:
    for size in (0, 1, 5, 256, 1000):
        ids = torch.randint(0, num_experts - 1, (size,))  # the last gets none
        for wrong in (0, 3) if size >= 5 else (0,):
            ids[:wrong] = torch.tensor([-1, num_experts, 2**40])[:wrong]
            counts, sources = torch.full((num_experts,), -7), torch.full((size + 9,), -7)
            call(kernels.sort, ids, size, num_experts, counts, sources)
            plan = moe_route_plan(ids[wrong:].unsqueeze(1), [num_experts], 0, 0)
            found = torch.cat([plan.sources + wrong, torch.full((wrong + 9,), -7)])
            right = torch.equal(counts, plan.counts) and torch.equal(sources, found)
            yield f"sort {size} ids, {wrong} wrong", right


def _zeros(kernels: ctypes.CDLL) -> Compared:
    for experts, width, offset in [(5, 3, 0), (5, 256, 0), (5, 5000, 1), (3, 0, 0), (0, 7, 0)]:
        counts = torch.tensor([0, 4, 0, 1, 0][:experts])
        out = placed(offset, torch.randn(experts, width))
        expected = out.masked_fill((counts == 0).unsqueeze(1), 0)
        call(kernels.zero_unused, counts, experts, 4 * width, out)
        yield f"zeros in {experts} x {width} + {offset}", torch.equal(out, expected)


def _failures(kernels: ctypes.CDLL, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    made = [*_gathers(kernels, dtype), *_sums(kernels, dtype), *_gates(kernels, dtype)]
    if dtype == FP64:
        made += [*_sorts(kernels), *_zeros(kernels)]
    return [name for name, right in made if not right]


@ALL_DTYPES
def test_kernels_make_what_the_ops_make_on_a_cpu(kernels, dtype):
    assert _failures(kernels, dtype) == []
    assert kernels.take_failed_checks() == 0


def test_rows_are_cut_into_the_widest_pieces_that_fit(kernels):
    for bits, widest in [(0, 16), (4096, 16), (4096 | 8, 8), (20, 4), (6, 2), (7, 1), (2**63, 16)]:
        assert kernels.widest_piece(ctypes.c_uint64(bits)) == widest, bits


@pytest.mark.parametrize("row", [-1, 7, 2**40])
def test_a_row_that_is_not_there_fails_a_check_and_is_not_read(kernels, row):
    rows, out = torch.randn(7, 4, dtype=FP64), torch.zeros(2, 4, dtype=FP64)
    picks = torch.tensor([0, row])
    call(kernels.gather, picks, 2, len(rows), 32, rows, out)
    assert kernels.take_failed_checks() > 0
    assert torch.equal(out, torch.stack([rows[0], torch.zeros(4, dtype=FP64)]))
    if row == len(rows):
        return  # none, in a sum
    call(kernels.sum_float64, picks, 2, 1, len(rows), 4, rows, out)
    assert kernels.take_failed_checks() > 0


MUTATIONS = {
    "another row": ("in[from * columns + column];\n  });", "in[row * columns + column];\n  });"),
    "another order": ("picks.most + j]", "picks.most + picks.most - 1 - j]"),
    "nothing is something": ("if (from == picks.num_in) continue;", ""),
    "the gradient of the other half": ("store(gradients.gate,", "store(gradients.up,"),
    "a part of a sum forgotten": ("half > 0", "half > 1"),
    "work forgotten": ("column += kBlockThreads", "column += 2 * kBlockThreads"),
    "a row of blocks forgotten": ("row += thread.num_y", "row += 2 * thread.num_y"),
    "not behind the threads before": ("other < thread ?", "other <= thread ?"),
    "an expert that is used": ("counts[expert] == 0", "counts[expert] >= 0"),
    "ids below zero": ("0 <= ids[i] && ", ""),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutation, tmp_path):
    assert _failures(_kernels(tmp_path, [FP64], *MUTATIONS[mutation]), FP64) != []
