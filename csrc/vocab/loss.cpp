#include "vocab/loss.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/kernel_choice.h"
#include "check.h"
#include "comm/comm.h"
#include "vocab/loss_cuda.h"

namespace parallel_ext {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_weight(const char* op, const at::Tensor& weight, int64_t vocab_size) {
  check_floating(op, "weight", weight);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == vocab_size, op, ": weight of shape ",
                    weight.sizes(), " does not fit the vocabulary of ", vocab_size,
                    "; pass one number for each id, the whole ", vocab_size, " on every rank");
}

void check_weight_values(const char* op, const at::Tensor& weight) {
  if (!weight.is_cpu()) return;  // reading it back would stall the device
  const at::Tensor wide = weight.to(at::kDouble).contiguous();
  const double* value = wide.const_data_ptr<double>();
  for (int64_t id = 0; id < wide.numel(); ++id) {
    TORCH_CHECK_VALUE(0 <= value[id] && value[id] < kInfinity, op, ": weight ", value[id],
                      " of id ", id, " is not a finite number >= 0");
  }
}

void check_options(const char* op, const VocabLoss& loss) {
  TORCH_CHECK_VALUE(0 <= loss.label_smoothing && loss.label_smoothing < 1, op,
                    ": label_smoothing must be in [0, 1), got ", loss.label_smoothing);
  TORCH_CHECK_VALUE(0 <= loss.z_loss && std::isfinite(loss.z_loss), op,
                    ": z_loss must be a finite number >= 0, got ", loss.z_loss);
  TORCH_CHECK_VALUE(!loss.softcap || (*loss.softcap > 0 && std::isfinite(*loss.softcap)), op,
                    ": softcap must be a finite number > 0, or None for no cap, got ",
                    *loss.softcap);
  TORCH_CHECK_VALUE(std::isfinite(loss.logit_scale), op, ": logit_scale must be finite, got ",
                    loss.logit_scale);
  TORCH_CHECK_VALUE(loss.reduction == "none" || loss.reduction == "sum" || loss.reduction == "mean",
                    op, ": reduction must be 'none', 'sum' or 'mean', got '", loss.reduction, "'");
}

void check_labels(const char* op, const VocabLoss& loss, const at::Tensor& labels) {
  if (!labels.is_cpu()) return;  // reading ids back would stall the device; agreement checks them
  const at::Tensor in_order = labels.contiguous();
  const int64_t* label = in_order.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < labels.numel(); ++token) {
    TORCH_CHECK_INDEX(
        label[token] == loss.ignore_index || (0 <= label[token] && label[token] < loss.vocab_size),
        op, ": label ", label[token], " at position ", token, " is outside the vocabulary [0, ",
        loss.vocab_size, ") and is not ignore_index ", loss.ignore_index);
  }
}

// ATen splits long sums by the number of threads; on the CPU the bits must not depend on that.
at::Tensor sum_in_order(const at::Tensor& values) {
  if (!values.is_cpu()) return values.sum();
  const at::Tensor in_order = values.contiguous();
  const double* value = in_order.const_data_ptr<double>();
  return at::full({}, std::accumulate(value, value + values.numel(), 0.0), values.options());
}

at::Tensor view_as_ids(const at::Tensor& row) {
  return row.view(row.scalar_type() == at::kDouble ? at::kLong : at::kInt);
}

// Checks ranges [ranks, 2], the (start, stop) of each rank: together they are the vocabulary.
void check_ranges(const char* op, const at::Tensor& ranges, int64_t vocab_size) {
  const at::Tensor in_order = ranges.to(at::kLong).contiguous();
  const int64_t* bound = in_order.const_data_ptr<int64_t>();
  std::vector<std::pair<int64_t, int64_t>> sorted;
  for (int64_t rank = 0; rank < ranges.size(0); ++rank) {
    const int64_t start = bound[2 * rank], stop = bound[2 * rank + 1];
    if (start < stop) sorted.emplace_back(start, stop);
  }
  std::sort(sorted.begin(), sorted.end());
  bool fit = true;
  int64_t next = 0;
  for (const auto& [start, stop] : sorted) {
    fit = fit && start == next;
    next = stop;
  }
  TORCH_CHECK_VALUE(fit && next == vocab_size, op, ": the ranks' shards begin and end at ",
                    at::IntArrayRef(bound, in_order.numel()), ", which is some of the ", vocab_size,
                    " ids twice, or not at all; pass each rank's own");
}

// --- By ATen calls ---

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

at::Tensor normalizer_by_aten(const SoftmaxStats& stats, bool with_entropy, at::ScalarType dtype) {
  std::vector<at::Tensor> normalizer{stats.max, log_sum_of(stats)};
  if (with_entropy) normalizer.push_back(entropy_of(stats));
  return at::stack(normalizer).to(dtype);
}

LossOutputs outputs_by_aten(const VocabLoss& loss, const Tokens& tokens, const SoftmaxStats& stats,
                            const WantedStatistics& wanted, at::ScalarType dtype) {
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
          normalizer_by_aten(stats, wanted.entropy, dtype)};
}

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

// --- By CUDA kernels ---

template <typename number_t>
number_t* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<number_t>() : nullptr;
}

// What the kernels read of the tokens, which the caller holds on to.
LossOnCuda on_cuda(const VocabLoss& loss, const Tokens& tokens) {
  return {tokens.labels.const_data_ptr<int64_t>(),
          data_or_null<double>(tokens.weight_of_class),
          data_or_null<double>(tokens.totals),
          tokens.labels.size(0),
          loss.vocab_size,
          loss.ignore_index,
          loss.label_smoothing,
          loss.z_loss,
          loss.reduction != "none",
          loss.reduction == "mean"};
}

Tokens tokens_on_cuda(const VocabLoss& loss, const at::Tensor& labels) {
  Tokens tokens;
  tokens.labels = labels.contiguous();
  const auto options = labels.options().dtype(at::kDouble);
  if (loss.weight) tokens.weight_of_class = loss.weight->to(options).contiguous();
  if (loss.reduction == "mean" || (loss.weight && loss.label_smoothing > 0)) {
    tokens.totals = at::empty({LossTotals::kCount}, options);
    if constexpr (kWithCudaKernels) {
      loss_totals_on_cuda(on_cuda(loss, tokens), data_or_null<double>(tokens.totals),
                          labels.get_device());
    }
  }
  return tokens;
}

at::Tensor merged_on_cuda(const at::Tensor& all_stats_in, const StatsRows& rows) {
  const at::Tensor all_stats = all_stats_in.contiguous();
  at::Tensor stats = at::empty({rows.count, all_stats.size(2)}, all_stats.options());
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES(all_stats.scalar_type(), "vocab_cross_entropy_forward", [&] {
      merge_stats_on_cuda(all_stats.size(0), all_stats.size(2), rows,
                          all_stats.const_data_ptr<scalar_t>(), stats.mutable_data_ptr<scalar_t>(),
                          all_stats.get_device());
    });
  }
  return stats;
}

// Fills those of the outputs that are defined; the normalizer always is.
void fill_on_cuda(const LossOnCuda& loss, const at::Tensor& all_stats_in, const StatsRows& rows,
                  const LossOutputs& outputs, const at::Tensor& scratch) {
  const at::Tensor all_stats = all_stats_in.contiguous();
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES(all_stats.scalar_type(), "vocab_cross_entropy_forward", [&] {
      const LossResults<scalar_t> results{
          data_or_null<scalar_t>(outputs.loss),       data_or_null<scalar_t>(outputs.log_sum_exp),
          data_or_null<scalar_t>(outputs.entropy),    data_or_null<int64_t>(outputs.argmax),
          data_or_null<scalar_t>(outputs.normalizer), data_or_null<double>(scratch)};
      loss_results_on_cuda(loss, all_stats.size(0), rows, all_stats.const_data_ptr<scalar_t>(),
                           results, all_stats.get_device());
    });
  }
}

at::Tensor normalizer_on_cuda(const at::Tensor& all_stats, const StatsRows& rows) {
  LossOnCuda nothing_of_labels{};
  nothing_of_labels.num_tokens = all_stats.size(2);
  LossOutputs outputs;
  outputs.normalizer = at::empty({kRowsWithoutEntropy, all_stats.size(2)}, all_stats.options());
  fill_on_cuda(nothing_of_labels, all_stats, rows, outputs, {});
  return outputs.normalizer;
}

LossOutputs outputs_on_cuda(const VocabLoss& loss, const Tokens& tokens,
                            const at::Tensor& all_stats, const StatsRows& rows,
                            const WantedStatistics& wanted) {
  const int64_t num_tokens = all_stats.size(2);
  const auto options = all_stats.options();
  const bool is_sum = loss.reduction != "none";
  const auto if_wanted = [&](bool is_wanted, const at::TensorOptions& of_output) {
    return is_wanted ? at::empty({num_tokens}, of_output) : at::Tensor();
  };
  LossOutputs outputs{
      is_sum ? at::empty({}, options) : at::empty({num_tokens}, options),
      if_wanted(wanted.log_sum_exp, options), if_wanted(wanted.entropy, options),
      if_wanted(wanted.argmax, options.dtype(at::kLong)),
      at::empty({wanted.entropy ? kRowsWithEntropy : kRowsWithoutEntropy, num_tokens}, options)};
  const at::Tensor scratch =
      is_sum ? at::empty({2, num_tokens}, options.dtype(at::kDouble)) : at::Tensor();
  fill_on_cuda(on_cuda(loss, tokens), all_stats, rows, outputs, scratch);
  for (at::Tensor* each : {&outputs.log_sum_exp, &outputs.entropy}) {
    if (!each->defined()) *each = at::empty({0}, options);
  }
  if (!wanted.argmax) outputs.argmax = at::empty({0}, options.dtype(at::kLong));
  return outputs;
}

at::Tensor factors_on_cuda(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                           const at::Tensor& normalizer_in) {
  const at::Tensor normalizer = normalizer_in.contiguous();
  const int64_t num_tokens = normalizer.size(1);
  at::Tensor factors = at::empty({GradientRows::kCount, num_tokens}, normalizer.options());
  const auto of_tokens = [&](const std::optional<at::Tensor>& grad) {
    return grad ? grad->to(normalizer.options()).expand({num_tokens}) : at::Tensor();
  };
  const at::Tensor of_loss = of_tokens(grads.loss), of_entropy = of_tokens(grads.entropy),
                   of_log_sum_exp = of_tokens(grads.log_sum_exp);
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES(normalizer.scalar_type(), "vocab_cross_entropy_backward", [&] {
      const auto per_token = [](const at::Tensor& grad) {
        return grad.defined() ? PerToken<scalar_t>{grad.const_data_ptr<scalar_t>(), grad.stride(0)}
                              : PerToken<scalar_t>{};
      };
      loss_factors_on_cuda<scalar_t>(
          on_cuda(loss, tokens),
          {per_token(of_loss), per_token(of_log_sum_exp), per_token(of_entropy)},
          normalizer.const_data_ptr<scalar_t>(), factors.mutable_data_ptr<scalar_t>(),
          normalizer.get_device());
    });
  }
  return factors;
}

}  // namespace

VocabShard VocabLoss::shard(const at::Tensor& logits, const at::Tensor& labels,
                            int64_t start) const {
  at::Tensor own_weight;
  if (weight) own_weight = weight->narrow(0, start, logits.size(1)).to(wide_type(logits));
  return {logits, labels.contiguous(), own_weight.defined() ? own_weight.contiguous() : own_weight,
          start,  logit_scale,         softcap.value_or(0)};
}

void check_vocab_loss_shapes(const char* op, const VocabLoss& loss, const char* name,
                             int64_t shard_size, int64_t num_tokens, const at::Tensor& labels) {
  check_int64(op, "labels", labels);
  check_vocab_range(op, name, shard_size, loss.vocab_size, loss.vocab_start, loss.vocab_stop);
  TORCH_CHECK_VALUE(labels.dim() == 1 && labels.size(0) == num_tokens, op, ": labels of shape ",
                    labels.sizes(), " do not fit the ", num_tokens,
                    " tokens; one label for each is expected");
  if (loss.weight) check_weight(op, *loss.weight, loss.vocab_size);
}

void check_vocab_loss(const char* op, const VocabLoss& loss, const char* name, int64_t shard_size,
                      int64_t num_tokens, const at::Tensor& labels, bool want_argmax) {
  check_options(op, loss);
  TORCH_CHECK_VALUE(!want_argmax || loss.vocab_size <= kLastId, op, ": argmax is for at most ",
                    kLastId, " ids, got ", loss.vocab_size);
  check_vocab_loss_shapes(op, loss, name, shard_size, num_tokens, labels);
  if (loss.weight) check_weight_values(op, *loss.weight);
  check_labels(op, loss, labels);
}

void check_normalizer(const char* op, const at::Tensor& normalizer, int64_t num_tokens,
                      bool with_entropy) {
  TORCH_CHECK_VALUE(
      normalizer.dim() == 2 && normalizer.size(1) == num_tokens &&
          normalizer.size(0) >= (with_entropy ? kRowsWithEntropy : kRowsWithoutEntropy) &&
          normalizer.size(0) <= kRowsWithEntropy,
      op, ": the normalizer of ", num_tokens, " tokens has shape [2, ", num_tokens, "], or [3, ",
      num_tokens, "] with the entropy, got ", normalizer.sizes());
}

Tokens tokens_of(const VocabLoss& loss, const at::Tensor& labels) {
  return use_cuda_kernel(labels) ? tokens_on_cuda(loss, labels) : tokens_by_aten(loss, labels);
}

Tokens Tokens::narrow(int64_t start, int64_t size) const {
  const auto own = [&](const at::Tensor& each) {
    return each.defined() ? each.narrow(0, start, size) : each;
  };
  return {own(labels), weight_of_class, totals, own(ignored), own(weight), total_weight, count};
}

at::Tensor gather_stats(const char* op, const VocabLoss& loss, const at::Tensor& partial_stats,
                        const Group& group) {
  if (group.size == 1 || !partial_stats.is_cpu() || loss.vocab_size > kLastId) {
    return all_gather(op, partial_stats, group);
  }
  const int64_t size = partial_stats.numel();
  at::Tensor message = at::empty({size + 2}, partial_stats.options());
  message.narrow(0, 0, size).view(partial_stats.sizes()).copy_(partial_stats);
  at::Tensor range = view_as_ids(message.narrow(0, size, 2));
  range[0].fill_(loss.vocab_start), range[1].fill_(loss.vocab_stop);
  const at::Tensor all = all_gather(op, message, group);
  check_ranges(op, view_as_ids(all.narrow(1, size, 2)), loss.vocab_size);
  return all.narrow(1, 0, size).unflatten(1, partial_stats.sizes());
}

at::Tensor merged_stats(const at::Tensor& all_stats, const StatsRows& rows) {
  if (use_cuda_kernel(all_stats)) return merged_on_cuda(all_stats, rows);
  return to_partial_stats(merge(all_stats, rows), rows, all_stats.scalar_type());
}

at::Tensor normalizer_of(const at::Tensor& all_stats, const StatsRows& rows) {
  if (use_cuda_kernel(all_stats)) return normalizer_on_cuda(all_stats, rows);
  return normalizer_by_aten(merge(all_stats, rows), /*with_entropy=*/false,
                            all_stats.scalar_type());
}

LossOutputs outputs_of(const VocabLoss& loss, const Tokens& tokens, const at::Tensor& all_stats,
                       const StatsRows& rows, const WantedStatistics& wanted) {
  if (use_cuda_kernel(all_stats)) return outputs_on_cuda(loss, tokens, all_stats, rows, wanted);
  return outputs_by_aten(loss, tokens, merge(all_stats, rows), wanted, all_stats.scalar_type());
}

at::Tensor factors_of(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                      const at::Tensor& normalizer) {
  if (use_cuda_kernel(normalizer)) return factors_on_cuda(loss, grads, tokens, normalizer);
  return factors_by_aten(loss, grads, tokens, normalizer);
}

}  // namespace parallel_ext
