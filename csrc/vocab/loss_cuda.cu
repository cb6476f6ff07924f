// The numbers are those of the ATen calls in vocab/loss_aten.cpp, NaN and inf included.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/cuda_grid.h"
#include "vocab/loss_cuda.h"

namespace parallel_ext {
namespace {

constexpr int kSumThreads = 4 * kBlockThreads;  // of the one block that sums over all tokens

// The weight of a token's label. An ignored label may be any number.
__device__ __forceinline__ double weight_of(const LossOnCuda& loss, int64_t label, bool ignored) {
  if (ignored) return 0;
  if (loss.weight == nullptr) return 1;
  const bool fits = 0 <= label && label < loss.vocab_size;
  return fits ? loss.weight[label] : std::numeric_limits<double>::quiet_NaN();
}

// The sum of the numbers of all threads of a block, for its first thread: by halves, so always in
// the same order.
__device__ __forceinline__ double sum_of_block(double value) {
  __shared__ double values[kSumThreads];
  values[threadIdx.x] = value;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
  }
  __syncthreads();
  const double sum = values[0];
  __syncthreads();  // before the next sum overwrites it
  return sum;
}

// The same for the numbers of(0) to of(count - 1).
template <typename Of>
__device__ __forceinline__ double sum_of(int64_t count, const Of& of) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += of(i);
  return sum_of_block(sum);
}

__global__ void __launch_bounds__(kSumThreads)
    totals_kernel(const LossOnCuda loss, double* __restrict__ totals) {
  const auto ignored = [&](int64_t token) { return loss.labels[token] == loss.ignore_index; };
  const double tokens =
      sum_of(loss.num_tokens, [&](int64_t token) { return ignored(token) ? 0.0 : 1.0; });
  double weight = tokens, classes = static_cast<double>(loss.vocab_size);
  if (loss.weight != nullptr) {
    weight = sum_of(loss.num_tokens, [&](int64_t token) {
      return weight_of(loss, loss.labels[token], ignored(token));
    });
    if (weight == 0) weight = std::numeric_limits<double>::quiet_NaN();
    classes = sum_of(loss.vocab_size, [&](int64_t id) { return loss.weight[id]; });
  }
  if (threadIdx.x > 0) return;
  totals[LossTotals::kWeight] = weight;
  totals[LossTotals::kTokens] = tokens;
  totals[LossTotals::kClasses] = classes;
}

// The statistics of one token over several ranges of ids.
struct TokenStats {
  double max, sum, target, smooth, weight, moment;
  int64_t id;
};

template <typename wide_t>
using id_of = std::conditional_t<sizeof(wide_t) == 8, int64_t, int32_t>;

template <typename wide_t>
__device__ __forceinline__ TokenStats merged(int64_t num_parts, int64_t num_tokens,
                                             const StatsRows& rows, const wide_t* all_stats,
                                             int64_t token) {
  const auto at = [&](int64_t part, int64_t row) -> const wide_t& {
    return all_stats[(part * rows.count + row) * num_tokens + token];
  };
  const auto number = [&](int64_t part, int64_t row) { return static_cast<double>(at(part, row)); };
  TokenStats stats{-kInfinity, 0, 0, 0, 0, 0, kLastId};
  for (int64_t part = 0; part < num_parts; ++part) {
    const double max = number(part, StatsRows::kMax);
    if (max > stats.max || max != max) stats.max = max;  // a NaN stays: nothing is above it
  }
  const double base = stats.max == -kInfinity ? 0 : stats.max;
  for (int64_t part = 0; part < num_parts; ++part) {
    const double max = number(part, StatsRows::kMax), sum = number(part, StatsRows::kSum);
    // A part with logits of -inf only has the sum 0, which 0 * NaN must not replace.
    const bool nothing = sum == 0;
    const double step = max - stats.max, factor = nothing ? 0 : std::exp(step);
    stats.sum += sum * factor;
    stats.target += number(part, StatsRows::kTarget);
    if (rows.smooth >= 0) {
      const double own = number(part, rows.smooth + 1);
      const double raised = (nothing ? 0 : max) - base;
      stats.smooth += number(part, rows.smooth) + (own == 0 ? 0 : own * raised);
      stats.weight += own;
    }
    if (rows.moment >= 0) {
      stats.moment += factor * (number(part, rows.moment) + (nothing ? 0 : step * sum));
    }
    if (rows.id >= 0 && (max == stats.max || max != max)) {
      id_of<wide_t> id;
      std::memcpy(&id, &at(part, rows.id), sizeof(id));
      stats.id = id < stats.id ? id : stats.id;
    }
  }
  return stats;
}

// Calls use(token) for the tokens of this thread.
template <typename Use>
__device__ __forceinline__ void for_tokens(int64_t num_tokens, const Use& use) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t token = this_thread().x; token < num_tokens; token += step) use(token);
}

template <typename wide_t>
__global__ void __launch_bounds__(kBlockThreads)
    merge_kernel(int64_t num_parts, int64_t num_tokens, const StatsRows rows,
                 const wide_t* __restrict__ all_stats, wide_t* __restrict__ out) {
  for_tokens(num_tokens, [&](int64_t token) {
    const TokenStats stats = merged(num_parts, num_tokens, rows, all_stats, token);
    const auto put = [&](int64_t row, double value) {
      out[row * num_tokens + token] = static_cast<wide_t>(value);
    };
    put(StatsRows::kMax, stats.max);
    put(StatsRows::kSum, stats.sum);
    put(StatsRows::kTarget, stats.target);
    if (rows.smooth >= 0) put(rows.smooth, stats.smooth), put(rows.smooth + 1, stats.weight);
    if (rows.moment >= 0) put(rows.moment, stats.moment);
    if (rows.id >= 0) {
      const auto id = static_cast<id_of<wide_t>>(stats.id);
      std::memcpy(&out[rows.id * num_tokens + token], &id, sizeof(id));
    }
  });
}

template <typename wide_t>
__global__ void __launch_bounds__(kBlockThreads)
    results_kernel(const LossOnCuda loss, int64_t num_parts, const StatsRows rows,
                   const wide_t* __restrict__ all_stats, const LossResults<wide_t> results) {
  const int64_t num_tokens = loss.num_tokens;
  for_tokens(num_tokens, [&](int64_t token) {
    const TokenStats stats = merged(num_parts, num_tokens, rows, all_stats, token);
    const double log_sum = std::log(stats.sum);
    // inf where a logit is inf, as in torch
    const double log_sum_exp = stats.max + (stats.max == kInfinity ? 0 : log_sum);
    const auto put = [&](wide_t* out, double value) {
      if (out != nullptr) out[token] = static_cast<wide_t>(value);
    };
    put(results.log_sum_exp, log_sum_exp);
    put(results.normalizer, stats.max);
    put(results.normalizer + num_tokens, log_sum);
    if (results.entropy != nullptr) {
      const double entropy = log_sum - stats.moment / stats.sum;
      put(results.entropy, entropy);
      put(results.normalizer + 2 * num_tokens, entropy);
    }
    if (results.id != nullptr) results.id[token] = stats.id;
    if (results.loss == nullptr) return;
    const int64_t label = loss.labels[token];
    const bool ignored = label == loss.ignore_index;
    // The maximum is subtracted first: a small number added to a large one would lose its digits.
    double of_label = (stats.max - stats.target) + log_sum;
    if (loss.weight != nullptr) of_label = weight_of(loss, label, ignored) * of_label;
    if (loss.label_smoothing > 0) {
      const double share = loss.label_smoothing / static_cast<double>(loss.vocab_size);
      const double smooth = stats.weight * log_sum - stats.smooth;
      of_label = (1 - loss.label_smoothing) * of_label + share * smooth;
    }
    const double square = loss.z_loss > 0 && !ignored ? loss.z_loss * log_sum_exp * log_sum_exp : 0;
    if (ignored) of_label = 0;
    if (!loss.is_sum) {
      put(results.loss, of_label + square);
    } else {
      results.scratch[token] = of_label;
      results.scratch[num_tokens + token] = square;
    }
  });
}

template <typename wide_t>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const LossOnCuda loss, const double* __restrict__ scratch,
               wide_t* __restrict__ out) {
  const auto total = [&](const double* part, int64_t divisor) {
    const double sum = sum_of(loss.num_tokens, [&](int64_t token) { return part[token]; });
    return loss.is_mean ? sum / loss.totals[divisor] : sum;
  };
  double sum = total(scratch, LossTotals::kWeight);
  if (loss.z_loss > 0) sum += total(scratch + loss.num_tokens, LossTotals::kTokens);
  if (threadIdx.x == 0) *out = static_cast<wide_t>(sum);
}

template <typename wide_t>
__global__ void __launch_bounds__(kBlockThreads)
    factors_kernel(const LossOnCuda loss, const LossGradientsOnCuda<wide_t> grads,
                   const wide_t* __restrict__ normalizer, wide_t* __restrict__ factors) {
  const int64_t num_tokens = loss.num_tokens;
  for_tokens(num_tokens, [&](int64_t token) {
    const auto of = [&](const PerToken<wide_t>& grad) {
      return static_cast<double>(grad.value[token * grad.stride]);
    };
    const auto normal = [&](int64_t row) {
      return static_cast<double>(normalizer[row * num_tokens + token]);
    };
    double probability = 0, column = 0, of_label = 0, entropy = 0;
    const int64_t label = loss.labels[token];
    const bool ignored = label == loss.ignore_index;
    if (grads.loss.value != nullptr && !ignored) {
      const auto divided = [&](int64_t divisor) {
        return loss.is_mean ? of(grads.loss) / loss.totals[divisor] : of(grads.loss);
      };
      const double grad = divided(LossTotals::kWeight);
      of_label = loss.weight == nullptr ? grad : grad * weight_of(loss, label, ignored);
      probability = of_label;
      if (loss.label_smoothing > 0) {
        column = grad * (loss.label_smoothing / static_cast<double>(loss.vocab_size));
        of_label = of_label * (1 - loss.label_smoothing);
        const double classes = loss.weight == nullptr ? static_cast<double>(loss.vocab_size)
                                                      : loss.totals[LossTotals::kClasses];
        probability = of_label + column * classes;
      }
      if (loss.z_loss > 0) {
        const double of_square = 2 * loss.z_loss * divided(LossTotals::kTokens);
        probability += of_square * (normal(0) + normal(1));
      }
    }
    if (grads.log_sum_exp.value != nullptr) probability += of(grads.log_sum_exp);
    if (grads.entropy.value != nullptr) {
      entropy = -of(grads.entropy);
      if (entropy != 0) probability += entropy * normal(2);
    }
    const auto put = [&](int64_t row, double value) {
      factors[row * num_tokens + token] = static_cast<wide_t>(value);
    };
    put(GradientRows::kProbability, probability);
    put(GradientRows::kColumn, column);
    put(GradientRows::kLabel, of_label);
    put(GradientRows::kEntropy, entropy);
  });
}

GridShape grid_of_tokens(int64_t num_tokens) {
  return grid_of_blocks((num_tokens + kBlockThreads - 1) / kBlockThreads);
}

const GridShape kOneBlock{dim3(1), dim3(kSumThreads)};

}  // namespace

void loss_totals_on_cuda(const LossOnCuda& loss, double* totals, int device) {
  launch(totals_kernel, kOneBlock, device, loss, totals);
}

template <typename wide_t>
void merge_stats_on_cuda(int64_t num_parts, int64_t num_tokens, const StatsRows& rows,
                         const wide_t* all_stats, wide_t* stats, int device) {
  if (num_tokens == 0) return;  // CUDA refuses an empty grid
  launch(merge_kernel<wide_t>, grid_of_tokens(num_tokens), device, num_parts, num_tokens, rows,
         all_stats, stats);
}

template <typename wide_t>
void loss_results_on_cuda(const LossOnCuda& loss, int64_t num_parts, const StatsRows& rows,
                          const wide_t* all_stats, const LossResults<wide_t>& results, int device) {
  if (loss.num_tokens > 0) {
    launch(results_kernel<wide_t>, grid_of_tokens(loss.num_tokens), device, loss, num_parts, rows,
           all_stats, results);
  }
  if (loss.is_sum && results.loss != nullptr) {  // of no tokens too
    launch(sum_kernel<wide_t>, kOneBlock, device, loss, results.scratch, results.loss);
  }
}

template <typename wide_t>
void loss_factors_on_cuda(const LossOnCuda& loss, const LossGradientsOnCuda<wide_t>& grads,
                          const wide_t* normalizer, wide_t* factors, int device) {
  if (loss.num_tokens == 0) return;
  launch(factors_kernel<wide_t>, grid_of_tokens(loss.num_tokens), device, loss, grads, normalizer,
         factors);
}

#define PARALLEL_EXT_INSTANTIATE(wide_t)                                                          \
  template void merge_stats_on_cuda(int64_t, int64_t, const StatsRows&, const wide_t*, wide_t*,   \
                                    int);                                                         \
  template void loss_results_on_cuda(const LossOnCuda&, int64_t, const StatsRows&, const wide_t*, \
                                     const LossResults<wide_t>&, int);                            \
  template void loss_factors_on_cuda(const LossOnCuda&, const LossGradientsOnCuda<wide_t>&,       \
                                     const wide_t*, wide_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)

}  // namespace parallel_ext
