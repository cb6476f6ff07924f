// The arithmetic of vocab/loss.h on [T] numbers as CUDA kernels: one launch for what would be tens
// of ATen calls. They exist in builds with PARALLEL_EXT_WITH_CUDA; wide_t is float or double.
#pragma once

#include <cstdint>

#include "vocab/shard_rows.h"

namespace parallel_ext {

// The numbers of all tokens that a loss is divided by, and that of all classes, in fp64.
struct LossTotals {
  static constexpr int64_t kWeight = 0;   // of the labels; NaN instead of 0, as in torch
  static constexpr int64_t kTokens = 1;   // not ignored
  static constexpr int64_t kClasses = 2;  // the weights of all classes
  static constexpr int64_t kCount = 3;
};

// What is known of the tokens before their logits, and the options of the loss. All pointers are to
// contiguous memory of the device.
struct LossOnCuda {
  const int64_t* labels;  // [num_tokens]
  const double* weight;   // [vocab_size], of the classes; null if all are 1
  const double* totals;   // [LossTotals::kCount]; null where the loss needs none
  int64_t num_tokens, vocab_size, ignore_index;
  double label_smoothing, z_loss;
  bool is_sum, is_mean;  // the loss is one number; which is divided
};

// Numbers of each token; the same number for all of them if the stride is 0. Null where not given.
template <typename wide_t>
struct PerToken {
  const wide_t* value;
  int64_t stride;
};

// The kernels run on the current stream of the device. They use no atomics, and a sum over tokens
// has one order: same inputs, same bits.

// Fills totals [LossTotals::kCount].
void loss_totals_on_cuda(const LossOnCuda& loss, double* totals, int device);

// all_stats [num_parts, rows.count, num_tokens], of consecutive ranges of ids ->
// stats [rows.count, num_tokens] of all of them.
template <typename wide_t>
void merge_stats_on_cuda(int64_t num_parts, int64_t num_tokens, const StatsRows& rows,
                         const wide_t* all_stats, wide_t* stats, int device);

// Where the results go: [num_tokens] each, but for the normalizer's two rows, or three with the
// entropy. Null where not wanted.
template <typename wide_t>
struct LossResults {
  wide_t *loss, *log_sum_exp, *entropy;
  int64_t* id;
  wide_t* normalizer;
  double* scratch;  // [2, num_tokens], the parts of a loss that is one number
};

// The results that follow from all_stats.
template <typename wide_t>
void loss_results_on_cuda(const LossOnCuda& loss, int64_t num_parts, const StatsRows& rows,
                          const wide_t* all_stats, const LossResults<wide_t>& results, int device);

// Fills factors [GradientRows::kCount, num_tokens], given gradients of the loss, the log-sum-exp
// and the entropy.
template <typename wide_t>
struct LossGradientsOnCuda {
  PerToken<wide_t> loss, log_sum_exp, entropy;
};
template <typename wide_t>
void loss_factors_on_cuda(const LossOnCuda& loss, const LossGradientsOnCuda<wide_t>& grads,
                          const wide_t* normalizer, wide_t* factors, int device);

}  // namespace parallel_ext
