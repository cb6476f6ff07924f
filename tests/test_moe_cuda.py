"""CUDA kernels for a mixture of experts, whose source runs here on a CPU: a thread for each of a
block's, one block after the other. They make what the ops make there."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cuda_threads import CSRC, compiled
from reference_ops import ALL_DTYPES, TOLERANCE, relative_error

from parallel_ext.ops import moe_gated_silu, moe_route_plan

FP64 = torch.float64
KERNELS = "moe_rows_cuda.cu"

# What nvcc knows by itself, as far as the kernels use it. A failed check of theirs is counted.
CUDA = """
#include <c10/macros/Macros.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()

static std::atomic<int64_t> failed_checks{0};
#undef CUDA_KERNEL_ASSERT_MSG
#define CUDA_KERNEL_ASSERT_MSG(condition, text) \\
  if (!(condition)) {                           \\
    ++failed_checks;                            \\
    return;                                     \\
  }

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
  unsigned x, y;
};
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }

template <typename Kernel, typename... Args>
void run_grid(Kernel* kernel, dim3 blocks, dim3 threads, Args... args) {
  pthread_barrier_init(&barrier, nullptr, threads.x * threads.y);
  std::vector<std::thread> running;
  for (unsigned i = 0; i < threads.x * threads.y; ++i) {
    running.emplace_back([=] {
      threadIdx = {i % threads.x, i / threads.x};
      blockDim = threads;
      gridDim = blocks;
      for (unsigned j = 0; j < blocks.x * blocks.y; ++j) {
        blockIdx = {j % blocks.x, j / blocks.x};
        kernel(args...);
      }
    });
  }
  for (std::thread& thread : running) thread.join();
  pthread_barrier_destroy(&barrier);
}

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(signed char) {}
};
}  // namespace c10::cuda
namespace c10 {
using DeviceIndex = signed char;
}
"""

# The functions of moe_rows_cuda.h by names without types.
EXPORTS = """
using parallel_ext::RowPicks;

extern "C" int64_t take_failed_checks() { return failed_checks.exchange(0); }
extern "C" int64_t widest_piece(uint64_t bits) { return parallel_ext::widest_piece(bits); }
extern "C" void gather(const int64_t* rows, int64_t num_out, int64_t num_in, int64_t row_bytes,
                       const void* in, void* out) {
  parallel_ext::gather_rows_on_cuda({rows, num_out, 1, num_in}, row_bytes, in, out, 0);
}
extern "C" void sort(const int64_t* ids, int64_t size, int64_t num_experts, int64_t* counts,
                     int64_t* sources) {
  parallel_ext::sort_ids_on_cuda(ids, size, num_experts, counts, sources, 0);
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
TYPES = {
    FP64: "EXPORT(float64, double, double)",
    torch.float32: "EXPORT(float32, float, float)",
    torch.bfloat16: "EXPORT(bfloat16, c10::BFloat16, float)",
    torch.float16: "EXPORT(float16, c10::Half, float)",
}


def _kernels(
    folder: Path, dtypes: list[torch.dtype], old: str | None = None, new: str = ""
) -> ctypes.CDLL:
    """The kernels for a CPU, with ``old`` replaced in their source."""
    shutil.copytree(CSRC, folder / "csrc")
    text = (CSRC / KERNELS).read_text()
    if old is not None:
        assert text.count(old) == 1
        text = text.replace(old, new)
    text, launches = re.subn(r"kernel<<<(.*), (.*), 0, .*>>>\(", r"run_grid(kernel, \1, \2, ", text)
    assert launches == 1
    text = re.sub(r"#include <c10/cuda/.*", "", text)
    text = re.sub(r"^PARALLEL_EXT_INSTANTIATE.*", "", text, flags=re.MULTILINE)
    grid = folder / "csrc" / "cuda_grid.h"
    small = grid.read_text()
    # Few blocks, so that each works in turns, and of few threads, which a CPU runs faster.
    for limit, smaller in [("0xffff;", "2;"), ("0x7fffffff", "2"), ("= 256;", "= 32;")]:
        assert small.count(limit) == 1
        small = small.replace(limit, smaller)
    grid.write_text(small)
    exports = "\n".join(TYPES[dtype] for dtype in dtypes)
    return compiled(CUDA + text + EXPORTS + exports + "\n", folder, folder / "csrc")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return _kernels(tmp_path_factory.mktemp("kernels"), list(TYPES))


def _call(function: Callable[..., None], *args: int | torch.Tensor) -> None:
    function(
        *(
            ctypes.c_void_p(arg.data_ptr())
            if isinstance(arg, torch.Tensor)
            else ctypes.c_int64(arg)
            for arg in args
        )
    )


def _of_type(kernels: ctypes.CDLL, name: str, dtype: torch.dtype) -> Callable[..., None]:
    return getattr(kernels, f"{name}_{str(dtype).removeprefix('torch.')}")


def _at(offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins so many elements behind an address that all pieces fit."""
    room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    return room[offset:].view(tensor.shape).copy_(tensor)


# Each yields what it compared, and whether it was right.
Compared = Iterator[tuple[str, bool]]


def _gathers(kernels: ctypes.CDLL, dtype: torch.dtype) -> Compared:
    index = torch.tensor([3, 0, 3, 6, 1])
    for width, offset in [(1, 0), (3, 0), (4, 0), (4, 1), (2, 1), (16, 0), (300, 0), (0, 0)]:
        rows = _at(offset, torch.randn(7, width, dtype=FP64).to(dtype))
        for picks in (index, index[:0]):
            out = _at(offset, torch.zeros(len(picks), width, dtype=dtype))
            row_bytes = width * dtype.itemsize
            _call(kernels.gather, picks, len(picks), len(rows), row_bytes, rows, out)
            yield f"gather {len(picks)} x {width} + {offset}", torch.equal(out, rows[picks])


def _sums(kernels: ctypes.CDLL, dtype: torch.dtype) -> Compared:
    function = _of_type(kernels, "sum", dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for num_out, most, width, offset in [
        *((5, 3, 37, 0), (5, 3, 64, 0), (5, 3, 64, 1), (40, 2, 520, 0)),
        *((4, 0, 16, 0), (0, 2, 16, 0), (3, 2, 0, 0)),
    ]:
        rows = _at(offset, torch.randn(7, width, dtype=FP64).to(dtype))
        parts = torch.randint(0, len(rows) + 1, (num_out, most))  # the last is none
        out = _at(offset, torch.full((num_out, width), torch.nan, dtype=dtype))
        _call(function, parts, num_out, most, len(rows), width, rows, out)
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
        gate_up = _at(
            offset, (4 * torch.randn(rows, 2 * inner, dtype=FP64)).to(dtype)
        ).requires_grad_()
        weights = torch.rand(rows, dtype=wide, requires_grad=True)
        grad = _at(offset, torch.randn(rows, inner, dtype=FP64).to(dtype))
        expected = moe_gated_silu(gate_up, weights)
        gradients = torch.autograd.grad(expected, [gate_up, weights], grad)
        name = f"{rows} x {inner} + {offset}"
        out = _at(offset, torch.full_like(expected, torch.nan))
        _call(_of_type(kernels, "gate", dtype), rows, inner, gate_up, weights, out)
        yield f"gate {name}", relative_error(out, expected) <= allowed
        grads = [[torch.full_like(each, torch.nan) for each in gradients] for _ in range(2)]
        for made in grads:
            function = _of_type(kernels, "gate_backward", dtype)
            _call(function, rows, inner, grad, gate_up, weights, *made)
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
            _call(kernels.sort, ids, size, num_experts, counts, sources)
            plan = moe_route_plan(ids[wrong:].unsqueeze(1), [num_experts], 0, 0)
            found = torch.cat([plan.sources + wrong, torch.full((wrong + 9,), -7)])
            right = torch.equal(counts, plan.counts) and torch.equal(sources, found)
            yield f"sort {size} ids, {wrong} wrong", right


def _failures(kernels: ctypes.CDLL, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    made = [*_gathers(kernels, dtype), *_sums(kernels, dtype), *_gates(kernels, dtype)]
    if dtype == FP64:
        made += _sorts(kernels)
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
    _call(kernels.gather, picks, 2, len(rows), 32, rows, out)
    assert kernels.take_failed_checks() > 0
    assert torch.equal(out, torch.stack([rows[0], torch.zeros(4, dtype=FP64)]))
    if row == len(rows):
        return  # none, in a sum
    _call(kernels.sum_float64, picks, 2, 1, len(rows), 4, rows, out)
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
    "ids below zero": ("0 <= ids[i] && ", ""),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutation, tmp_path):
    assert _failures(_kernels(tmp_path, [FP64], *MUTATIONS[mutation]), FP64) != []
