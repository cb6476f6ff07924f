// The tests run this file on the CPU too, with one thread for each thread of a block.
#include "base/cuda_grid.h"
#include "vocab/embedding_cuda.h"

namespace parallel_ext {
namespace {

// Rows are `columns` pieces, or packs, long in all kernels.

// num_rows for an id that has no row here.
__device__ __forceinline__ int64_t row_of(const RowLookup& lookup, int64_t token) {
  const int64_t row = lookup.ids[token] - lookup.vocab_start;
  return 0 <= row && row < lookup.num_rows ? row : lookup.num_rows;
}

template <typename piece_t>
__global__ void __launch_bounds__(kBlockThreads)
    lookup_kernel(const RowLookup lookup, int64_t columns, const piece_t* __restrict__ rows,
                  piece_t* __restrict__ out) {
  for_work(lookup.num_ids, columns, [&](int64_t token, int64_t column) {
    const int64_t row = row_of(lookup, token);
    out[token * columns + column] =
        row == lookup.num_rows ? piece_t{} : rows[row * columns + column];
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    rows_kernel(const RowLookup lookup, int64_t padding_row, int32_t* __restrict__ rows) {
  for_work(1, lookup.num_ids, [&](int64_t, int64_t token) {
    const int64_t row = row_of(lookup, token);
    rows[token] = static_cast<int32_t>(row == padding_row ? lookup.num_rows : row);
  });
}

// The first place in [0, last] of the row that stands at `last`.
__device__ int64_t first_of(const int32_t* rows, int64_t last) {
  const int32_t row = rows[last];
  int64_t first = 0;
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    if (rows[middle] < row) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

// How many of the places from `first` on, kChunk at most, have the row of the first.
__device__ int64_t chunk_at(const SortedRows& sorted, int64_t first) {
  int64_t size = 1;
  while (size < SortedRows::kChunk && first + size < sorted.num_ids &&
         sorted.rows[first + size] == sorted.rows[first]) {
    ++size;
  }
  return size;
}

// Whether there are more of the row behind this chunk.
__device__ bool goes_on(const SortedRows& sorted, int64_t first, int64_t size) {
  const int64_t next = first + size;
  return next < sorted.num_ids && sorted.rows[next] == sorted.rows[first];
}

// Full chunks begin kChunk places apart or more, and so do the rests of rows with full chunks.
__device__ int64_t part_of(int64_t first, int64_t size) {
  return 2 * (first / SortedRows::kChunk) + (size < SortedRows::kChunk ? 1 : 0);
}

// A chunk is summed where it begins. A row that is one chunk is done.
template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads, kLeastBlocks)
    sum_chunks_kernel(const SortedRows sorted, int64_t columns,
                      const Pack<scalar_t, size>* __restrict__ in,
                      wide_of<scalar_t>* __restrict__ parts,
                      Pack<scalar_t, size>* __restrict__ out) {
  for_work(sorted.num_ids, columns, [&](int64_t first, int64_t column) {
    const int64_t row = sorted.rows[first];
    if (row == sorted.num_rows) return;
    const int64_t before = first - first_of(sorted.rows, first);
    if (before % SortedRows::kChunk != 0) return;
    const int64_t count = chunk_at(sorted, first);
    wide_of<scalar_t> total[size] = {};
    for (int64_t i = first; i < first + count; ++i) {
      const Pack<scalar_t, size> part = in[sorted.order[i] * columns + column];
      PARALLEL_EXT_UNROLL
      for (int j = 0; j < size; ++j) total[j] += widen(part.value[j]);
    }
    if (before == 0 && !goes_on(sorted, first, count)) {
      store_pack<scalar_t, size>(total, out + row * columns + column);
      return;
    }
    auto* sum = parts + (part_of(first, count) * columns + column) * size;
    PARALLEL_EXT_UNROLL
    for (int j = 0; j < size; ++j) sum[j] = total[j];
  });
}

// The chunks of a row are summed where the row begins.
template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads, kLeastBlocks)
    sum_parts_kernel(const SortedRows sorted, int64_t columns,
                     const wide_of<scalar_t>* __restrict__ parts,
                     Pack<scalar_t, size>* __restrict__ out) {
  for_work(sorted.num_ids, columns, [&](int64_t first, int64_t column) {
    const int64_t row = sorted.rows[first];
    if (row == sorted.num_rows || (first > 0 && sorted.rows[first - 1] == row)) return;
    int64_t count = chunk_at(sorted, first);
    if (!goes_on(sorted, first, count)) return;
    wide_of<scalar_t> total[size] = {};
    for (int64_t chunk = first;;) {
      const auto* part = parts + (part_of(chunk, count) * columns + column) * size;
      PARALLEL_EXT_UNROLL
      for (int j = 0; j < size; ++j) total[j] += part[j];
      if (!goes_on(sorted, chunk, count)) break;
      chunk += count;
      count = chunk_at(sorted, chunk);
    }
    store_pack<scalar_t, size>(total, out + row * columns + column);
  });
}

}  // namespace

void lookup_rows_on_cuda(const RowLookup& lookup, int64_t row_bytes, const void* rows, void* out,
                         int device) {
  if (lookup.num_ids == 0 || row_bytes == 0) return;  // CUDA refuses an empty grid
  with_piece(row_bytes | address(rows) | address(out), [&](auto piece) {
    using piece_t = decltype(piece);
    const int64_t columns = row_bytes / static_cast<int64_t>(sizeof(piece_t));
    launch(lookup_kernel<piece_t>, grid_of_rows(lookup.num_ids, columns), device, lookup, columns,
           static_cast<const piece_t*>(rows), static_cast<piece_t*>(out));
  });
}

void find_rows_on_cuda(const RowLookup& lookup, std::optional<int64_t> padding_idx, int32_t* rows,
                       int device) {
  if (lookup.num_ids == 0) return;
  const int64_t padding_row = padding_idx ? *padding_idx - lookup.vocab_start : -1;
  launch(rows_kernel, grid_of_rows(1, lookup.num_ids), device, lookup, padding_row, rows);
}

template <typename scalar_t>
void sum_rows_of_ids_on_cuda(const SortedRows& sorted, int64_t size, const scalar_t* in,
                             wide_of<scalar_t>* parts, scalar_t* out, int device) {
  if (sorted.num_ids == 0 || size == 0) return;
  with_size<scalar_t>(size * sizeof(scalar_t) | address(in) | address(out), [&](auto pack) {
    const int64_t columns = size / pack;
    const GridShape grid = grid_of_rows(sorted.num_ids, columns);
    launch(sum_chunks_kernel<scalar_t, pack>, grid, device, sorted, columns, packs<pack>(in), parts,
           packs<pack>(out));
    launch(sum_parts_kernel<scalar_t, pack>, grid, device, sorted, columns, parts,
           packs<pack>(out));
  });
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                           \
  template void sum_rows_of_ids_on_cuda(const SortedRows&, int64_t, const scalar_t*, \
                                        wide_of<scalar_t>*, scalar_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
