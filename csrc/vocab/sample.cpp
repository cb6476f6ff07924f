// The next token of each row, from logits whose vocabulary is sharded over the ranks.
//
// top_k, top_p and min_p keep the logits that are not below a floor, which the ranks find with a
// few small messages. Then each rank draws among its own by adding Gumbel noise to
// logit / temperature and taking the largest (Maddison et al., "A* sampling", NeurIPS 2014,
// section 2); the largest of the ranks is the draw from all. The result does not depend on how the
// vocabulary is sharded: the noise is a function of global ids, and all sums are of whole numbers,
// or of the same numbers in the same order.
#include "vocab/sample.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "base/kernel_choice.h"
#include "check.h"
#include "comm/comm.h"
#include "vocab/ops.h"
#include "vocab/shard.h"

namespace parallel_ext {

at::Tensor candidates_of(const at::Tensor& score, const at::Tensor& id) {
  return at::stack({score.view(at::kLong), id}, 1);
}

double mass_scale(int64_t vocab_size) {
  return std::ldexp(1.0, 61 - static_cast<int>(std::ceil(std::log2(vocab_size))));
}

namespace {

constexpr int64_t kNoId = std::numeric_limits<int64_t>::max();

// Lower temperatures are raised to it, which draws the same: different fp32 logits are at least
// 2^-149 apart, and divided by 1e-200 even that is beyond all noise and exp(). The quotients stay
// finite; divided by the smallest doubles they would overflow.
constexpr double kLeastTemperature = 1e-200;

void check_logits(const char* op, const at::Tensor& logits, int64_t vocab_size, int64_t vocab_start,
                  int64_t vocab_stop) {
  check_floating(op, "logits", logits);
  check_dim(op, "logits", logits, 2);
  TORCH_CHECK_VALUE(vocab_size >= 1, op, ": vocab_size must be at least 1, got ", vocab_size);
  check_vocab_range(op, "logits", logits.size(1), vocab_size, vocab_start, vocab_stop);
}

void check_filters(const char* op, const Filters& filters) {
  TORCH_CHECK_VALUE(filters.temperature > 0 && std::isfinite(filters.temperature), op,
                    ": temperature must be a finite number > 0, got ", filters.temperature,
                    "; the largest logit is what vocab_argmax takes");
  TORCH_CHECK_VALUE(filters.top_k >= 0, op, ": top_k must be at least 1, or 0 for all ids, got ",
                    filters.top_k);
  TORCH_CHECK_VALUE(0 <= filters.top_p && filters.top_p <= 1, op, ": top_p must be in [0, 1], got ",
                    filters.top_p);
  TORCH_CHECK_VALUE(0 <= filters.min_p && filters.min_p <= 1, op, ": min_p must be in [0, 1], got ",
                    filters.min_p);
}

// Candidates [ranks, B, 2] -> the largest score [B], or NaN, and the lowest id [B] that has it.
Tensors<2> best_of(const at::Tensor& candidates) {
  const at::Tensor scores = candidates.select(2, 0).view(at::kDouble);
  const at::Tensor best = scores.amax(0);
  const at::Tensor others = (scores == best).logical_or(scores.isnan()).logical_not();
  return {best, candidates.select(2, 1).masked_fill(others, kNoId).amin(0)};
}

// The largest logit [B] of all ranks, fp64; NaN where there is one.
at::Tensor largest_of_all(const at::Tensor& logits, const Group& group) {
  const at::Tensor own = logits.size(1) == 0
                             ? at::full({logits.size(0)}, -kInfinity, logits.options())
                             : logits.amax(1);
  return all_gather(kSample, own, group).amax(0).to(at::kDouble);
}

// The top_k largest logits [B, top_k] of all ranks, fp64 and descending; and [B], how many logits
// beyond these equal the last of them. One exchange of top_k + 1 numbers a row.
Tensors<2> top_of_all(const at::Tensor& logits, int64_t top_k, const Group& group) {
  const int64_t num_rows = logits.size(0), own = std::min(top_k, logits.size(1));
  at::Tensor record = at::full({num_rows, top_k + 1}, -kInfinity, logits.options());
  const at::Tensor not_below_last = record.select(1, top_k).view(at::kInt).zero_();
  if (own > 0) {
    const at::Tensor values = std::get<0>(logits.topk(own, 1));
    record.narrow(1, 0, own).copy_(values);
    not_below_last.copy_((logits >= values.narrow(1, own - 1, 1)).sum(1));
  }
  const at::Tensor all = all_gather(kSample, record, group);
  const at::Tensor lists = all.narrow(2, 0, top_k);  // [ranks, B, top_k]
  const at::Tensor top =
      std::get<0>(lists.transpose(0, 1).flatten(1).topk(top_k, 1)).to(at::kDouble);
  // A rank whose list ends with that same value may have more of it than its list shows, and has
  // counted them; the other ranks' lists show all of theirs.
  const at::Tensor last = top.select(1, top_k - 1).unsqueeze(0);
  const at::Tensor counted = all.select(2, top_k).view(at::kInt).to(at::kLong);
  const at::Tensor listed = (lists >= last.unsqueeze(2)).sum(2);
  const at::Tensor total = at::where(lists.select(2, top_k - 1) == last, counted, listed).sum(0);
  return {top, total - top_k};
}

// The lowest logit [B] among the most probable ids that together reach the share top_p of the mass,
// which is that of `top` and of `more` logits equal to its last.
at::Tensor floor_of_top_p(const at::Tensor& top, const at::Tensor& more, const Filters& filters) {
  const at::Tensor mass = ((top - top.narrow(1, 0, 1)) / filters.temperature).exp_();
  const at::Tensor sum = mass.cumsum(1);
  const int64_t last = top.size(1) - 1;
  const at::Tensor needed = (sum.select(1, last) + mass.select(1, last) * more) * filters.top_p;
  const at::Tensor place = (sum < needed.unsqueeze(1)).sum(1, /*keepdim=*/true).clamp_max(last);
  return top.gather(1, place).squeeze(1);
}

// The floor without top_k, of the whole vocabulary: it is found digit by digit, the highest first.
// One exchange of 256 sums a row for each of the four digits, however flat the distribution is.
at::Tensor floor_of_top_p_by_digits(const SampleShard& shard, const at::Tensor& max,
                                    int64_t vocab_size, double top_p, const Group& group) {
  const double scale = mass_scale(vocab_size);
  const auto mass_of = use_cpu_loops(shard.logits) ? vocab_shard_mass_cpu : vocab_shard_mass_aten;
  at::Tensor order = at::zeros_like(max, at::kLong), needed;
  for (int64_t shift = kLogitBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const at::Tensor mass =
        all_gather(kSample, mass_of(shard, max, order, shift, scale), group).sum(0).flip(1);
    const at::Tensor sum = mass.cumsum(1);  // of the digits from the highest on
    if (!needed.defined()) {
      const at::Tensor total = sum.select(1, kDigits - 1);
      needed = at::minimum((total.to(at::kDouble) * top_p).ceil().to(at::kLong).clamp_min(1), total)
                   .unsqueeze(1);
    }
    const at::Tensor place = (sum < needed).sum(1, /*keepdim=*/true).clamp_max(kDigits - 1);
    needed = needed - (sum - mass).gather(1, place);
    order = order * kDigits + (kDigits - 1 - place.squeeze(1));
  }
  return logits_of(order).to(at::kDouble);
}

// The lowest logit [B] that the filters leave, fp64. Those equal to it all stay.
at::Tensor floor_of(const SampleShard& shard, int64_t vocab_size, const Filters& filters,
                    const Group& group) {
  const bool with_top_k = filters.with_top_k(vocab_size);
  at::Tensor floor =
      at::full({shard.logits.size(0)}, -kInfinity, shard.logits.options().dtype(at::kDouble));
  if (!with_top_k && filters.top_p >= 1 && filters.min_p <= 0) return floor;
  at::Tensor max;
  if (with_top_k) {
    const auto [top, more] = top_of_all(shard.logits, filters.top_k, group);
    max = top.select(1, 0);
    floor =
        filters.top_p < 1 ? floor_of_top_p(top, more, filters) : top.select(1, filters.top_k - 1);
  } else {
    max = largest_of_all(shard.logits, group);
    if (filters.top_p < 1) {
      floor = floor_of_top_p_by_digits(shard, max, vocab_size, filters.top_p, group);
    }
  }
  if (filters.min_p > 0) {
    floor = at::maximum(floor, max + filters.temperature * std::log(filters.min_p));
  }
  return floor.contiguous();
}

at::Tensor vocab_argmax_kernel(const at::Tensor& logits, int64_t vocab_size, int64_t vocab_start,
                               int64_t vocab_stop, const Group& group) {
  const char* op = "vocab_argmax";
  check_logits(op, logits, vocab_size, vocab_start, vocab_stop);
  if constexpr (kWithCudaKernels) {
    if (use_cuda_kernel(logits)) {
      return vocab_argmax_by_kernels(with_adjacent_columns(logits), vocab_start, group);
    }
  }
  if (group.alone() && logits.size(1) > 0) return logits.argmax(1).add_(vocab_start);
  const auto wide = logits.options().dtype(at::kDouble);
  at::Tensor score = at::full({logits.size(0)}, -kInfinity, wide);
  at::Tensor id = at::full_like(score, kNoId, wide.dtype(at::kLong));
  if (logits.size(1) > 0) {
    const at::Tensor column = logits.argmax(1, /*keepdim=*/true);
    score = logits.gather(1, column).squeeze(1).to(at::kDouble);
    id = column.squeeze(1) + vocab_start;
  }
  return std::get<1>(best_of(all_gather(op, candidates_of(score, id), group)));
}

at::Tensor vocab_sample_kernel(const at::Tensor& logits_in, int64_t vocab_size, int64_t vocab_start,
                               int64_t vocab_stop, double temperature, int64_t top_k, double top_p,
                               double min_p, int64_t seed, int64_t step, const Group& group) {
  Filters filters{temperature, top_k, top_p, min_p};
  check_logits(kSample, logits_in, vocab_size, vocab_start, vocab_stop);
  check_filters(kSample, filters);
  filters.temperature = std::max(temperature, kLeastTemperature);
  const at::Tensor logits = with_adjacent_columns(logits_in.to(at::kFloat));
  const SampleShard shard{logits, vocab_start, filters.temperature};
  if constexpr (kWithCudaKernels) {
    if (use_cuda_kernel(logits)) {
      return vocab_sample_by_kernels(shard, vocab_size, filters, seed, step, group);
    }
  }
  const at::Tensor floor = floor_of(shard, vocab_size, filters, group);
  const at::Tensor candidates =
      (use_cpu_loops(logits) ? vocab_shard_draw_cpu : vocab_shard_draw_aten)(shard, floor, seed,
                                                                             step);
  const auto [score, id] = best_of(all_gather(kSample, candidates, group));
  return id.masked_fill(score.isfinite().logical_not(), -1);
}

at::Tensor ids_meta(const at::Tensor& logits) {
  return at::empty_symint({logits.sym_size(0)}, logits.options().dtype(at::kLong));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<vocab_argmax>(library).kernel<vocab_argmax_kernel>().meta<ids_meta>();
  implement<vocab_sample>(library).kernel<vocab_sample_kernel>().meta<ids_meta>();
}

}  // namespace parallel_ext
