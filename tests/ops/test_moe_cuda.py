"""CUDA kernels for a mixture of experts, whose source runs here on a CPU: a thread for each of a
block's, one block after the other. They make what the ops make there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from cuda_threads import Mutant, call, of_type, placed
from reference_ops import ALL_DTYPES, TOLERANCE, relative_error

from parallel_ext.ops import moe_gated_silu

FP64 = torch.float64
SOURCE = "moe/rows_cuda.cu"

# The functions of moe/rows_cuda.h by names without types.
EXPORTS = """
extern "C" int64_t widest_piece(uint64_t bits) { return parallel_ext::widest_piece(bits); }
#define EXPORT(name, scalar_t, wide_t)                                                            \\
  extern "C" void gather_##name(const int64_t* rows, int64_t num_out, int64_t num_in,             \\
                                int64_t row_bytes, const void* in, void* out) {                   \\
    KERNELS::gather_rows_on_cuda({rows, num_out, 1, num_in}, row_bytes, in, out, 0);              \\
  }                                                                                               \\
  extern "C" void sum_##name(const int64_t* rows, int64_t num_out, int64_t most, int64_t num_in,  \\
                             int64_t size, const scalar_t* in, scalar_t* out) {                   \\
    KERNELS::sum_rows_on_cuda({rows, num_out, most, num_in}, size, in, out, 0);                   \\
  }                                                                                               \\
  extern "C" void gate_##name(int64_t rows, int64_t inner, const scalar_t* gate_up,               \\
                              const wide_t* weights, scalar_t* out) {                             \\
    KERNELS::gate_rows_on_cuda(rows, inner, gate_up, weights, out, 0);                            \\
  }                                                                                               \\
  extern "C" void gate_backward_##name(int64_t rows, int64_t inner, const scalar_t* grad,         \\
                                       const scalar_t* gate_up, const wide_t* weights,            \\
                                       scalar_t* grad_gate_up, wide_t* grad_weights) {            \\
    KERNELS::gate_rows_backward_on_cuda(rows, inner, grad, gate_up, weights, grad_gate_up,        \\
                                        grad_weights, 0);                                         \\
  }                                                                                               \\
  extern "C" void zero_unused_##name(const int64_t* counts, int64_t num_experts, int64_t bytes,   \\
                                     void* out) {                                                 \\
    KERNELS::zero_unused_on_cuda(counts, num_experts, bytes, out, 0);                             \\
  }                                                                                               \\
  extern "C" int64_t sort_workspace_##name(int64_t size, int64_t num_experts) {                   \\
    return KERNELS::sort_workspace(size, num_experts);                                            \\
  }                                                                                               \\
  extern "C" void sort_##name(const int64_t* ids, int64_t size, int64_t num_experts,              \\
                              int64_t* workspace, int64_t* counts, int64_t* sources,              \\
                              int64_t* slots) {                                                   \\
    KERNELS::sort_ids_on_cuda(ids, size, num_experts, workspace, counts, sources, slots, 0);      \\
  }
"""


Kernels = ctypes.CDLL | Mutant

# Each yields what it compared, and whether it was right.
Compared = Iterator[tuple[str, bool]]


def _gathers(kernels: Kernels, dtype: torch.dtype) -> Compared:
    index = torch.tensor([3, 0, 3, 6, 1])
    for width, offset in [(1, 0), (3, 0), (4, 0), (4, 1), (2, 1), (16, 0), (300, 0), (0, 0)]:
        rows = placed(offset, torch.randn(7, width, dtype=FP64).to(dtype))
        for picks in (index, index[:0]):
            out = placed(offset, torch.zeros(len(picks), width, dtype=dtype))
            row_bytes = width * dtype.itemsize
            function = of_type(kernels, "gather", dtype)
            call(function, picks, len(picks), len(rows), row_bytes, rows, out)
            yield f"gather {len(picks)} x {width} + {offset}", torch.equal(out, rows[picks])


def _sums(kernels: Kernels, dtype: torch.dtype) -> Compared:
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


def _gates(kernels: Kernels, dtype: torch.dtype) -> Compared:
    wide = torch.promote_types(dtype, torch.float32)
    allowed = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, TOLERANCE[dtype])
    for rows, inner, offset in [
        *((5, 37, 0), (5, 64, 0), (5, 64, 1), (3, 520, 0)),
        *((5, 12, 0), (0, 4, 0), (3, 0, 0)),  # several rows in a block; nothing
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


def _sorts(kernels: Kernels) -> Compared:
    # Of the tests' blocks, which have 32 threads: ids of one tile, of more tiles than a block sums
    # at once, and experts that take three tiles.
    cases = [*((7, size) for size in (0, 1, 5, 256, 2500)), (70, 1000), (1, 100), (0, 5)]
    for num_experts, size in cases:
        ids = torch.randint(0, max(num_experts - 1, 1), (size,))  # the last gets none
        for wrong in (0, 3) if size >= 5 else (0,):
            ids[torch.randperm(size)[:wrong]] = torch.tensor([-1, num_experts, 2**40])[:wrong]
            is_right = (ids >= 0) & (ids < num_experts)
            found = is_right.nonzero().squeeze(1)
            order = found[ids[found].argsort(stable=True)]
            sources, slots = torch.zeros(2, size, dtype=torch.int64)
            sources[: len(order)] = order
            slots[order] = torch.arange(len(order))
            room = kernels.sort_workspace_float64(size, num_experts)
            margin = 8 * size + 64  # broken kernels write there, and not to what others own
            rooms = [torch.full((n + 2 * margin,), -7) for n in (room, num_experts, size, size)]
            middles = [each[margin : len(each) - margin] for each in rooms]
            call(kernels.sort_float64, ids, size, num_experts, *middles)
            counts = ids[found].bincount(minlength=num_experts)
            right = all(map(torch.equal, middles[1:], (counts, sources, slots)))
            for whole, middle in zip(rooms, middles, strict=True):
                middle.fill_(-7)
                right = right and bool((whole == -7).all())
            yield f"sort {size} ids of {num_experts}, {wrong} wrong", right


def _zeros(kernels: Kernels) -> Compared:
    for experts, width, offset in [(5, 3, 0), (5, 256, 0), (5, 5000, 1), (3, 0, 0), (0, 7, 0)]:
        counts = torch.tensor([0, 4, 0, 1, 0][:experts])
        out = placed(offset, torch.randn(experts, width))
        expected = out.masked_fill((counts == 0).unsqueeze(1), 0)
        call(kernels.zero_unused_float64, counts, experts, 4 * width, out)
        yield f"zeros in {experts} x {width} + {offset}", torch.equal(out, expected)


def _failures(kernels: Kernels, dtype: torch.dtype) -> list[str]:
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
    call(kernels.gather_float64, picks, 2, len(rows), 32, rows, out)
    assert kernels.take_failed_checks() > 0
    assert torch.equal(out, torch.stack([rows[0], torch.zeros(4, dtype=FP64)]))
    if row == len(rows):
        return  # none, in a sum
    call(kernels.sum_float64, picks, 2, 1, len(rows), 4, rows, out)
    assert kernels.take_failed_checks() > 0


MUTATIONS = {
    "another order": ("picks.most + j]", "picks.most + picks.most - 1 - j]"),
    "the gradient of the other half": ("store(gradients.gate,", "store(gradients.up,"),
    "work forgotten": ("column += wide", "column += 2 * wide"),
    "one sum of several rows": ("parts_of_rows + threadIdx.y * wide", "parts_of_rows"),
    "an expert that is used": ("counts[expert] == 0", "counts[expert] >= 0"),
    "ids below zero": ("return 0 <= id && id", "return id"),
    "a tile that is gone": ("__syncthreads();  // before the next tile", "// before the next tile"),
    "counts that are no zeros": ("counts[expert] = 0;", ""),
    "earlier chunks forgotten": ("count + sums.before", "sums.before"),
    "sources of no id": ("if (i >= placed) sources[i] = 0;", ""),
    "a chunk too few": ("(size + chunk_size - 1) / chunk_size", "size / chunk_size"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert _failures(mutants[mutation], FP64) != []
