// Cross entropy of logits that are cut by vocabulary. A rank reduces its shard to one record per
// token, the records are exchanged once, and every rank merges the same records in rank order.
#include "vocab_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "check.h"
#include "comm.h"
#include "kernel_choice.h"
#include "workspace.h"

namespace parallel_ext {
namespace {

constexpr const char* kOp = "vocab_cross_entropy";
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Softcap = std::optional<double>;
using Weight = std::optional<at::Tensor>;

void check_weight(const at::Tensor& weight, const at::Tensor& logits, int64_t vocab_size) {
  check_floating(kOp, "weight", weight);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == vocab_size, kOp, ": weight of shape ",
                    weight.sizes(), " does not fit the vocabulary of ", vocab_size,
                    "; pass one number for each id, the whole ", vocab_size, " on every rank");
  TORCH_CHECK_VALUE(weight.device() == logits.device(), kOp, ": weight is on ", weight.device(),
                    " but logits are on ", logits.device(), "; move one of them");
  if (!weight.is_cpu()) return;  // reading it back would stall the device
  const at::Tensor wide = weight.to(at::kDouble).contiguous();
  const double* value = wide.const_data_ptr<double>();
  for (int64_t id = 0; id < vocab_size; ++id) {
    TORCH_CHECK_VALUE(0 <= value[id] && value[id] < std::numeric_limits<double>::infinity(), kOp,
                      ": weight ", value[id], " of id ", id, " is not a finite number >= 0");
  }
}

void check_options(double label_smoothing, double z_loss, Softcap softcap, double logit_scale) {
  TORCH_CHECK_VALUE(0 <= label_smoothing && label_smoothing < 1, kOp,
                    ": label_smoothing must be in [0, 1), got ", label_smoothing);
  TORCH_CHECK_VALUE(0 <= z_loss && std::isfinite(z_loss), kOp,
                    ": z_loss must be a finite number >= 0, got ", z_loss);
  TORCH_CHECK_VALUE(!softcap || (*softcap > 0 && std::isfinite(*softcap)), kOp,
                    ": softcap must be a finite number > 0, or None for no cap, got ", *softcap);
  TORCH_CHECK_VALUE(std::isfinite(logit_scale), kOp, ": logit_scale must be finite, got ",
                    logit_scale);
}

void check_loss(const at::Tensor& logits, const at::Tensor& labels, const Weight& weight,
                int64_t vocab_size, int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
                const std::string& reduction) {
  check_floating(kOp, "logits", logits);
  check_int64(kOp, "labels", labels);
  check_dim(kOp, "logits", logits, 2);
  check_vocab_range(kOp, "logits", logits.size(1), vocab_size, vocab_start, vocab_stop);
  TORCH_CHECK_VALUE(labels.dim() == 1 && labels.size(0) == logits.size(0), kOp,
                    ": labels of shape ", labels.sizes(), " do not fit logits of shape ",
                    logits.sizes(), "; one label per row is expected");
  TORCH_CHECK_VALUE(reduction == "none" || reduction == "sum" || reduction == "mean", kOp,
                    ": reduction must be 'none', 'sum' or 'mean', got '", reduction, "'");
  if (weight) check_weight(*weight, logits, vocab_size);
  if (!labels.is_cpu()) return;  // reading ids back would stall the device; agreement checks them
  const int64_t* label = labels.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < labels.numel(); ++token) {
    TORCH_CHECK_INDEX(
        label[token] == ignore_index || (0 <= label[token] && label[token] < vocab_size), kOp,
        ": label ", label[token], " at position ", token, " is outside the vocabulary [0, ",
        vocab_size, ") and is not ignore_index ", ignore_index);
  }
}

at::Tensor with_adjacent_columns(const at::Tensor& logits) {
  const bool plain = logits.stride(1) == 1 || logits.size(1) <= 1;
  return plain && logits.stride(0) >= logits.size(1) ? logits : logits.contiguous();
}

bool use_cpu_loops(const at::Tensor& logits) { return logits.is_cpu() && !aten_path_on_cpu(); }

VocabShard shard_of(const at::Tensor& logits, const at::Tensor& labels, const Weight& weight,
                    int64_t vocab_start, Softcap softcap, double logit_scale) {
  at::Tensor own_weight;
  if (weight) {
    own_weight = weight->narrow(0, vocab_start, logits.size(1)).to(wide_type(logits)).contiguous();
  }
  return {with_adjacent_columns(logits),
          labels.contiguous(),
          own_weight,
          vocab_start,
          logit_scale,
          softcap.value_or(0)};
}

// ATen cuts long sums by the number of threads; on the CPU the bits shall not depend on it.
at::Tensor sum_in_order(const at::Tensor& values) {
  if (!values.is_cpu()) return values.sum();
  const at::Tensor in_order = values.contiguous();
  const double* value = in_order.const_data_ptr<double>();
  return at::full({}, std::accumulate(value, value + values.numel(), 0.0), values.options());
}

// What labels and class weights make of each token, in fp64.
struct Tokens {
  at::Tensor ignored;
  at::Tensor weight;        // of the label's class, 0 where ignored; undefined: 1
  at::Tensor total_weight;  // of the tokens not ignored, [], for "mean"; NaN for 0, as in torch
  at::Tensor count;         // of them
};

Tokens tokens_of(const at::Tensor& labels, const Weight& weight, int64_t ignore_index,
                 const std::string& reduction) {
  Tokens tokens;
  tokens.ignored = labels == ignore_index;
  if (weight) {
    const at::Tensor ids = labels.masked_fill(tokens.ignored, 0);
    tokens.weight = weight->index_select(0, ids).to(at::kDouble).masked_fill(tokens.ignored, 0);
  }
  if (reduction == "mean") {
    tokens.count = tokens.ignored.logical_not().sum();
    tokens.total_weight = weight ? sum_in_order(tokens.weight) : tokens.count;
    if (weight) tokens.total_weight.masked_fill_(tokens.total_weight == 0, std::nan(""));
  }
  return tokens;
}

// What the records say of each token, in fp64: the same arithmetic on the same numbers on every
// rank, so that its bits are equal too; in fp64 its own rounding does not count.
struct Merged {
  at::Tensor max, log_sum, target;
  at::Tensor log_sum_exp;  // their sum, but inf where a logit is, as in torch
  at::Tensor smooth;       // sum over the classes of weight * (log-sum-exp - z)
  at::Tensor entropy;
  at::Tensor id;  // int64
};

Merged merge(const at::Tensor& records, const RecordRows& rows) {
  const at::Tensor all = records.to(at::kDouble);
  const auto row = [&all](int64_t number) { return all.select(1, number); };
  const at::Tensor maxima = row(RecordRows::kMax), sums = row(RecordRows::kSum);
  const at::Tensor targets = row(RecordRows::kTarget);
  Merged merged;
  merged.max = maxima.amax(0);
  const auto zeros = [&merged] { return at::zeros_like(merged.max); };
  at::Tensor sum = zeros(), smooth = zeros(), weight = zeros(), moment = zeros();
  merged.target = zeros();
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    // A shard of nothing but -inf has the sum 0 and must not turn it into 0 * NaN.
    const at::Tensor nothing = sums[rank] == 0, step = maxima[rank] - merged.max;
    const at::Tensor factor = step.exp().masked_fill(nothing, 0);
    sum += sums[rank] * factor;
    merged.target += targets[rank];
    if (rows.smooth >= 0) {
      const at::Tensor own = row(rows.smooth + 1)[rank];
      const at::Tensor base = maxima[rank].masked_fill(nothing, 0);
      smooth += row(rows.smooth)[rank] + (own * (base - merged.max)).masked_fill(own == 0, 0);
      weight += own;
    }
    if (rows.moment >= 0) {
      moment += factor * (row(rows.moment)[rank] + (step * sums[rank]).masked_fill(nothing, 0));
    }
  }
  merged.log_sum = sum.log();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  merged.log_sum_exp = merged.max + merged.log_sum.masked_fill(merged.max == kInfinity, 0);
  if (rows.smooth >= 0) merged.smooth = weight * merged.log_sum - smooth;
  if (rows.moment >= 0) merged.entropy = merged.log_sum - moment / sum;
  if (rows.id >= 0) {
    const bool wide = records.scalar_type() == at::kDouble;
    const at::Tensor ids = records.select(1, rows.id).view(wide ? at::kLong : at::kInt);
    // Where one maximum is NaN, so is that of all, and only those with NaN are it.
    const at::Tensor is_max = (maxima == merged.max).logical_or(maxima.isnan());
    merged.id = ids.to(at::kLong).masked_fill(is_max.logical_not(), kLastId).amin(0);
  }
  return merged;
}

at::Tensor loss_of(const Merged& merged, const Tokens& tokens, int64_t vocab_size,
                   const std::string& reduction, double label_smoothing, double z_loss) {
  const auto reduced = [&](at::Tensor per_token, const at::Tensor& divisor) {
    per_token.masked_fill_(tokens.ignored, 0);
    if (reduction == "none") return per_token;
    const at::Tensor sum = sum_in_order(per_token);
    return reduction == "mean" ? sum / divisor : sum;
  };
  // The maximum is subtracted before anything small is added to it, here and in the gradient.
  at::Tensor per_token = (merged.max - merged.target) + merged.log_sum;
  if (tokens.weight.defined()) per_token = tokens.weight * per_token;
  if (label_smoothing > 0) {
    const double share = label_smoothing / static_cast<double>(vocab_size);
    per_token = (1 - label_smoothing) * per_token + share * merged.smooth;
  }
  at::Tensor loss = reduced(per_token, tokens.total_weight);
  if (z_loss > 0) {
    loss = loss + reduced(z_loss * merged.log_sum_exp.square(), tokens.count);
  }
  return loss;
}

FiveTensors forward_kernel(const at::Tensor& logits, const at::Tensor& labels_in,
                           const Weight& weight, int64_t vocab_size, int64_t vocab_start,
                           int64_t vocab_stop, int64_t ignore_index, const std::string& reduction,
                           double label_smoothing, double z_loss, Softcap softcap,
                           double logit_scale, std::array<bool, 3> wanted, int64_t group_size,
                           const std::string& group_name) {
  const auto [want_log_sum_exp, want_entropy, want_argmax] = wanted;
  check_options(label_smoothing, z_loss, softcap, logit_scale);
  TORCH_CHECK_VALUE(!want_argmax || vocab_size <= kLastId, kOp, ": argmax is for at most ", kLastId,
                    " ids, got ", vocab_size);
  const at::Tensor labels = labels_in.contiguous();
  check_loss(logits, labels, weight, vocab_size, vocab_start, vocab_stop, ignore_index, reduction);
  const VocabShard shard = shard_of(logits, labels, weight, vocab_start, softcap, logit_scale);
  const RecordRows rows(label_smoothing > 0, want_entropy, want_argmax);
  const at::Tensor record =
      (use_cpu_loops(logits) ? vocab_shard_record_cpu : vocab_shard_record_aten)(shard, rows);
  const Merged merged = merge(all_gather(kOp, record, group_size, group_name), rows);
  const Tokens tokens = tokens_of(labels, weight, ignore_index, reduction);
  const at::Tensor loss = loss_of(merged, tokens, vocab_size, reduction, label_smoothing, z_loss);
  const auto wide = [&record](const at::Tensor& value) { return value.to(record.scalar_type()); };
  const at::Tensor none = at::empty({0}, record.options());
  std::vector<at::Tensor> normalizer{merged.max, merged.log_sum};
  if (want_entropy) normalizer.push_back(merged.entropy);
  return {wide(loss), want_log_sum_exp ? wide(merged.log_sum_exp) : none,
          want_entropy ? wide(merged.entropy) : at::empty_like(none),
          want_argmax ? merged.id : at::empty({0}, none.options().dtype(at::kLong)),
          wide(at::stack(normalizer))};
}

// The rows of GradientRows.
at::Tensor factors_of(const Weight& grad_loss, const Weight& grad_log_sum_exp,
                      const Weight& grad_entropy, const at::Tensor& labels, const Weight& weight,
                      const at::Tensor& normalizer, int64_t vocab_size, int64_t ignore_index,
                      const std::string& reduction, double label_smoothing, double z_loss) {
  const at::Tensor normal = normalizer.to(at::kDouble);
  const auto zeros = [&normal] { return at::zeros_like(normal[0]); };
  at::Tensor probability = zeros(), column = zeros(), label = zeros(), of_entropy = zeros();
  if (grad_loss) {
    const Tokens tokens = tokens_of(labels, weight, ignore_index, reduction);
    const auto of_tokens = [&](const at::Tensor& divisor) {
      at::Tensor grad = grad_loss->to(at::kDouble);
      if (reduction == "mean") grad = grad / divisor;
      return grad.expand_as(labels).masked_fill(tokens.ignored, 0);
    };
    const at::Tensor grad = of_tokens(tokens.total_weight);
    label = tokens.weight.defined() ? grad * tokens.weight : grad;
    if (label_smoothing > 0) {
      column = grad * (label_smoothing / static_cast<double>(vocab_size));
      label = label * (1 - label_smoothing);
      const at::Tensor total =
          weight ? sum_in_order(weight->to(at::kDouble))
                 : at::full({}, static_cast<double>(vocab_size), column.options());
      probability = label + column * total;
    } else {
      probability = label;
    }
    if (z_loss > 0) {
      const at::Tensor of_square = 2 * z_loss * of_tokens(tokens.count);
      const at::Tensor more = of_square * (normal[0] + normal[1]);
      probability = probability + more.masked_fill(tokens.ignored, 0);
    }
  }
  if (grad_log_sum_exp) probability = probability + *grad_log_sum_exp;
  if (grad_entropy) {
    of_entropy = -grad_entropy->to(at::kDouble);
    const at::Tensor more = of_entropy * normal[2];
    probability = probability + more.masked_fill(of_entropy == 0, 0);
  }
  return at::stack({probability, column, label, of_entropy}).to(normalizer.scalar_type());
}

at::Tensor empty_with_row_stride(const at::Tensor& like) {
  const std::vector<int64_t> strides{like.stride(0), 1};
  if (like.numel() == 0) return at::empty_strided(like.sizes(), strides, like.options());
  const int64_t length = (like.size(0) - 1) * like.stride(0) + like.size(1);
  return pooled_empty({length}, like.options()).as_strided(like.sizes(), strides);
}

at::Tensor backward_kernel(const Weight& grad_loss, const Weight& grad_log_sum_exp,
                           const Weight& grad_entropy, const at::Tensor& logits,
                           const at::Tensor& labels, const Weight& weight,
                           const at::Tensor& normalizer, int64_t vocab_size, int64_t vocab_start,
                           int64_t ignore_index, const std::string& reduction,
                           double label_smoothing, double z_loss, Softcap softcap,
                           double logit_scale) {
  TORCH_CHECK_VALUE(
      normalizer.dim() == 2 && normalizer.size(1) == logits.size(0) &&
          normalizer.size(0) == (grad_entropy ? kRowsWithEntropy : normalizer.size(0)) &&
          normalizer.size(0) >= kRowsWithoutEntropy,
      kOp, ": the normalizer of ", logits.size(0), " tokens has shape [2, ", logits.size(0),
      "], or [3, ", logits.size(0), "] with the entropy, got ", normalizer.sizes());
  const VocabShard shard = shard_of(logits, labels, weight, vocab_start, softcap, logit_scale);
  const at::Tensor factors =
      factors_of(grad_loss, grad_log_sum_exp, grad_entropy, labels, weight, normalizer, vocab_size,
                 ignore_index, reduction, label_smoothing, z_loss);
  at::Tensor grad_logits = empty_with_row_stride(shard.logits);
  (use_cpu_loops(logits) ? vocab_shard_gradient_cpu : vocab_shard_gradient_aten)(
      shard, normalizer.contiguous(), factors, grad_logits);
  return grad_logits;
}

FourTensors loss_kernel(const at::Tensor& logits, const at::Tensor& labels, const Weight& weight,
                        int64_t vocab_size, int64_t vocab_start, int64_t vocab_stop,
                        int64_t ignore_index, const std::string& reduction, double label_smoothing,
                        double z_loss, Softcap softcap, double logit_scale,
                        std::array<bool, 3> wanted, int64_t group_size,
                        const std::string& group_name) {
  const auto [loss, log_sum_exp, entropy, argmax, _] = forward_kernel(
      logits, labels, weight, vocab_size, vocab_start, vocab_stop, ignore_index, reduction,
      label_smoothing, z_loss, softcap, logit_scale, wanted, group_size, group_name);
  return {loss, log_sum_exp, entropy, argmax};
}

}  // namespace

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("vocab_cross_entropy", loss_kernel);
  m.impl("vocab_cross_entropy_forward", forward_kernel);
  m.impl("vocab_cross_entropy_backward", backward_kernel);
}

}  // namespace parallel_ext
