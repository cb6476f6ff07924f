// The two passes over a shard of the logits that the cross entropy needs; vocab_cross_entropy.cpp
// does what lies between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace parallel_ext {

// logits [T, Vl] with columns one apart, labels [T] -> record [3, T] in fp32 (fp64 for fp64): the
// shard's maximum, its sum of exp(logit - maximum), and the label's logit where the label lies in
// [vocab_start, vocab_start + Vl), else 0. An empty or all -inf shard gives (-inf, 0, .).
at::Tensor shard_record_cpu(const at::Tensor& logits, const at::Tensor& labels,
                            int64_t vocab_start);

// Fills grad_logits[t] = (exp(logits[t] - max[t] - log_sum[t]) - onehot) * scale[t], a row of zeros
// where scale[t] is 0. normalizer [2, T] holds max and log_sum, scale is [T]; both in the record's
// dtype.
void shard_gradient_cpu(const at::Tensor& logits, const at::Tensor& labels,
                        const at::Tensor& normalizer, const at::Tensor& scale, int64_t vocab_start,
                        at::Tensor& grad_logits);

}  // namespace parallel_ext
