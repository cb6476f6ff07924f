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
    store_pack<scalar_t, size>(total, out + row * columns + column);
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

// The threads of a row compute its gradients. That of its weight is a sum over each thread's
// columns, then over halves of the threads, so always in the same order.
template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads)
    gate_backward_kernel(int64_t rows, int64_t columns,
                         const Pack<scalar_t, size>* __restrict__ grad,
                         const Pack<scalar_t, size>* __restrict__ gate_up,
                         const wide_of<scalar_t>* __restrict__ weights,
                         Pack<scalar_t, size>* __restrict__ grad_gate_up,
                         wide_of<scalar_t>* __restrict__ grad_weights) {
  __shared__ wide_of<scalar_t> parts_of_rows[kBlockThreads];
  const int thread = static_cast<int>(threadIdx.x), wide = static_cast<int>(blockDim.x);
  wide_of<scalar_t>* const parts = parts_of_rows + threadIdx.y * wide;
  for_whole_rows(rows, [&](int64_t row) {
    wide_of<scalar_t> sum = 0;
    for (int64_t column = thread; row < rows && column < columns; column += wide) {
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
    for (int half = wide / 2; half > 0; half /= 2) {
      __syncthreads();
      if (thread < half) parts[thread] += parts[thread + half];
    }
    if (thread == 0 && row < rows) grad_weights[row] = parts[0];
    __syncthreads();  // before the next row's parts overwrite these
  });
}

template <typename piece_t>
__global__ void __launch_bounds__(kBlockThreads)
    zero_unused_kernel(const int64_t* __restrict__ counts, int64_t num_experts, int64_t columns,
                       piece_t* __restrict__ out) {
  for_work(num_experts, columns, [&](int64_t expert, int64_t column) {
    if (counts[expert] == 0) out[expert * columns + column] = piece_t{};
  });
}

// What the threads of a block before this one have, and all of them; every thread calls this.
struct Sums {
  int64_t before, all;
};
__device__ __forceinline__ Sums sums_of_block(int64_t own) {
  __shared__ int64_t sums[2][kBlockThreads];
  const int thread = static_cast<int>(threadIdx.x);
  int64_t sum = own;
  int turn = 0;
  for (int step = 1; step < kBlockThreads; step *= 2, turn = 1 - turn) {
    sums[turn][thread] = sum;
    __syncthreads();
    if (thread >= step) sum += sums[turn][thread - step];
  }
  sums[turn][thread] = sum;
  __syncthreads();
  const int64_t all = sums[turn][kBlockThreads - 1];
  __syncthreads();  // before the next sums overwrite these
  return {sum - own, all};
}

// The ids are sorted in chunks of whole tiles, an id for each thread of a block. A chunk has at
// least as many ids as there are experts, so the rows of all chunks are no longer than the ids and
// one row.
struct ChunkedIds {
  const int64_t* ids;
  int64_t size, num_experts, chunk_size, num_chunks;
  int64_t* workspace;

  // [size]: how many ids of the same expert stand before an id in its chunk.
  PARALLEL_EXT_INLINE int64_t* ranks() const { return workspace; }
  // [num_experts]: first how many ids of an expert there are in the chunk.
  PARALLEL_EXT_INLINE int64_t* row(int64_t chunk) const {
    return workspace + size + chunk * num_experts;
  }
  PARALLEL_EXT_INLINE int64_t begin(int64_t chunk) const { return chunk * chunk_size; }
  PARALLEL_EXT_INLINE int64_t end(int64_t chunk) const {
    const int64_t next = begin(chunk + 1);
    return next < size ? next : size;
  }
  PARALLEL_EXT_INLINE bool is_expert(int64_t id) const { return 0 <= id && id < num_experts; }
};

ChunkedIds chunked_ids(const int64_t* ids, int64_t size, int64_t num_experts, int64_t* workspace) {
  const auto tiles_of = [](int64_t count) { return (count + kBlockThreads - 1) / kBlockThreads; };
  const int64_t chunk_size = std::max<int64_t>(1, tiles_of(num_experts)) * kBlockThreads;
  const int64_t num_chunks = (size + chunk_size - 1) / chunk_size;
  return {ids, size, num_experts, chunk_size, num_chunks, workspace};
}

// A block counts the ids of a chunk, a tile after the other.
__global__ void __launch_bounds__(kBlockThreads) count_kernel(const ChunkedIds chunked) {
  __shared__ int64_t tile[kBlockThreads];
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t chunk = blockIdx.x; chunk < chunked.num_chunks; chunk += gridDim.x) {
    int64_t* const counts = chunked.row(chunk);
    for (int64_t expert = thread; expert < chunked.num_experts; expert += kBlockThreads) {
      counts[expert] = 0;
    }
    const int64_t end = chunked.end(chunk);
    for (int64_t first = chunked.begin(chunk); first < end; first += kBlockThreads) {
      const int64_t i = first + thread, id = i < end ? chunked.ids[i] : -1;
      tile[thread] = id;
      __syncthreads();
      int before = 0;
      for (int other = 0; other < thread; ++other) before += tile[other] == id;
      bool is_last = chunked.is_expert(id);
      for (int other = thread + 1; other < kBlockThreads; ++other) is_last &= tile[other] != id;
      const int64_t rank = chunked.is_expert(id) ? counts[id] + before : 0;
      __syncthreads();  // before the next tile overwrites this one, and its counts those so far
      if (i < end) chunked.ranks()[i] = rank;
      if (is_last) counts[id] = rank + 1;
    }
  }
}

// A block adds up the counts of an expert. In the row of a chunk stands then how many there are in
// the chunks before.
__global__ void __launch_bounds__(kBlockThreads)
    add_counts_kernel(const ChunkedIds chunked, int64_t* __restrict__ counts) {
  const int64_t num_chunks = chunked.num_chunks, num_experts = chunked.num_experts;
  for (int64_t expert = blockIdx.x; expert < num_experts; expert += gridDim.x) {
    int64_t count = 0;
    for (int64_t first = 0; first < num_chunks; first += kBlockThreads) {
      const int64_t chunk = first + threadIdx.x;
      int64_t* const of_chunk = chunked.row(chunk) + expert;
      const Sums sums = sums_of_block(chunk < num_chunks ? *of_chunk : 0);
      if (chunk < num_chunks) *of_chunk = count + sums.before;
      count += sums.all;
    }
    if (threadIdx.x == 0) counts[expert] = count;
  }
}

// A block places the ids of a chunk. In its row stands then the slot of its first id of each
// expert.
__global__ void __launch_bounds__(kBlockThreads)
    place_kernel(const ChunkedIds chunked, const int64_t* __restrict__ counts,
                 int64_t* __restrict__ sources, int64_t* __restrict__ slots) {
  const int64_t num_experts = chunked.num_experts;
  for (int64_t chunk = blockIdx.x; chunk < chunked.num_chunks; chunk += gridDim.x) {
    int64_t* const starts = chunked.row(chunk);
    int64_t placed = 0;
    for (int64_t first = 0; first < num_experts; first += kBlockThreads) {
      const int64_t expert = first + threadIdx.x;
      const Sums sums = sums_of_block(expert < num_experts ? counts[expert] : 0);
      if (expert < num_experts) starts[expert] += placed + sums.before;
      placed += sums.all;
    }
    __syncthreads();
    const int64_t end = chunked.end(chunk);
    for (int64_t i = chunked.begin(chunk) + threadIdx.x; i < end; i += kBlockThreads) {
      const int64_t id = chunked.ids[i];
      const bool has_slot = chunked.is_expert(id);
      const int64_t slot = has_slot ? starts[id] + chunked.ranks()[i] : 0;
      if (has_slot) sources[slot] = i;
      slots[i] = slot;
      if (i >= placed) sources[i] = 0;
    }
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
    const int64_t columns = inner / pack;
    launch(gate_backward_kernel<scalar_t, pack>, grid_of_whole_rows(rows, columns), device, rows,
           columns, packs<pack>(grad), packs<pack>(gate_up), weights, packs<pack>(grad_gate_up),
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

int64_t sort_workspace(int64_t size, int64_t num_experts) {
  return chunked_ids(nullptr, size, num_experts, nullptr).num_chunks * num_experts + size;
}

void sort_ids_on_cuda(const int64_t* ids, int64_t size, int64_t num_experts, int64_t* workspace,
                      int64_t* counts, int64_t* sources, int64_t* slots, int device) {
  const ChunkedIds chunked = chunked_ids(ids, size, num_experts, workspace);
  const GridShape of_chunks = grid_of_blocks(chunked.num_chunks);
  if (size > 0) launch(count_kernel, of_chunks, device, chunked);
  if (num_experts > 0) {
    launch(add_counts_kernel, grid_of_blocks(num_experts), device, chunked, counts);
  }
  if (size > 0) launch(place_kernel, of_chunks, device, chunked, counts, sources, slots);
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
