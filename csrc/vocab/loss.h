// What the ranks' records of a token say: the loss and its options, and what the gradient of each
// token is made of. Arithmetic on [T] numbers in fp64, whatever the logits are or were made from.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "vocab/shard.h"

namespace parallel_ext {

// The options that all ops of the loss share. A rank holds [vocab_start, vocab_stop) of the ids.
struct VocabLoss {
  std::optional<at::Tensor> weight;  // [V], of the classes, replicated
  int64_t vocab_size;
  int64_t vocab_start;
  int64_t vocab_stop;
  int64_t ignore_index;
  std::string reduction;
  double label_smoothing;
  double z_loss;
  std::optional<double> softcap;
  double logit_scale;

  // The part of the ids [start, start + size) of this rank's range, whose logits these are.
  VocabShard shard(const at::Tensor& logits, const at::Tensor& labels, int64_t start) const;
};

// Which statistics of each token are asked for.
struct Wanted {
  bool log_sum_exp, entropy, argmax;
};

// `shard_size` of the vocabulary are there on this rank, in `name`, and `num_tokens` rows.
void check_vocab_loss(const char* op, const VocabLoss& loss, const char* name, int64_t shard_size,
                      int64_t num_tokens, const at::Tensor& labels, bool want_argmax);

// The part of it that a backward needs too, which follows shapes; and what the forward left it.
void check_vocab_loss_shapes(const char* op, const VocabLoss& loss, const char* name,
                             int64_t shard_size, int64_t num_tokens, const at::Tensor& labels);
void check_normalizer(const char* op, const at::Tensor& normalizer, int64_t num_tokens,
                      bool with_entropy);

// What labels and class weights make of the tokens, in fp64.
struct Tokens {
  at::Tensor ignored;       // [T]
  at::Tensor weight;        // [T], of the label's class, 0 where ignored; undefined: 1
  at::Tensor total_weight;  // [], of all tokens, for "mean"; NaN for 0, as in torch
  at::Tensor count;         // [], of those not ignored, for "mean"

  // Some of them, in the totals of all.
  Tokens narrow(int64_t start, int64_t size) const;
};

Tokens tokens_of(const VocabLoss& loss, const at::Tensor& labels);

// `record` [rows, T] of every rank, [ranks, rows, T], in one all-gather. On the CPU the ranks'
// ranges come along, and are refused on all ranks unless each id is in one of them.
at::Tensor exchange_records(const char* op, const VocabLoss& loss, const at::Tensor& record,
                            int64_t group_size, const std::string& group_name);

// What several records of each token say together: of the tiles of a shard, or of the ranks. The
// same arithmetic on the same numbers on every rank, so that the bits are equal too; in fp64 its
// own rounding does not count.
struct Merged {
  at::Tensor max;                     // of z; -inf where nothing is above it
  at::Tensor sum;                     // of exp(z - max)
  at::Tensor target;                  // z of the label
  at::Tensor smooth, weight, moment;  // as in RecordRows; undefined where not asked for
  at::Tensor id;                      // int64
};

// records [count, rows.count, T] of consecutive ranges of ids.
Merged merge(const at::Tensor& records, const RecordRows& rows);

// The one record [rows.count, T] that says the same.
at::Tensor to_record(const Merged& merged, const RecordRows& rows, at::ScalarType dtype);

// Of the whole vocabulary, in `dtype`; a statistic that is not wanted is [0].
struct LossOutputs {
  at::Tensor loss, log_sum_exp, entropy, argmax;
  at::Tensor normalizer;  // [kRowsWithoutEntropy or kRowsWithEntropy, T]
};

LossOutputs outputs_of(const VocabLoss& loss, const Tokens& tokens, const Merged& merged,
                       const Wanted& wanted, at::ScalarType dtype);

// Of the gradient, as LossOutputs has it.
at::Tensor normalizer_of(const Merged& merged, bool with_entropy, at::ScalarType dtype);

// What arrives in backward: gradients of the loss ([T] or []), log-sum-exp and entropy ([T]).
struct LossGradients {
  std::optional<at::Tensor> loss, log_sum_exp, entropy;
};

// The rows of GradientRows, in the dtype of the normalizer.
at::Tensor factors_of(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                      const at::Tensor& normalizer);

}  // namespace parallel_ext
