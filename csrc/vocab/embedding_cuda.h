// The embedding's work on rows as CUDA kernels. They exist in builds with PARALLEL_EXT_WITH_CUDA;
// scalar_t is float, double, c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>
#include <optional>

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

// -> rows [num_ids]: the row of each id, and num_rows for an id that has none or is the padding.
void find_rows_on_cuda(const RowLookup& lookup, std::optional<int64_t> padding_idx, int32_t* rows,
                       int device);

// in [num_ids, size] -> out [num_rows, size]: to each row of `out` that `rows` names, the sum of
// the rows of `in` at the same places, in fp32 or wider, rounded once; it leaves the other rows of
// `out` alone. Summed are kChunk at a time, one after the other, and then the chunks. The tokens of
// one id are chunked by themselves, so that the sum does not depend on which rows a rank has.
struct SortedRows {
  static constexpr int64_t kChunk = 64;

  const int32_t* rows;   // [num_ids], ascending; num_rows stands for no row
  const int64_t* order;  // [num_ids], where each is in `in`
  int64_t num_ids, num_rows;

  // Of `parts`, [num_parts, size], which hold the sums of chunks.
  int64_t num_parts() const { return 2 * (num_ids / kChunk + 1); }
};
template <typename scalar_t>
void sum_rows_of_ids_on_cuda(const SortedRows& sorted, int64_t size, const scalar_t* in,
                             wide_of<scalar_t>* parts, scalar_t* out, int device);

}  // namespace parallel_ext
