// The two passes of the cross entropy over a shard of the logits as CUDA kernels. They exist in
// builds with PARALLEL_EXT_WITH_CUDA; scalar_t is float, double, c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>

#include "base/number.h"
#include "vocab/shard_rows.h"

namespace parallel_ext {

// VocabShard of vocab/shard.h, on the device. Rows need no alignment.
template <typename scalar_t>
struct ShardOnCuda {
  const scalar_t* logits;  // [num_tokens, size], rows `stride` numbers apart
  const int64_t* labels;
  const wide_of<scalar_t>* weight;  // or null
  int64_t num_tokens, size, stride, vocab_start;
  wide_of<scalar_t> scale, cap;
};

// The kernels run on the current stream of the device. They use no atomics: same inputs, same bits.

// Fills partial_stats [rows.count, num_tokens]. Reads every logit once, the label's twice.
template <typename scalar_t>
void vocab_stats_on_cuda(const ShardOnCuda<scalar_t>& shard, const StatsRows& rows,
                         wide_of<scalar_t>* partial_stats, int device);

// Fills grad_logits, whose rows are `grad_stride` apart; it may be the logits, but not overlap them
// otherwise. Reads each logit once, and not in rows whose factors are all 0. The normalizer [2 or
// 3, num_tokens] and factors [GradientRows::kCount, num_tokens] are contiguous.
template <typename scalar_t>
void vocab_gradient_on_cuda(const ShardOnCuda<scalar_t>& shard, const wide_of<scalar_t>* normalizer,
                            const wide_of<scalar_t>* factors, scalar_t* grad_logits,
                            int64_t grad_stride, int device);

}  // namespace parallel_ext
