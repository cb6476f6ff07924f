// The two passes of the cross entropy over a shard of the logits, as CPU loops.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>

#include "exp.h"
#include "kernel_choice.h"
#include "number.h"
#include "vocab_cross_entropy.h"

namespace parallel_ext {
namespace {

// Sums run over kLanes independent accumulators that are folded in order: the compiler keeps them
// in vector registers, and the bits depend neither on the threads nor on the instruction set's
// width.
constexpr int64_t kLanes = 64;
// A block is read twice, for its maximum and for its sum, and stays in the first-level cache.
constexpr int64_t kBlock = 2048;

struct MaxAndSum {
  float max;
  float sum;
};

template <typename scalar_t>
PARALLEL_EXT_INLINE MaxAndSum max_and_sum(const scalar_t* row, int64_t size) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float max = kLowest;
  double sum = 0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t stop = std::min(size, start + kBlock);
    const int64_t whole = start + (stop - start) / kLanes * kLanes;
    float lane[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) lane[j] = kLowest;
    for (int64_t i = start; i < whole; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) {
        const float x = to_float(row[i + j]);
        lane[j] = x > lane[j] ? x : lane[j];
      }
    }
    for (int64_t i = whole; i < stop; ++i) lane[0] = std::max(lane[0], to_float(row[i]));
    float block_max = lane[0];
    for (int64_t j = 1; j < kLanes; ++j) block_max = std::max(block_max, lane[j]);
    if (block_max > max) {
      sum *= std::exp(static_cast<double>(max) - block_max);
      max = block_max;
    }
    // Nothing but -inf so far contributes nothing; a NaN must still reach the sum.
    const float base = max == kLowest ? 0.0f : max;
    for (int64_t j = 0; j < kLanes; ++j) lane[j] = 0.0f;
    for (int64_t i = start; i < whole; i += kLanes) {
      for (int64_t j = 0; j < kLanes; ++j) lane[j] += exp_nonpositive(to_float(row[i + j]) - base);
    }
    for (int64_t i = whole; i < stop; ++i) lane[0] += exp_nonpositive(to_float(row[i]) - base);
    for (int64_t j = 0; j < kLanes; ++j) sum += lane[j];
  }
  return {max, static_cast<float>(sum)};
}

template <typename scalar_t>
PARALLEL_EXT_INLINE void softmax_times(const scalar_t* row, int64_t size, float max, float log_sum,
                                       float scale, scalar_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    store(exp_nonpositive((to_float(row[i]) - max) - log_sum) * scale, out + i);
  }
}

// One function per dtype, since target_clones does not go with templates.
#define PARALLEL_EXT_ROW_LOOPS(scalar_t)                                                    \
  PARALLEL_EXT_MULTIVERSION MaxAndSum row_record(const scalar_t* row, int64_t size) {       \
    return max_and_sum(row, size);                                                          \
  }                                                                                         \
  PARALLEL_EXT_MULTIVERSION void row_gradient(const scalar_t* row, int64_t size, float max, \
                                              float log_sum, float scale, scalar_t* out) {  \
    softmax_times(row, size, max, log_sum, scale, out);                                     \
  }

PARALLEL_EXT_ROW_LOOPS(float)
PARALLEL_EXT_ROW_LOOPS(c10::BFloat16)
PARALLEL_EXT_ROW_LOOPS(c10::Half)

// fp64 proves the algebra; it need not be fast.
struct MaxAndSum64 {
  double max;
  double sum;
};

MaxAndSum64 row_record(const double* row, int64_t size) {
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t i = 0; i < size; ++i) max = std::max(max, row[i]);
  const double base = std::isinf(max) && max < 0 ? 0.0 : max;
  for (int64_t i = 0; i < size; ++i) sum += std::exp(row[i] - base);
  return {max, sum};
}

void row_gradient(const double* row, int64_t size, double max, double log_sum, double scale,
                  double* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = std::exp((row[i] - max) - log_sum) * scale;
}

template <typename scalar_t>
using record_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

}  // namespace

at::Tensor shard_record_cpu(const at::Tensor& logits, const at::Tensor& labels,
                            int64_t vocab_start) {
  const int64_t num_tokens = logits.size(0), size = logits.size(1), stride = logits.stride(0);
  const auto dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor record = at::empty({3, num_tokens}, logits.options().dtype(dtype));
  const int64_t* label = labels.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, logits.scalar_type(), "vocab_cross_entropy_forward", [&] {
        const scalar_t* data = logits.const_data_ptr<scalar_t>();
        auto* out = record.mutable_data_ptr<record_t<scalar_t>>();
        at::parallel_for(0, num_tokens, 1, [&](int64_t begin, int64_t end) {
          for (int64_t token = begin; token < end; ++token) {
            const scalar_t* row = data + token * stride;
            const auto stats = row_record(row, size);
            const int64_t column = label[token] - vocab_start;
            out[token] = stats.max;
            out[num_tokens + token] = stats.sum;
            out[2 * num_tokens + token] =
                0 <= column && column < size ? static_cast<record_t<scalar_t>>(row[column]) : 0;
          }
        });
      });
  return record;
}

void shard_gradient_cpu(const at::Tensor& logits, const at::Tensor& labels,
                        const at::Tensor& normalizer, const at::Tensor& scale, int64_t vocab_start,
                        at::Tensor& grad_logits) {
  const int64_t num_tokens = logits.size(0), size = logits.size(1);
  const int64_t stride = logits.stride(0), out_stride = grad_logits.stride(0);
  const int64_t* label = labels.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, logits.scalar_type(), "vocab_cross_entropy_backward", [&] {
        using value_t = record_t<scalar_t>;
        const scalar_t* data = logits.const_data_ptr<scalar_t>();
        const value_t* max = normalizer.const_data_ptr<value_t>();
        const value_t* log_sum = max + num_tokens;
        const value_t* factor = scale.const_data_ptr<value_t>();
        scalar_t* out = grad_logits.mutable_data_ptr<scalar_t>();
        at::parallel_for(0, num_tokens, 1, [&](int64_t begin, int64_t end) {
          for (int64_t token = begin; token < end; ++token) {
            const scalar_t* row = data + token * stride;
            scalar_t* grad = out + token * out_stride;
            if (factor[token] == 0) {
              std::fill(grad, grad + size, scalar_t(0));
              continue;
            }
            row_gradient(row, size, max[token], log_sum[token], factor[token], grad);
            const int64_t column = label[token] - vocab_start;
            if (0 <= column && column < size) {
              const value_t probability =
                  std::exp((static_cast<value_t>(row[column]) - max[token]) - log_sum[token]);
              grad[column] = static_cast<scalar_t>((probability - 1) * factor[token]);
            }
          }
        });
      });
}

}  // namespace parallel_ext
