// The tests run this file on the CPU too, with one thread for each thread of a block.
#include <c10/macros/Macros.h>

#include <algorithm>

#include "base/cuda_grid.h"
#include "moe/gated_silu.h"
#include "moe/rows_cuda.h"

namespace parallel_ext {
namespace {

// Rows are `columns` pieces, or packs, long in all kernels.

template <typename piece_t>
__global__ void __launch_bounds__(kBlockThreads)
    gather_kernel(const RowPicks picks, int64_t columns, const piece_t* __restrict__ in,
                  piece_t* __restrict__ out) {
  for_work(picks.num_out, columns, [&](int64_t row, int64_t column) {
    const int64_t from = picks.rows[row];
    CUDA_KERNEL_ASSERT_MSG(0 <= from && from < picks.num_in, "moe: a row to gather is not there");
    out[row * columns + column] = in[from * columns + column];
  });
}

template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads, kLeastBlocks)
    sum_kernel(const RowPicks picks, int64_t columns, const Pack<scalar_t, size>* __restrict__ in,
               Pack<scalar_t, size>* __restrict__ out) {
  for_work(picks.num_out, columns, [&](int64_t row, int64_t column) {
    wide_of<scalar_t> total[size] = {};
    for (int64_t j = 0; j < picks.most; ++j) {
      const int64_t from = picks.rows[row * picks.most + j];
      if (from == picks.num_in) continue;
      CUDA_KERNEL_ASSERT_MSG(0 <= from && from < picks.num_in, "moe: a row to sum is not there");
      const Pack<scalar_t, size> part = in[from * columns + column];
      PARALLEL_EXT_UNROLL
      for (int i = 0; i < size; ++i) total[i] += widen(part.value[i]);
    }
    Pack<scalar_t, size> sum;
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) store(total[i], sum.value + i);
    out[row * columns + column] = sum;
  });
}

template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads, kLeastBlocks)
    gate_kernel(int64_t rows, int64_t columns, const Pack<scalar_t, size>* __restrict__ gate_up,
                const wide_of<scalar_t>* __restrict__ weights,
                Pack<scalar_t, size>* __restrict__ out) {
  for_work(rows, columns, [&](int64_t row, int64_t column) {
    const int64_t gate = row * 2 * columns + column, up = gate + columns;
    const Pack<scalar_t, size> g = gate_up[gate], u = gate_up[up];
    Pack<scalar_t, size> gated;
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) {
      store(gated_silu(widen(g.value[i]), widen(u.value[i]), weights[row]), gated.value + i);
    }
    out[row * columns + column] = gated;
  });
}

// A block computes the gradients of one row. The gradient of the row's weight is a sum over each
// thread's columns, then over halves of the threads, so always in the same order.
template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads)
    gate_backward_kernel(int64_t rows, int64_t columns,
                         const Pack<scalar_t, size>* __restrict__ grad,
                         const Pack<scalar_t, size>* __restrict__ gate_up,
                         const wide_of<scalar_t>* __restrict__ weights,
                         Pack<scalar_t, size>* __restrict__ grad_gate_up,
                         wide_of<scalar_t>* __restrict__ grad_weights) {
  __shared__ wide_of<scalar_t> parts[kBlockThreads];
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    wide_of<scalar_t> sum = 0;
    for (int64_t column = thread; column < columns; column += kBlockThreads) {
      const int64_t gate = row * 2 * columns + column, up = gate + columns;
      const Pack<scalar_t, size> d = grad[row * columns + column], g = gate_up[gate],
                                 u = gate_up[up];
      Pack<scalar_t, size> grad_gate, grad_up;
      PARALLEL_EXT_UNROLL
      for (int i = 0; i < size; ++i) {
        const auto gradients = gated_silu_gradients(widen(d.value[i]), widen(g.value[i]),
                                                    widen(u.value[i]), weights[row]);
        store(gradients.gate, grad_gate.value + i);
        store(gradients.up, grad_up.value + i);
        sum += gradients.weight;
      }
      grad_gate_up[gate] = grad_gate;
      grad_gate_up[up] = grad_up;
    }
    parts[thread] = sum;
    for (int half = kBlockThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (thread < half) parts[thread] += parts[thread + half];
    }
    if (thread == 0) grad_weights[row] = parts[0];
    __syncthreads();  // before the next row's parts overwrite these
  }
}

template <typename piece_t>
__global__ void __launch_bounds__(kBlockThreads)
    zero_unused_kernel(const int64_t* __restrict__ counts, int64_t num_experts, int64_t columns,
                       piece_t* __restrict__ out) {
  for_work(num_experts, columns, [&](int64_t expert, int64_t column) {
    if (counts[expert] == 0) out[expert * columns + column] = piece_t{};
  });
}

// A block finds the ids of one expert; its sources follow those of all earlier experts. Each thread
// reads a contiguous range of ids, so its sources follow those of the threads before it.
__global__ void __launch_bounds__(kBlockThreads)
    sort_kernel(const int64_t* __restrict__ ids, int64_t size, int64_t num_experts,
                int64_t* __restrict__ counts, int64_t* __restrict__ sources) {
  __shared__ int64_t own[kBlockThreads], before[kBlockThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t each = (size + kBlockThreads - 1) / kBlockThreads;
  const int64_t begin = thread * each, end = std::min(size, begin + each);
  for (int64_t expert = blockIdx.x; expert < num_experts; expert += gridDim.x) {
    int64_t num_own = 0, num_before = 0;
    for (int64_t i = begin; i < end; ++i) {
      num_own += ids[i] == expert;
      num_before += 0 <= ids[i] && ids[i] < expert;
    }
    own[thread] = num_own;
    before[thread] = num_before;
    __syncthreads();
    int64_t count = 0, next = 0;
    for (int other = 0; other < kBlockThreads; ++other) {
      next += before[other] + (other < thread ? own[other] : 0);
      count += own[other];
    }
    if (thread == 0) counts[expert] = count;
    for (int64_t i = begin; i < end && num_own > 0; ++i) {
      if (ids[i] == expert) sources[next++] = i;
    }
    __syncthreads();  // before the next expert's counts overwrite these
  }
}

}  // namespace

void gather_rows_on_cuda(const RowPicks& picks, int64_t row_bytes, const void* in, void* out,
                         int device) {
  if (picks.num_out == 0 || row_bytes == 0) return;  // CUDA refuses an empty grid
  with_piece(row_bytes | address(in) | address(out), [&](auto piece) {
    using piece_t = decltype(piece);
    const int64_t columns = row_bytes / static_cast<int64_t>(sizeof(piece_t));
    launch(gather_kernel<piece_t>, grid_of_rows(picks.num_out, columns), device, picks, columns,
           static_cast<const piece_t*>(in), static_cast<piece_t*>(out));
  });
}

template <typename scalar_t>
void sum_rows_on_cuda(const RowPicks& picks, int64_t size, const scalar_t* in, scalar_t* out,
                      int device) {
  if (picks.num_out == 0 || size == 0) return;
  const uint64_t bits = size * sizeof(scalar_t) | address(in) | address(out);
  with_size<scalar_t>(bits, [&](auto pack) {
    const int64_t columns = size / pack;
    launch(sum_kernel<scalar_t, pack>, grid_of_rows(picks.num_out, columns), device, picks, columns,
           packs<pack>(in), packs<pack>(out));
  });
}

template <typename scalar_t>
void gate_rows_on_cuda(int64_t rows, int64_t inner, const scalar_t* gate_up,
                       const wide_of<scalar_t>* weights, scalar_t* out, int device) {
  if (rows == 0 || inner == 0) return;
  const uint64_t bits = inner * sizeof(scalar_t) | address(gate_up) | address(out);
  with_size<scalar_t>(bits, [&](auto pack) {
    const int64_t columns = inner / pack;
    launch(gate_kernel<scalar_t, pack>, grid_of_rows(rows, columns), device, rows, columns,
           packs<pack>(gate_up), weights, packs<pack>(out));
  });
}

// Runs for inner == 0 too, where the gradients of the weights must be set to zero.
template <typename scalar_t>
void gate_rows_backward_on_cuda(int64_t rows, int64_t inner, const scalar_t* grad,
                                const scalar_t* gate_up, const wide_of<scalar_t>* weights,
                                scalar_t* grad_gate_up, wide_of<scalar_t>* grad_weights,
                                int device) {
  if (rows == 0) return;
  const uint64_t bits =
      inner * sizeof(scalar_t) | address(grad) | address(gate_up) | address(grad_gate_up);
  with_size<scalar_t>(bits, [&](auto pack) {
    launch(gate_backward_kernel<scalar_t, pack>, grid_of_blocks(rows), device, rows, inner / pack,
           packs<pack>(grad), packs<pack>(gate_up), weights, packs<pack>(grad_gate_up),
           grad_weights);
  });
}

void zero_unused_on_cuda(const int64_t* counts, int64_t num_experts, int64_t bytes, void* out,
                         int device) {
  if (num_experts == 0 || bytes == 0) return;
  with_piece(bytes | address(out), [&](auto piece) {
    using piece_t = decltype(piece);
    const int64_t columns = bytes / static_cast<int64_t>(sizeof(piece_t));
    // Few threads, which go on to the next columns: most experts are used, and have nothing to do.
    const int64_t threads = std::min<int64_t>(columns, 16 * kBlockThreads);
    launch(zero_unused_kernel<piece_t>, grid_of_rows(num_experts, threads), device, counts,
           num_experts, columns, static_cast<piece_t*>(out));
  });
}

void sort_ids_on_cuda(const int64_t* ids, int64_t size, int64_t num_experts, int64_t* counts,
                      int64_t* sources, int device) {
  if (num_experts == 0) return;
  launch(sort_kernel, grid_of_blocks(num_experts), device, ids, size, num_experts, counts, sources);
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                                     \
  template void sum_rows_on_cuda(const RowPicks&, int64_t, const scalar_t*, scalar_t*, int);   \
  template void gate_rows_on_cuda(int64_t, int64_t, const scalar_t*, const wide_of<scalar_t>*, \
                                  scalar_t*, int);                                             \
  template void gate_rows_backward_on_cuda(int64_t, int64_t, const scalar_t*, const scalar_t*, \
                                           const wide_of<scalar_t>*, scalar_t*,                \
                                           wide_of<scalar_t>*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
