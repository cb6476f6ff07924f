// The two passes of the cross entropy over a shard of the logits, as CPU loops: each reads the
// logits once from memory, a block at a time.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/exp.h"
#include "base/kernel_choice.h"
#include "base/number.h"
#include "base/prefetch.h"
#include "check.h"
#include "vocab/shard.h"

namespace parallel_ext {
namespace {

// Sums run over kLanes independent accumulators that are folded in order: the compiler keeps them
// in vector registers, and the bits depend neither on the threads nor on the instruction set's
// width.
constexpr int64_t kLanes = 64;
// A block is read several times, and stays in the first-level cache.
constexpr int64_t kBlock = 2048;

// How a row's logits become z, and which statistics are wanted besides its maximum and its sum.
template <typename wide_t>
struct RowTask {
  int64_t size;
  const wide_t* weight;  // or null
  wide_t scale;
  wide_t cap;
  bool holds_logits;
  bool smooth, moment, id;
};

// The statistics of a row so far. Its sums use `base` instead of the maximum, which may still
// rise.
template <typename wide_t>
struct RowStats {
  wide_t max = kLowest<wide_t>, base = kLowest<wide_t>;
  double sum = 0, smooth = 0, weight = 0, moment = 0;
  int64_t id = 0;
  bool found_nan = false;
};

// Computes z for a block of logits where it is not the logit itself.
template <typename scalar_t, typename wide_t>
PARALLEL_EXT_INLINE void block_to_z(const scalar_t* block, int64_t size,
                                    const RowTask<wide_t>& task, wide_t* z) {
  const wide_t scale = task.scale, cap = task.cap;
  if (cap == 0) {
    for_each_ahead(block, size, [&](int64_t i) { z[i] = widen(block[i]) * scale; });
  } else {
    for_each_ahead(block, size, [&](int64_t i) { z[i] = to_z(widen(block[i]), scale, cap); });
  }
}

// The sum of term(i) over the indices below `size`.
template <typename wide_t, typename Term>
PARALLEL_EXT_INLINE double sum_in_lanes(int64_t size, Term term) {
  const int64_t whole = size / kLanes * kLanes;
  wide_t lane[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lane[j] = 0;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += term(i + j);
  }
  for (int64_t i = whole; i < size; ++i) lane[0] += term(i);
  double sum = 0;
  for (int64_t j = 0; j < kLanes; ++j) sum += lane[j];
  return sum;
}

template <typename wide_t>
struct MaxAndSum {
  wide_t max;
  double sum;
};

// The maximum of the numbers that are not NaN and, if wanted, in the same pass the sum of
// exp(z - base).
template <bool kWithSum, typename elem_t, typename wide_t>
PARALLEL_EXT_INLINE MaxAndSum<wide_t> max_and_sum(const elem_t* z, int64_t size, wide_t base) {
  const int64_t whole = size / kLanes * kLanes;
  wide_t max[kLanes], sum[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) max[j] = kLowest<wide_t>, sum[j] = 0;
  const auto add = [&](int64_t i, int64_t j) {
    const wide_t x = widen(z[i]);
    max[j] = x > max[j] ? x : max[j];
    if constexpr (kWithSum) sum[j] += exp_below_88(x - base);
  };
  for (int64_t i = 0; i < whole; i += kLanes) {
    prefetch(z + i, kLanes);
    for (int64_t j = 0; j < kLanes; ++j) add(i + j, j);
  }
  for (int64_t i = whole; i < size; ++i) add(i, 0);
  MaxAndSum<wide_t> all{max[0], 0};
  for (int64_t j = 0; j < kLanes; ++j) all.max = max[j] > all.max ? max[j] : all.max;
  for (int64_t j = 0; j < kLanes; ++j) all.sum += sum[j];
  return all;
}

// Makes the maximum the base of the sums so far.
template <typename wide_t>
PARALLEL_EXT_INLINE void raise_base(RowStats<wide_t>& stats) {
  const bool first = stats.base == kLowest<wide_t>;
  const double max = stats.max, step = stats.base - max, factor = std::exp(step);
  stats.smooth += stats.weight * (first ? -max : step);
  stats.moment = factor == 0 ? 0 : factor * (stats.moment + (first ? 0 : step) * stats.sum);
  stats.sum *= factor;
  stats.base = stats.max;
}

template <typename elem_t, typename wide_t>
PARALLEL_EXT_INLINE void add_block(const elem_t* z, int64_t start, int64_t size,
                                   const RowTask<wide_t>& task, RowStats<wide_t>& stats) {
  const auto find = [&](auto matches) {
    return std::find_if(z, z + size, [&](elem_t x) { return matches(widen(x)); }) - z;
  };
  const auto rise = [&](wide_t max) {
    if (!(max > stats.max)) return;
    stats.max = max;
    if (task.id && !stats.found_nan) {
      stats.id = start + find([max](wide_t x) { return x == max; });
    }
  };
  if (stats.base == kLowest<wide_t>) rise(max_and_sum<false>(z, size, wide_t(0)).max);
  if (stats.max > stats.base) raise_base(stats);
  // Logits of -inf only contribute nothing, but a NaN must still reach the sum.
  const auto base = [&stats] { return stats.base == kLowest<wide_t> ? 0 : stats.base; };
  auto found = max_and_sum<true>(z, size, base());
  if (found.max > stats.max) rise(found.max);
  if (stats.max > stats.base + kAboveBase) {
    raise_base(stats);
    found = max_and_sum<true>(z, size, base());
  }
  stats.sum += found.sum;
  const wide_t subtracted = base();
  if (task.smooth && task.weight == nullptr) {
    stats.smooth += sum_in_lanes<wide_t>(size, [&](int64_t i) { return widen(z[i]) - subtracted; });
    stats.weight += static_cast<double>(size);
  } else if (task.smooth) {
    const wide_t* weight = task.weight + start;
    stats.smooth += sum_in_lanes<wide_t>(
        size, [&](int64_t i) { return weight[i] * (widen(z[i]) - subtracted); });
    stats.weight += sum_in_lanes<wide_t>(size, [&](int64_t i) { return weight[i]; });
  }
  if (task.moment) {
    stats.moment += sum_in_lanes<wide_t>(size, [&](int64_t i) {
      const wide_t x = widen(z[i]) - subtracted;
      return x == kLowest<wide_t> ? 0 : exp_below_88(x) * x;
    });
  }
  if (std::isnan(found.sum) && !stats.found_nan) {  // by a NaN, or by inf - inf
    const int64_t nan = find([](wide_t x) { return std::isnan(x); });
    stats.found_nan = nan < size;
    if (stats.found_nan) stats.id = start + nan;
  }
}

template <typename scalar_t, typename wide_t>
PARALLEL_EXT_INLINE RowStats<wide_t> stats_of_row(const scalar_t* row,
                                                  const RowTask<wide_t>& task) {
  RowStats<wide_t> stats;
  wide_t z[kBlock];
  for (int64_t start = 0; start < task.size; start += kBlock) {
    const int64_t size = std::min(kBlock, task.size - start);
    if (task.holds_logits) {
      add_block(row + start, start, size, task, stats);
    } else {
      block_to_z(row + start, size, task, z);
      add_block(z, start, size, task, stats);
    }
  }
  if (stats.max > stats.base) raise_base(stats);
  return stats;
}

// The gradient where z is the logit and only the label's column differs from the others.
template <typename scalar_t, typename wide_t>
PARALLEL_EXT_INLINE void plain_gradient_of_row(const scalar_t* row, const RowTask<wide_t>& task,
                                               const RowFactors<wide_t> factor, int64_t label,
                                               scalar_t* out) {
  const auto grad = [factor](wide_t z) {
    return exp_below_88((z - factor.max) - factor.log_sum) * factor.probability - factor.column;
  };
  const wide_t of_label = label < 0 ? 0 : grad(widen(row[label])) - factor.label;
  const auto fill = [&](const scalar_t* from) {
    for (int64_t start = 0; start < task.size; start += kPrefetchChunk) {
      const int64_t stop = std::min(start + kPrefetchChunk, task.size);
      prefetch(from + start, stop - start);
      for (int64_t i = start; i < stop; ++i) store(grad(widen(from[i])), out + i);
    }
  };
  // The compiler vectorizes the loop only if it knows whether `from` and `out` are the same memory.
  row == out ? fill(out) : fill(row);
  if (label >= 0) store(of_label, out + label);
}

template <typename scalar_t, typename wide_t>
PARALLEL_EXT_INLINE void gradient_of_row(const scalar_t* row, const RowTask<wide_t>& task,
                                         const RowFactors<wide_t> factor, int64_t label,
                                         scalar_t* out) {
  wide_t z[kBlock], grad[kBlock];
  for (int64_t start = 0; start < task.size; start += kBlock) {
    const int64_t size = std::min(kBlock, task.size - start);
    if (task.holds_logits) {
      for_each_ahead(row + start, size, [&](int64_t i) { z[i] = widen(row[start + i]); });
    } else {
      block_to_z(row + start, size, task, z);
    }
    for (int64_t i = 0; i < size; ++i) {
      const wide_t x = (z[i] - factor.max) - factor.log_sum;
      const wide_t log_p = x == kLowest<wide_t> ? 0 : x;  // 0 * log 0 is 0
      const wide_t p = exp_below_88(x);
      grad[i] = p * factor.probability + factor.entropy * (p * log_p);  // the last is never large
    }
    if (task.weight != nullptr) {
      for (int64_t i = 0; i < size; ++i) grad[i] -= factor.column * task.weight[start + i];
    } else {
      for (int64_t i = 0; i < size; ++i) grad[i] -= factor.column;
    }
    if (start <= label && label < start + size) grad[label - start] -= factor.label;
    if (task.cap != 0) {
      for (int64_t i = 0; i < size; ++i) {
        const wide_t t = z[i] / task.cap;
        grad[i] *= (1 - t) * (1 + t);
      }
    }
    for (int64_t i = 0; i < size; ++i) store(grad[i] * task.scale, out + start + i);
  }
}

// One function per dtype: target_clones does not work with templates.
#define PARALLEL_EXT_ROW_LOOPS(scalar_t, wide_t)                                                \
  PARALLEL_EXT_MULTIVERSION RowStats<wide_t> row_stats(const scalar_t* row,                     \
                                                       const RowTask<wide_t>& task) {           \
    return stats_of_row(row, task);                                                             \
  }                                                                                             \
  PARALLEL_EXT_MULTIVERSION void plain_row_gradient(                                            \
      const scalar_t* row, const RowTask<wide_t>& task, const RowFactors<wide_t>& factor,       \
      int64_t label, scalar_t* out) {                                                           \
    plain_gradient_of_row(row, task, factor, label, out);                                       \
  }                                                                                             \
  PARALLEL_EXT_MULTIVERSION void row_gradient(const scalar_t* row, const RowTask<wide_t>& task, \
                                              const RowFactors<wide_t>& factor, int64_t label,  \
                                              scalar_t* out) {                                  \
    gradient_of_row(row, task, factor, label, out);                                             \
  }

PARALLEL_EXT_ROW_LOOPS(float, float)
PARALLEL_EXT_ROW_LOOPS(c10::BFloat16, float)
PARALLEL_EXT_ROW_LOOPS(c10::Half, float)
PARALLEL_EXT_ROW_LOOPS(double, double)

template <typename wide_t>
RowTask<wide_t> row_task(const VocabShard& shard) {
  return {shard.logits.size(1),
          shard.weight.defined() ? shard.weight.const_data_ptr<wide_t>() : nullptr,
          static_cast<wide_t>(shard.scale),
          static_cast<wide_t>(shard.cap),
          shard.holds_logits(),
          false,
          false,
          false};
}

template <typename scalar_t>
void fill_stats(const VocabShard& shard, const StatsRows& rows, at::Tensor& partial_stats) {
  using wide_t = wide_of<scalar_t>;
  RowTask<wide_t> task = row_task<wide_t>(shard);
  task.smooth = rows.smooth >= 0, task.moment = rows.moment >= 0, task.id = rows.id >= 0;
  const scalar_t* logits = shard.logits.const_data_ptr<scalar_t>();
  const int64_t* labels = shard.labels.const_data_ptr<int64_t>();
  const int64_t num_tokens = shard.logits.size(0), stride = shard.logits.stride(0);
  wide_t* out = partial_stats.mutable_data_ptr<wide_t>();
  at::parallel_for(0, num_tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const scalar_t* row = logits + token * stride;
      const auto put = [&](int64_t name, wide_t value) { out[name * num_tokens + token] = value; };
      const RowStats<wide_t> of_row = row_stats(row, task);
      constexpr wide_t kNaN = std::numeric_limits<wide_t>::quiet_NaN();
      put(StatsRows::kMax, of_row.found_nan ? kNaN : of_row.max);
      put(StatsRows::kSum, static_cast<wide_t>(of_row.sum));
      const int64_t label = column_of(labels[token], shard.vocab_start, task.size);
      put(StatsRows::kTarget, label >= 0 ? to_z(widen(row[label]), task.scale, task.cap) : 0);
      if (task.smooth) {
        put(rows.smooth, static_cast<wide_t>(of_row.smooth));
        put(rows.smooth + 1, static_cast<wide_t>(of_row.weight));
      }
      if (task.moment) put(rows.moment, static_cast<wide_t>(of_row.moment));
      if (task.id) {
        const int64_t id = task.size == 0 ? kLastId : shard.vocab_start + of_row.id;
        put(rows.id, bits_of_id<wide_t>(id));
      }
    }
  });
}

template <typename scalar_t>
void fill_gradient(const VocabShard& shard, const at::Tensor& normalizer, const at::Tensor& factors,
                   at::Tensor& grad_logits) {
  using wide_t = wide_of<scalar_t>;
  const RowTask<wide_t> task = row_task<wide_t>(shard);
  const scalar_t* logits = shard.logits.const_data_ptr<scalar_t>();
  const int64_t* labels = shard.labels.const_data_ptr<int64_t>();
  const int64_t num_tokens = shard.logits.size(0);
  const int64_t stride = shard.logits.stride(0), grad_stride = grad_logits.stride(0);
  const wide_t* normal = normalizer.const_data_ptr<wide_t>();
  const wide_t* factor = factors.const_data_ptr<wide_t>();
  scalar_t* grads = grad_logits.mutable_data_ptr<scalar_t>();
  at::parallel_for(0, num_tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const RowFactors<wide_t> row_factors(normal, factor, num_tokens, token);
      scalar_t* grad = grads + token * grad_stride;
      if (row_factors.all_zero()) {
        std::fill(grad, grad + task.size, scalar_t(0));
        continue;
      }
      const int64_t label = column_of(labels[token], shard.vocab_start, task.size);
      const scalar_t* row = logits + token * stride;
      const bool uniform = row_factors.column == 0 || task.weight == nullptr;
      if (task.holds_logits && uniform && row_factors.entropy == 0) {
        plain_row_gradient(row, task, row_factors, label, grad);
      } else {
        row_gradient(row, task, row_factors, label, grad);
      }
    }
  });
}

}  // namespace

at::Tensor vocab_shard_stats_cpu(const VocabShard& shard, const StatsRows& rows) {
  at::Tensor partial_stats = at::empty({rows.count, shard.logits.size(0)},
                                       shard.logits.options().dtype(wide_type(shard.logits)));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, shard.logits.scalar_type(),
                                  "vocab_cross_entropy_forward",
                                  [&] { fill_stats<scalar_t>(shard, rows, partial_stats); });
  return partial_stats;
}

void vocab_shard_gradient_cpu(const VocabShard& shard, const at::Tensor& normalizer,
                              const at::Tensor& factors, at::Tensor& grad_logits) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, shard.logits.scalar_type(), "vocab_cross_entropy_backward",
      [&] { fill_gradient<scalar_t>(shard, normalizer, factors, grad_logits); });
}

}  // namespace parallel_ext
