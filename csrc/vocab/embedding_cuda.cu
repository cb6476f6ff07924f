// No GPU has run these kernels yet: the tests compile them, and run this file on the CPU, with one
// thread for each thread of a block.
#include "base/cuda_grid.h"
#include "vocab/embedding_cuda.h"

namespace parallel_ext {
namespace {

// Rows are `columns` pieces, or packs, long in both kernels.

template <typename piece_t>
__global__ void __launch_bounds__(kBlockThreads)
    lookup_kernel(const RowLookup lookup, int64_t columns, const piece_t* __restrict__ rows,
                  piece_t* __restrict__ out) {
  for_work(lookup.num_ids, columns, [&](int64_t token, int64_t column) {
    const int64_t row = lookup.ids[token] - lookup.vocab_start;
    const bool own = 0 <= row && row < lookup.num_rows;
    out[token * columns + column] = own ? rows[row * columns + column] : piece_t{};
  });
}

template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads, kLeastBlocks)
    sum_segments_kernel(const RowSegments segments, int64_t columns,
                        const Pack<scalar_t, size>* __restrict__ in,
                        Pack<scalar_t, size>* __restrict__ out) {
  for_work(segments.num_sums, columns, [&](int64_t number, int64_t column) {
    wide_of<scalar_t> total[size] = {};
    const int64_t end = segments.first[number + 1];
    for (int64_t i = segments.first[number]; i < end; ++i) {
      const Pack<scalar_t, size> part = in[segments.order[i] * columns + column];
      PARALLEL_EXT_UNROLL
      for (int j = 0; j < size; ++j) total[j] += widen(part.value[j]);
    }
    Pack<scalar_t, size> sum;
    PARALLEL_EXT_UNROLL
    for (int j = 0; j < size; ++j) store(total[j], sum.value + j);
    out[number * columns + column] = sum;
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

template <typename scalar_t>
void sum_segments_on_cuda(const RowSegments& segments, int64_t size, const scalar_t* in,
                          scalar_t* out, int device) {
  if (segments.num_sums == 0 || size == 0) return;
  with_size<scalar_t>(size * sizeof(scalar_t) | address(in) | address(out), [&](auto pack) {
    const int64_t columns = size / pack;
    launch(sum_segments_kernel<scalar_t, pack>, grid_of_rows(segments.num_sums, columns), device,
           segments, columns, packs<pack>(in), packs<pack>(out));
  });
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t) \
  template void sum_segments_on_cuda(const RowSegments&, int64_t, const scalar_t*, scalar_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
