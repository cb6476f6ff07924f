// The embedding's work on rows as CUDA kernels. They exist in builds with PARALLEL_EXT_WITH_CUDA;
// scalar_t is float, double, c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>

#include "base/number.h"

namespace parallel_ext {

// All pointers are to contiguous memory of the device; outputs overlap nothing else. The kernels
// run on the current stream of the device. They use no atomics: same inputs, same bits.

// rows [num_rows, row_bytes], which are those of the ids from vocab_start on ->
// out [num_ids, row_bytes], with zeros for all other ids.
struct RowLookup {
  const int64_t* ids;
  int64_t num_ids, vocab_start, num_rows;
};
void lookup_rows_on_cuda(const RowLookup& lookup, int64_t row_bytes, const void* rows, void* out,
                         int device);

// in [M, size] -> out [num_sums, size], the sums of the rows order[first[i]] to
// order[first[i + 1] - 1]: one after the other, in fp32 or wider, rounded once.
struct RowSegments {
  const int64_t* order;  // at least first[num_sums], each in [0, M)
  const int64_t* first;  // [num_sums + 1], ascending
  int64_t num_sums;
};
template <typename scalar_t>
void sum_segments_on_cuda(const RowSegments& segments, int64_t size, const scalar_t* in,
                          scalar_t* out, int device);

}  // namespace parallel_ext
