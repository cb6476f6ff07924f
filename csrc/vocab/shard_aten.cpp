// The two passes of the cross entropy over a shard of the logits by ATen calls, for any device: a
// few tokens at a time, so that copies in fp32 are small compared to the logits.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "check.h"
#include "vocab/loss_paths.h"
#include "vocab/shard.h"

namespace parallel_ext {

std::pair<at::Tensor, at::Tensor> local_labels(const at::Tensor& labels, int64_t vocab_start,
                                               int64_t size) {
  const at::Tensor column = labels - vocab_start;
  const at::Tensor own = (column >= 0).logical_and(column < size);
  return {column.masked_fill(own.logical_not(), 0).unsqueeze(1), own};
}

namespace {

constexpr int64_t kElementsAtATime = 1 << 22;

int64_t tokens_at_a_time(int64_t size) { return std::max<int64_t>(1, kElementsAtATime / size); }

// exponential * logarithm, where 0 * log 0 is 0.
at::Tensor times_log(const at::Tensor& exponential, const at::Tensor& logarithm) {
  return (exponential * logarithm).masked_fill_(logarithm == -kInfinity, 0);
}

void fill_stats(const VocabShard& shard, const StatsRows& rows, const at::Tensor& logits,
                const at::Tensor& labels, const at::Tensor& partial_stats) {
  at::Tensor z = logits.to(partial_stats.scalar_type());
  if (!shard.holds_logits()) z = z * shard.scale;
  if (shard.cap != 0) z.div_(shard.cap).tanh_().mul_(shard.cap);
  const at::Tensor max = z.amax(1);
  const auto [column, own] = local_labels(labels, shard.vocab_start, logits.size(1));
  partial_stats.select(0, StatsRows::kMax).copy_(max);
  partial_stats.select(0, StatsRows::kTarget)
      .copy_(z.gather(1, column).squeeze(1).masked_fill(own.logical_not(), 0));
  if (rows.id >= 0) {
    const at::Tensor id = z.argmax(1) + shard.vocab_start;
    view_as_ids(partial_stats.select(0, rows.id)).copy_(id);
  }
  z = z - max.masked_fill(max == -kInfinity, 0).unsqueeze(1);
  if (rows.smooth >= 0) {
    const at::Tensor sum = (shard.weight.defined() ? z * shard.weight : z).sum(1);
    partial_stats.select(0, rows.smooth).copy_(sum);
    partial_stats.select(0, rows.smooth + 1)
        .copy_(shard.weight.defined() ? shard.weight.sum().expand_as(max)
                                      : at::full_like(max, logits.size(1)));
  }
  const at::Tensor exponential = z.exp();
  partial_stats.select(0, StatsRows::kSum).copy_(exponential.sum(1));
  if (rows.moment >= 0)
    partial_stats.select(0, rows.moment).copy_(times_log(exponential, z).sum(1));
}

void fill_gradient(const VocabShard& shard, const at::Tensor& logits, const at::Tensor& labels,
                   const at::Tensor& normalizer, const at::Tensor& factors,
                   const at::Tensor& grad_logits) {
  const auto factor = [&factors](int64_t row) { return factors[row].unsqueeze(1); };
  at::Tensor z = logits.to(factors.scalar_type()), slope;
  if (!shard.holds_logits()) z = z * shard.scale;
  if (shard.cap != 0) {
    z.div_(shard.cap).tanh_();
    slope = 1 - z.square();
    z.mul_(shard.cap);
  }
  const at::Tensor log_probability =
      (z - normalizer[0].unsqueeze(1)).sub_(normalizer[1].unsqueeze(1));
  const at::Tensor probability = log_probability.exp();
  at::Tensor grad = probability * factor(GradientRows::kProbability);
  if (normalizer.size(0) == kRowsWithEntropy) {
    grad.add_(times_log(probability, log_probability).mul_(factor(GradientRows::kEntropy)));
  }
  const at::Tensor of_columns = factor(GradientRows::kColumn);
  grad.sub_(shard.weight.defined() ? of_columns * shard.weight : of_columns);
  const auto [column, own] = local_labels(labels, shard.vocab_start, logits.size(1));
  grad.scatter_add_(
      1, column,
      factors[GradientRows::kLabel].masked_fill(own.logical_not(), 0).neg().unsqueeze(1));
  if (slope.defined()) grad.mul_(slope);
  if (shard.scale != 1) grad.mul_(shard.scale);
  grad_logits.copy_(grad.masked_fill_((factors == 0).all(0).unsqueeze(1), 0));
}

}  // namespace

at::Tensor vocab_shard_stats_aten(const VocabShard& shard, const StatsRows& rows) {
  const int64_t num_tokens = shard.logits.size(0), size = shard.logits.size(1);
  const auto options = shard.logits.options().dtype(wide_type(shard.logits));
  at::Tensor partial_stats = at::zeros({rows.count, num_tokens}, options);
  if (size == 0) {
    partial_stats.select(0, StatsRows::kMax).fill_(-kInfinity);
    if (rows.id < 0) return partial_stats;
    view_as_ids(partial_stats.select(0, rows.id)).fill_(kLastId);
    return partial_stats;
  }
  const int64_t step = tokens_at_a_time(size);
  for (int64_t start = 0; start < num_tokens; start += step) {
    const int64_t count = std::min(step, num_tokens - start);
    fill_stats(shard, rows, shard.logits.narrow(0, start, count),
               shard.labels.narrow(0, start, count), partial_stats.narrow(1, start, count));
  }
  return partial_stats;
}

void vocab_shard_gradient_aten(const VocabShard& shard, const at::Tensor& normalizer,
                               const at::Tensor& factors, at::Tensor& grad_logits) {
  const int64_t num_tokens = shard.logits.size(0), size = shard.logits.size(1);
  if (size == 0) return;
  const int64_t step = tokens_at_a_time(size);
  for (int64_t start = 0; start < num_tokens; start += step) {
    const int64_t count = std::min(step, num_tokens - start);
    fill_gradient(shard, shard.logits.narrow(0, start, count), shard.labels.narrow(0, start, count),
                  normalizer.narrow(1, start, count), factors.narrow(1, start, count),
                  grad_logits.narrow(0, start, count));
  }
}

}  // namespace parallel_ext
