// The loss's arithmetic on [T] numbers by ATen calls, for any device.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <numeric>

#include "vocab/loss_paths.h"

namespace parallel_ext {
namespace {

// ATen splits long sums by the number of threads; on the CPU the bits must not depend on that.
at::Tensor sum_in_order(const at::Tensor& values) {
  if (!values.is_cpu()) return values.sum();
  const at::Tensor in_order = values.contiguous();
  const double* value = in_order.const_data_ptr<double>();
  return at::full({}, std::accumulate(value, value + values.numel(), 0.0), values.options());
}

// The statistics of each token over several ranges of ids, in fp64.
struct SoftmaxStats {
  at::Tensor max;                     // of z; -inf where nothing is above it
  at::Tensor sum;                     // of exp(z - max)
  at::Tensor target;                  // z of the label
  at::Tensor smooth, weight, moment;  // as in StatsRows; undefined where not asked for
  at::Tensor id;                      // int64
};

SoftmaxStats merge(const at::Tensor& all_stats, const StatsRows& rows) {
  const at::Tensor all = all_stats.to(at::kDouble);
  const auto row = [&all](int64_t number) { return all.select(1, number); };
  const at::Tensor maxima = row(StatsRows::kMax), sums = row(StatsRows::kSum);
  const at::Tensor targets = row(StatsRows::kTarget);
  SoftmaxStats stats;
  stats.max = maxima.amax(0);
  const auto zeros = [&stats] { return at::zeros_like(stats.max); };
  stats.sum = zeros(), stats.target = zeros();
  if (rows.smooth >= 0) stats.smooth = zeros(), stats.weight = zeros();
  if (rows.moment >= 0) stats.moment = zeros();
  const at::Tensor base = stats.max.masked_fill(stats.max == -kInfinity, 0);
  for (int64_t part = 0; part < all.size(0); ++part) {
    // A part with logits of -inf only has the sum 0, which 0 * NaN must not replace.
    const at::Tensor nothing = sums[part] == 0, step = maxima[part] - stats.max;
    const at::Tensor factor = step.exp().masked_fill(nothing, 0);
    stats.sum += sums[part] * factor;
    stats.target += targets[part];
    if (rows.smooth >= 0) {
      const at::Tensor own = row(rows.smooth + 1)[part];
      const at::Tensor raised = maxima[part].masked_fill(nothing, 0) - base;
      stats.smooth += row(rows.smooth)[part] + (own * raised).masked_fill(own == 0, 0);
      stats.weight += own;
    }
    if (rows.moment >= 0) {
      stats.moment +=
          factor * (row(rows.moment)[part] + (step * sums[part]).masked_fill(nothing, 0));
    }
  }
  if (rows.id >= 0) {
    // If the maximum of one part is NaN, so is stats.max, and the id comes from a part with NaN.
    const at::Tensor is_max = (maxima == stats.max).logical_or(maxima.isnan());
    const at::Tensor ids = view_as_ids(all_stats.select(1, rows.id)).to(at::kLong);
    stats.id = ids.masked_fill(is_max.logical_not(), kLastId).amin(0);
  }
  return stats;
}

at::Tensor to_partial_stats(const SoftmaxStats& stats, const StatsRows& rows,
                            at::ScalarType dtype) {
  at::Tensor partial_stats =
      at::empty({rows.count, stats.max.size(0)}, stats.max.options().dtype(dtype));
  const auto put = [&partial_stats](int64_t row, const at::Tensor& value) {
    partial_stats.select(0, row).copy_(value);
  };
  put(StatsRows::kMax, stats.max);
  put(StatsRows::kSum, stats.sum);
  put(StatsRows::kTarget, stats.target);
  if (rows.smooth >= 0) put(rows.smooth, stats.smooth), put(rows.smooth + 1, stats.weight);
  if (rows.moment >= 0) put(rows.moment, stats.moment);
  if (rows.id >= 0) view_as_ids(partial_stats.select(0, rows.id)).copy_(stats.id);
  return partial_stats;
}

at::Tensor log_sum_of(const SoftmaxStats& stats) { return stats.sum.log(); }

at::Tensor entropy_of(const SoftmaxStats& stats) {
  return log_sum_of(stats) - stats.moment / stats.sum;
}

at::Tensor reduced(const VocabLoss& loss, const Tokens& tokens, at::Tensor per_token,
                   const at::Tensor& divisor) {
  per_token.masked_fill_(tokens.ignored, 0);
  if (loss.reduction == "none") return per_token;
  const at::Tensor sum = sum_in_order(per_token);
  return loss.reduction == "mean" ? sum / divisor : sum;
}

at::Tensor normalizer_of_stats(const SoftmaxStats& stats, bool with_entropy, at::ScalarType dtype) {
  std::vector<at::Tensor> normalizer{stats.max, log_sum_of(stats)};
  if (with_entropy) normalizer.push_back(entropy_of(stats));
  return at::stack(normalizer).to(dtype);
}

}  // namespace

Tokens tokens_by_aten(const VocabLoss& loss, const at::Tensor& labels) {
  Tokens tokens;
  tokens.ignored = labels == loss.ignore_index;
  if (loss.weight) {
    const at::Tensor ids = labels.masked_fill(tokens.ignored, 0);
    tokens.weight = loss.weight->index_select(0, ids).to(at::kDouble);
    tokens.weight.masked_fill_(tokens.ignored, 0);
  }
  if (loss.reduction == "mean") {
    tokens.count = tokens.ignored.logical_not().sum();
    tokens.total_weight = loss.weight ? sum_in_order(tokens.weight) : tokens.count;
    if (loss.weight) tokens.total_weight.masked_fill_(tokens.total_weight == 0, std::nan(""));
  }
  return tokens;
}

at::Tensor merged_by_aten(const at::Tensor& all_stats, const StatsRows& rows) {
  return to_partial_stats(merge(all_stats, rows), rows, all_stats.scalar_type());
}

at::Tensor normalizer_by_aten(const at::Tensor& all_stats, const StatsRows& rows) {
  return normalizer_of_stats(merge(all_stats, rows), /*with_entropy=*/false,
                             all_stats.scalar_type());
}

LossOutputs outputs_by_aten(const VocabLoss& loss, const Tokens& tokens,
                            const at::Tensor& all_stats, const StatsRows& rows,
                            const WantedStatistics& wanted) {
  const SoftmaxStats stats = merge(all_stats, rows);
  const at::ScalarType dtype = all_stats.scalar_type();
  const at::Tensor log_sum = log_sum_of(stats);
  // inf where a logit is inf, as in torch
  const at::Tensor log_sum_exp = stats.max + log_sum.masked_fill(stats.max == kInfinity, 0);
  // The maximum is subtracted first, here and in the gradient: a small number added to a large
  // maximum would lose its digits.
  at::Tensor per_token = (stats.max - stats.target) + log_sum;
  if (tokens.weight.defined()) per_token = tokens.weight * per_token;
  if (loss.label_smoothing > 0) {
    const double share = loss.label_smoothing / static_cast<double>(loss.vocab_size);
    const at::Tensor smooth = stats.weight * log_sum - stats.smooth;
    per_token = (1 - loss.label_smoothing) * per_token + share * smooth;
  }
  at::Tensor total = reduced(loss, tokens, per_token, tokens.total_weight);
  if (loss.z_loss > 0) {
    const at::Tensor squares = loss.z_loss * log_sum_exp.square();
    total = total + reduced(loss, tokens, squares, tokens.count);
  }
  const auto if_wanted = [&](bool is_wanted, const at::Tensor& value, at::ScalarType type) {
    return is_wanted ? value.to(type) : at::empty({0}, log_sum.options().dtype(type));
  };
  const at::Tensor entropy = wanted.entropy ? entropy_of(stats) : at::Tensor();
  return {total.to(dtype), if_wanted(wanted.log_sum_exp, log_sum_exp, dtype),
          if_wanted(wanted.entropy, entropy, dtype), if_wanted(wanted.argmax, stats.id, at::kLong),
          normalizer_of_stats(stats, wanted.entropy, dtype)};
}

at::Tensor factors_by_aten(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                           const at::Tensor& normalizer) {
  const at::Tensor normal = normalizer.to(at::kDouble);
  const auto zeros = [&normal] { return at::zeros_like(normal[0]); };
  at::Tensor probability = zeros(), column = zeros(), label = zeros(), of_entropy = zeros();
  if (grads.loss) {
    const auto of_tokens = [&](const at::Tensor& divisor) {
      at::Tensor grad = grads.loss->to(at::kDouble);
      if (loss.reduction == "mean") grad = grad / divisor;
      return grad.expand_as(tokens.ignored).masked_fill(tokens.ignored, 0);
    };
    const at::Tensor grad = of_tokens(tokens.total_weight);
    label = tokens.weight.defined() ? grad * tokens.weight : grad;
    if (loss.label_smoothing > 0) {
      column = grad * (loss.label_smoothing / static_cast<double>(loss.vocab_size));
      label = label * (1 - loss.label_smoothing);
      const at::Tensor total =
          loss.weight ? sum_in_order(loss.weight->to(at::kDouble))
                      : at::full({}, static_cast<double>(loss.vocab_size), column.options());
      probability = label + column * total;
    } else {
      probability = label;
    }
    if (loss.z_loss > 0) {
      const at::Tensor of_square = 2 * loss.z_loss * of_tokens(tokens.count);
      const at::Tensor more = of_square * (normal[0] + normal[1]);
      probability = probability + more.masked_fill(tokens.ignored, 0);
    }
  }
  if (grads.log_sum_exp) probability = probability + *grads.log_sum_exp;
  if (grads.entropy) {
    of_entropy = -grads.entropy->to(at::kDouble);
    const at::Tensor more = of_entropy * normal[2];
    probability = probability + more.masked_fill(of_entropy == 0, 0);
  }
  return at::stack({probability, column, label, of_entropy}).to(normalizer.scalar_type());
}

}  // namespace parallel_ext
