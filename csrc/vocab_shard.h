// The two passes over a shard of the logits, or a tile of one, that the cross entropy needs, as CPU
// loops and as ATen calls; vocab_loss.h is what lies between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

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

// The rows of a record [count, T], wide; -1 where not asked for. m is the maximum of the shard's z,
// or 0 where nothing is above -inf.
struct RecordRows {
  static constexpr int64_t kMax = 0;     // of z; -inf for an empty shard
  static constexpr int64_t kSum = 1;     // of exp(z - m)
  static constexpr int64_t kTarget = 2;  // z of the label where this shard holds it, else 0
  int64_t smooth = -1;                   // sum of weight * (z - m); in the next row that of weight
  int64_t moment = -1;                   // sum of exp(z - m) * (z - m)
  int64_t id = -1;                       // bits of the lowest id of the maximum: int32 in fp32
  int64_t count = 3;

  RecordRows(bool with_smooth, bool with_moment, bool with_id) {
    if (with_smooth) smooth = count, count += 2;
    if (with_moment) moment = count++;
    if (with_id) id = count++;
  }
};

// The largest id that a record can hold; an empty shard has it.
inline constexpr int64_t kLastId = 0x7fffffff;

// -> record. A NaN is the maximum, and the first one's id that of it, as in torch.
at::Tensor vocab_shard_record(const VocabShard& shard, const RecordRows& rows);
at::Tensor vocab_shard_record_cpu(const VocabShard& shard, const RecordRows& rows);
at::Tensor vocab_shard_record_aten(const VocabShard& shard, const RecordRows& rows);

// What each token's gradient with respect to z is made of, with p = exp(z - max - log_sum):
// p * (probability + entropy * (z - max - log_sum)) - column * weight - label * onehot.
struct GradientRows {
  static constexpr int64_t kProbability = 0, kColumn = 1, kLabel = 2, kEntropy = 3, kCount = 4;
};

// Rows of the normalizer, wide: the maximum of z over the whole vocabulary, the log of the sum of
// exp(z - maximum), and the entropy where it was asked for.
inline constexpr int64_t kRowsWithoutEntropy = 2, kRowsWithEntropy = 3;

// Fills grad_logits [T, Vl], which may be the logits; a row of zeros where all of the token's
// factors, the column of factors [GradientRows::kCount, T], wide, are 0.
void vocab_shard_gradient(const VocabShard& shard, const at::Tensor& normalizer,
                          const at::Tensor& factors, at::Tensor& grad_logits);
void vocab_shard_gradient_cpu(const VocabShard& shard, const at::Tensor& normalizer,
                              const at::Tensor& factors, at::Tensor& grad_logits);
void vocab_shard_gradient_aten(const VocabShard& shard, const at::Tensor& normalizer,
                               const at::Tensor& factors, at::Tensor& grad_logits);

}  // namespace parallel_ext
