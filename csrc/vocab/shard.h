// The two passes of the cross entropy over a shard of the logits, or over a tile of a shard, as CPU
// loops, CUDA kernels and ATen calls. vocab/loss.h computes what the first pass yields and the
// second needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

#include "vocab/shard_rows.h"

namespace parallel_ext {

// This rank's part of the loss. "Wide" is fp32, or fp64 for fp64 logits. The loss is that of
// z = cap * tanh(scale * logit / cap).
struct VocabShard {
  at::Tensor logits;  // [T, Vl], columns one apart
  at::Tensor labels;  // [T] in [0, V); ignored labels may be any number
  at::Tensor weight;  // [Vl], wide, of the classes; undefined if all are 1
  int64_t vocab_start;
  double scale;
  double cap;  // 0: z is scale * logit

  bool holds_logits() const { return scale == 1 && cap == 0; }  // z is the logit
};

// The columns [T, 1] of the labels in a shard of `size` ids, 0 for those of others; and whether it
// holds them, [T].
std::pair<at::Tensor, at::Tensor> local_labels(const at::Tensor& labels, int64_t vocab_start,
                                               int64_t size);

// Whether the loops can take the logits: columns one apart, rows that do not overlap.
inline bool has_adjacent_columns(const at::Tensor& logits) {
  const bool adjacent = logits.sym_stride(1) == 1 || logits.sym_size(1) <= 1;
  return adjacent && logits.sym_stride(0) >= logits.sym_size(1);
}

inline at::Tensor with_adjacent_columns(const at::Tensor& logits) {
  return has_adjacent_columns(logits) ? logits : logits.contiguous();
}

// The gradient takes the row stride of the logits, which suits the GEMMs before and after it,
// unless the logits are columns of a much wider matrix.
inline c10::SymInt row_stride_of_gradient(const at::Tensor& logits) {
  constexpr int64_t kWidestGap = 64;  // elements; a head's logits have less
  const c10::SymInt stride = logits.sym_stride(0), columns = logits.sym_size(1);
  const bool keep = has_adjacent_columns(logits) && stride - columns < kWidestGap;
  return keep ? stride : columns.max(1);
}

// -> partial_stats [rows.count, T]. A NaN counts as the maximum, with the first NaN's id, as in
// torch.
at::Tensor vocab_shard_stats(const VocabShard& shard, const StatsRows& rows);
at::Tensor vocab_shard_stats_cpu(const VocabShard& shard, const StatsRows& rows);
at::Tensor vocab_shard_stats_aten(const VocabShard& shard, const StatsRows& rows);

// Fills grad_logits [T, Vl], which may be the logits themselves, from factors
// [GradientRows::kCount, T], wide; with zeros for a token whose factors are all 0.
void vocab_shard_gradient(const VocabShard& shard, const at::Tensor& normalizer,
                          const at::Tensor& factors, at::Tensor& grad_logits);
void vocab_shard_gradient_cpu(const VocabShard& shard, const at::Tensor& normalizer,
                              const at::Tensor& factors, at::Tensor& grad_logits);
void vocab_shard_gradient_aten(const VocabShard& shard, const at::Tensor& normalizer,
                               const at::Tensor& factors, at::Tensor& grad_logits);

}  // namespace parallel_ext
