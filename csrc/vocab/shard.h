// The two passes over a shard of the logits, or a tile of one, that the cross entropy needs, as CPU
// loops, CUDA kernels and ATen calls; vocab/loss.h is what lies between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "vocab/shard_rows.h"

namespace parallel_ext {

// This rank's part of the loss. "Wide" is fp32, or fp64 for fp64 logits. The loss is that of
// z = cap * tanh(scale * logit / cap).
struct VocabShard {
  at::Tensor logits;  // [T, Vl], columns one apart
  at::Tensor labels;  // [T] in [0, V); the ignored ones may be anything
  at::Tensor weight;  // [Vl], wide, of the classes; undefined where all are 1
  int64_t vocab_start;
  double scale;
  double cap;  // 0: z is scale * logit

  bool holds_logits() const { return scale == 1 && cap == 0; }  // z is the logit
};

// As the loops want them: columns one apart, rows that do not overlap.
inline bool has_adjacent_columns(const at::Tensor& logits) {
  const bool adjacent = logits.sym_stride(1) == 1 || logits.sym_size(1) <= 1;
  return adjacent && logits.sym_stride(0) >= logits.sym_size(1);
}

// That of the logits, which suits the products on both sides of them, unless the logits are a part
// of something much wider.
inline c10::SymInt row_stride_of_gradient(const at::Tensor& logits) {
  constexpr int64_t kWidestGap = 64;  // elements; a head's logits have less
  const c10::SymInt stride = logits.sym_stride(0), columns = logits.sym_size(1);
  const bool keep = has_adjacent_columns(logits) && stride - columns < kWidestGap;
  return keep ? stride : columns.max(1);
}

// -> record. A NaN is the maximum, and the first one's id that of it, as in torch.
at::Tensor vocab_shard_record(const VocabShard& shard, const RecordRows& rows);
at::Tensor vocab_shard_record_cpu(const VocabShard& shard, const RecordRows& rows);
at::Tensor vocab_shard_record_aten(const VocabShard& shard, const RecordRows& rows);

// Fills grad_logits [T, Vl], which may be the logits; a row of zeros where all of the token's
// factors, the column of factors [GradientRows::kCount, T], wide, are 0.
void vocab_shard_gradient(const VocabShard& shard, const at::Tensor& normalizer,
                          const at::Tensor& factors, at::Tensor& grad_logits);
void vocab_shard_gradient_cpu(const VocabShard& shard, const at::Tensor& normalizer,
                              const at::Tensor& factors, at::Tensor& grad_logits);
void vocab_shard_gradient_aten(const VocabShard& shard, const at::Tensor& normalizer,
                               const at::Tensor& factors, at::Tensor& grad_logits);

}  // namespace parallel_ext
