// From the statistics of all ranks to the loss and to the factors of its gradient, and the options
// of the loss. Arithmetic on [T] numbers in fp64, whatever the dtype of the logits: a kernel or two
// where CUDA kernels serve (vocab/loss_cuda.h), else ATen calls.
//
// Partial statistics [rows.count, T] describe each token's softmax over one range of ids, that of a
// rank or of a tile of its logits; StatsRows (vocab/shard_rows.h) names their rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "comm/comm.h"
#include "vocab/shard.h"

namespace parallel_ext {

using MaybeTensor = std::optional<at::Tensor>;

// The options that all ops of the loss share, the last arguments of their schemas. A rank holds the
// ids [vocab_start, vocab_stop).
struct VocabLoss {
  std::optional<at::Tensor> weight;  // [V], the weights of the classes, replicated
  int64_t vocab_size;
  int64_t vocab_start;
  int64_t vocab_stop;
  int64_t ignore_index;
  std::string reduction;
  double label_smoothing;
  double z_loss;
  std::optional<double> softcap;
  double logit_scale;

  static constexpr const char* kSchema =
      "Tensor? weight, int vocab_size, int vocab_start, int vocab_stop, int ignore_index, "
      "str reduction, float label_smoothing, float z_loss, float? softcap, float logit_scale";
  using Fields = std::tuple<const std::optional<at::Tensor>&, int64_t, int64_t, int64_t, int64_t,
                            const std::string&, double, double, std::optional<double>, double>;
  Fields fields() const {
    return {weight,    vocab_size,      vocab_start, vocab_stop, ignore_index,
            reduction, label_smoothing, z_loss,      softcap,    logit_scale};
  }

  // What the kernels need for logits [T, size] of the ids [start, start + size).
  VocabShard shard(const at::Tensor& logits, const at::Tensor& labels, int64_t start) const;
};

// Which statistics of each token the caller wants.
struct WantedStatistics {
  bool log_sum_exp, entropy, argmax;
};

// Checks the options and labels for `num_tokens` tokens and this rank's `shard_size` ids, which the
// argument `name` holds.
void check_vocab_loss(const char* op, const VocabLoss& loss, const char* name, int64_t shard_size,
                      int64_t num_tokens, const at::Tensor& labels, bool want_argmax);

// The part of these checks that a backward repeats, which looks at shapes only; and the check of
// the normalizer that the forward has saved for it.
void check_vocab_loss_shapes(const char* op, const VocabLoss& loss, const char* name,
                             int64_t shard_size, int64_t num_tokens, const at::Tensor& labels);
void check_normalizer(const char* op, const at::Tensor& normalizer, int64_t num_tokens,
                      bool with_entropy);

// What follows from labels and class weights for each token, in fp64.
struct Tokens {
  // What the CUDA kernels read, which find out the rest themselves.
  at::Tensor labels;                   // [T]
  at::Tensor weight_of_class, totals;  // [V], LossTotals; undefined where not needed

  // What the ATen calls read.
  at::Tensor ignored;       // [T]
  at::Tensor weight;        // [T], that of the label's class, 0 where ignored; undefined: 1
  at::Tensor total_weight;  // [], their sum, for "mean"; NaN for 0, as in torch
  at::Tensor count;         // [], of the tokens not ignored, for "mean"

  // A range of the tokens; the totals stay those of all tokens.
  Tokens narrow(int64_t start, int64_t size) const;
};

Tokens tokens_of(const VocabLoss& loss, const at::Tensor& labels);

// partial_stats [rows.count, T] of this rank -> those of all ranks [ranks, rows.count, T], in one
// all-gather. On the CPU the message also holds the rank's range of ids: every rank raises unless
// each id of the vocabulary is in one range.
at::Tensor gather_stats(const char* op, const VocabLoss& loss, const at::Tensor& partial_stats,
                        const Group& group);

// all_stats [count, rows.count, T], the partial statistics of consecutive ranges of ids: the tiles
// of a shard, or the shards of all ranks -> those [rows.count, T] of all of them. This and what
// follows merges in fp64, so that its rounding is far below that of the partial statistics; every
// rank does the same arithmetic on the same numbers, so that the bits are equal.
at::Tensor merged_stats(const at::Tensor& all_stats, const StatsRows& rows);

// The outputs of the ops of the loss, in the dtype of all_stats; a statistic that is not wanted is
// [0].
struct LossOutputs {
  at::Tensor loss, log_sum_exp, entropy, argmax;
  at::Tensor normalizer;  // [kRowsWithoutEntropy or kRowsWithEntropy, T]
};

LossOutputs outputs_of(const VocabLoss& loss, const Tokens& tokens, const at::Tensor& all_stats,
                       const StatsRows& rows, const WantedStatistics& wanted);

// LossOutputs::normalizer alone, without the entropy.
at::Tensor normalizer_of(const at::Tensor& all_stats, const StatsRows& rows);

// The gradients that a backward gets, of the loss ([T] or []), log-sum-exp and entropy ([T]).
struct LossGradients {
  std::optional<at::Tensor> loss, log_sum_exp, entropy;
};

// -> factors [GradientRows::kCount, T], in the dtype of the normalizer.
at::Tensor factors_of(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                      const at::Tensor& normalizer);

}  // namespace parallel_ext
