// The two passes of the cross entropy over a shard of the logits as CUDA kernels. They exist in
// builds with PARALLEL_EXT_WITH_CUDA; scalar_t is float, double, c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>

#include "base/number.h"
#include "vocab/shard_rows.h"

namespace parallel_ext {

// VocabShard of vocab/shard.h, on the device. Rows may begin anywhere.
template <typename scalar_t>
struct ShardOnCuda {
  const scalar_t* logits;  // [num_tokens, size], rows `stride` numbers apart
  const int64_t* labels;
  const wide_of<scalar_t>* weight;  // or null
  int64_t num_tokens, size, stride, vocab_start;
  wide_of<scalar_t> scale, cap;
};

// The kernels run on the current stream of the device. They use no atomics: same inputs, same bits.

// Reads the logits once, and that of the label once more: record [rows.count, num_tokens].
template <typename scalar_t>
void vocab_record_on_cuda(const ShardOnCuda<scalar_t>& shard, const RecordRows& rows,
                          wide_of<scalar_t>* record, int device);

// Reads the logits once, of rows with a factor other than 0, and writes grad_logits, with rows
// `grad_stride` apart, once: apart from the logits, or in their own place. The normalizer [2 or 3,
// num_tokens] and factors [GradientRows::kCount, num_tokens] are contiguous.
template <typename scalar_t>
void vocab_gradient_on_cuda(const ShardOnCuda<scalar_t>& shard, const wide_of<scalar_t>* normalizer,
                            const wide_of<scalar_t>* factors, scalar_t* grad_logits,
                            int64_t grad_stride, int device);

}  // namespace parallel_ext
