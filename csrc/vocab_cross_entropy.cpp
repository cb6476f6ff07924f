// Cross entropy of logits that are cut by vocabulary. A rank reduces its shard to one record per
// token, the records are exchanged once, and every rank merges the same records in rank order.
#include "vocab_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <numeric>

#include "check.h"
#include "comm.h"
#include "dispatch.h"
#include "kernel_choice.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr const char* kOp = "vocab_cross_entropy";

void check_loss(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab_size,
                int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
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

at::ScalarType record_type(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The passes over the shard by ATen calls, for any device; as in vocab_cross_entropy.h.

// Columns of the labels, and whether this shard holds them.
std::pair<at::Tensor, at::Tensor> local_labels(const at::Tensor& labels, int64_t vocab_start,
                                               int64_t size) {
  const at::Tensor column = labels - vocab_start;
  const at::Tensor own = (column >= 0).logical_and(column < size);
  return {column.masked_fill(own.logical_not(), 0).unsqueeze(1), own};
}

at::Tensor shard_record_aten(const at::Tensor& logits, const at::Tensor& labels,
                             int64_t vocab_start) {
  const auto options = logits.options().dtype(record_type(logits));
  constexpr double kLowest = -std::numeric_limits<double>::infinity();
  if (logits.size(1) == 0) {
    at::Tensor record = at::zeros({3, logits.size(0)}, options);
    record.select(0, 0).fill_(kLowest);
    return record;
  }
  const at::Tensor values = logits.to(record_type(logits));
  const at::Tensor max = values.amax(1);
  const at::Tensor base = max.masked_fill(max == kLowest, 0);
  const auto [column, own] = local_labels(labels, vocab_start, logits.size(1));
  return at::stack({max, (values - base.unsqueeze(1)).exp().sum(1),
                    values.gather(1, column).squeeze(1).masked_fill(own.logical_not(), 0)});
}

void shard_gradient_aten(const at::Tensor& logits, const at::Tensor& labels,
                         const at::Tensor& normalizer, const at::Tensor& scale, int64_t vocab_start,
                         at::Tensor& grad_logits) {
  if (logits.size(1) == 0) return;
  at::Tensor grad = logits.to(record_type(logits)) - normalizer[0].unsqueeze(1);
  grad.sub_(normalizer[1].unsqueeze(1)).exp_();
  const auto [column, own] = local_labels(labels, vocab_start, logits.size(1));
  grad.scatter_add_(1, column, own.to(grad.scalar_type()).neg().unsqueeze(1));
  grad.mul_(scale.unsqueeze(1)).masked_fill_((scale == 0).unsqueeze(1), 0);
  grad_logits.copy_(grad);
}

// Kernels.

// ATen cuts long sums by the number of threads; on the CPU the bits shall not depend on it.
at::Tensor sum_in_order(const at::Tensor& values) {
  if (!values.is_cpu()) return values.sum();
  const double* value = values.const_data_ptr<double>();
  return at::full({}, std::accumulate(value, value + values.numel(), 0.0), values.options());
}

std::tuple<at::Tensor, at::Tensor> forward_kernel(const at::Tensor& logits_in,
                                                  const at::Tensor& labels_in, int64_t vocab_size,
                                                  int64_t vocab_start, int64_t vocab_stop,
                                                  int64_t ignore_index,
                                                  const std::string& reduction, int64_t group_size,
                                                  const std::string& group_name) {
  const at::Tensor labels = labels_in.contiguous();
  check_loss(logits_in, labels, vocab_size, vocab_start, vocab_stop, ignore_index, reduction);
  const at::Tensor logits = with_adjacent_columns(logits_in);
  const at::Tensor record =
      (use_cpu_loops(logits) ? shard_record_cpu : shard_record_aten)(logits, labels, vocab_start);
  // Three numbers a token, every rank. The merge below is the same arithmetic on the same numbers
  // on every rank, so that its bits are equal too; in fp64 its own rounding does not count.
  const at::Tensor all = all_gather(kOp, record, group_size, group_name).to(at::kDouble);
  const at::Tensor maxima = all.select(1, 0), sums = all.select(1, 1), targets = all.select(1, 2);
  const at::Tensor max = maxima.amax(0);
  at::Tensor sum = at::zeros_like(max), target = at::zeros_like(max);
  for (int64_t rank = 0; rank < group_size; ++rank) {
    // A shard of nothing but -inf has the sum 0 and must not turn it into 0 * NaN.
    const at::Tensor weight = (maxima[rank] - max).exp().masked_fill(sums[rank] == 0, 0);
    sum += sums[rank] * weight;
    target += targets[rank];
  }
  const at::Tensor log_sum = sum.log(), ignored = labels == ignore_index;
  // The maximum is subtracted before anything small is added to it, here and in the gradient.
  at::Tensor loss = ((max - target) + log_sum).masked_fill(ignored, 0);
  if (reduction != "none") loss = sum_in_order(loss);
  if (reduction == "mean") loss = loss / ignored.logical_not().sum();
  return {loss.to(record.scalar_type()), at::stack({max, log_sum}).to(record.scalar_type())};
}

at::Tensor backward_kernel(const at::Tensor& grad_loss, const at::Tensor& logits_in,
                           const at::Tensor& labels_in, const at::Tensor& normalizer,
                           int64_t vocab_start, int64_t ignore_index,
                           const std::string& reduction) {
  TORCH_CHECK_VALUE(
      normalizer.dim() == 2 && normalizer.size(0) == 2 && normalizer.size(1) == logits_in.size(0),
      kOp, ": the normalizer of ", logits_in.size(0), " tokens has shape [2, ", logits_in.size(0),
      "], got ", normalizer.sizes());
  const at::Tensor labels = labels_in.contiguous(), logits = with_adjacent_columns(logits_in);
  const at::Tensor ignored = labels == ignore_index;
  at::Tensor scale = grad_loss.to(normalizer.scalar_type());
  if (reduction == "mean") scale = scale / ignored.logical_not().sum();
  scale = scale.expand_as(labels).masked_fill(ignored, 0).contiguous();
  at::Tensor grad_logits =
      at::empty_strided(logits.sizes(), {logits.stride(0), 1}, logits.options());
  (use_cpu_loops(logits) ? shard_gradient_cpu : shard_gradient_aten)(
      logits, labels, normalizer, scale, vocab_start, grad_logits);
  return grad_logits;
}

at::Tensor loss_kernel(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab_size,
                       int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
                       const std::string& reduction, int64_t group_size,
                       const std::string& group_name) {
  return std::get<0>(forward_kernel(logits, labels, vocab_size, vocab_start, vocab_stop,
                                    ignore_index, reduction, group_size, group_name));
}

// Meta.

std::tuple<at::Tensor, at::Tensor> forward_meta(const at::Tensor& logits, const at::Tensor& labels,
                                                int64_t, int64_t, int64_t, int64_t,
                                                const std::string& reduction, int64_t,
                                                const std::string&) {
  const auto options = logits.options().dtype(record_type(logits));
  at::Tensor per_token = at::empty_symint(labels.sym_sizes(), options);
  return {reduction == "none" ? per_token : at::empty({}, options),
          at::empty_symint({2, labels.sym_size(0)}, options)};
}

at::Tensor backward_meta(const at::Tensor&, const at::Tensor& logits, const at::Tensor&,
                         const at::Tensor&, int64_t, int64_t, const std::string&) {
  const auto strides = logits.sym_strides();
  const bool adjacent = strides[1] == 1 || logits.sym_size(1) <= 1;
  const bool plain = adjacent && strides[0] >= logits.sym_size(1);  // as with_adjacent_columns
  return at::empty_strided_symint(
      logits.sym_sizes(), {plain ? strides[0] : logits.sym_size(1).max(1), 1}, logits.options());
}

at::Tensor loss_meta(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab_size,
                     int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
                     const std::string& reduction, int64_t group_size,
                     const std::string& group_name) {
  return std::get<0>(forward_meta(logits, labels, vocab_size, vocab_start, vocab_stop, ignore_index,
                                  reduction, group_size, group_name));
}

// Autograd. The normalizer is saved, never the loss, which users add to in place.

class VocabCrossEntropy : public torch::autograd::Function<VocabCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits,
                            const at::Tensor& labels, int64_t vocab_size, int64_t vocab_start,
                            int64_t vocab_stop, int64_t ignore_index, const std::string& reduction,
                            int64_t group_size, const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [loss, normalizer] =
        vocab_cross_entropy_forward(logits, labels, vocab_size, vocab_start, vocab_stop,
                                    ignore_index, reduction, group_size, group_name);
    ctx->save_for_backward({logits, labels, normalizer});
    ctx->saved_data["vocab_start"] = vocab_start;
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["reduction"] = reduction;
    return loss;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    Variable grad_logits = vocab_cross_entropy_backward(
        grad_outputs[0], saved[0], saved[1], saved[2], ctx->saved_data["vocab_start"].toInt(),
        ctx->saved_data["ignore_index"].toInt(), ctx->saved_data["reduction"].toStringRef());
    variable_list grads(9);
    grads[0] = grad_logits;
    return grads;
  }
};

at::Tensor backward_autograd(const at::Tensor& grad_loss, const at::Tensor& logits,
                             const at::Tensor& labels, const at::Tensor& normalizer,
                             int64_t vocab_start, int64_t ignore_index,
                             const std::string& reduction) {
  refuse_second_derivative(kOp, {grad_loss, logits});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return vocab_cross_entropy_backward(grad_loss, logits, labels, normalizer, vocab_start,
                                      ignore_index, reduction);
}

at::Tensor loss_autograd(const at::Tensor& logits, const at::Tensor& labels, int64_t vocab_size,
                         int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
                         const std::string& reduction, int64_t group_size,
                         const std::string& group_name) {
  return VocabCrossEntropy::apply(logits, labels, vocab_size, vocab_start, vocab_stop, ignore_index,
                                  reduction, group_size, group_name);
}

}  // namespace

at::Tensor vocab_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                               int64_t vocab_size, int64_t vocab_start, int64_t vocab_stop,
                               int64_t ignore_index, const std::string& reduction,
                               int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(vocab_cross_entropy)>("parallel_ext::vocab_cross_entropy");
  return op.call(logits, labels, vocab_size, vocab_start, vocab_stop, ignore_index, reduction,
                 group_size, group_name);
}

std::tuple<at::Tensor, at::Tensor> vocab_cross_entropy_forward(
    const at::Tensor& logits, const at::Tensor& labels, int64_t vocab_size, int64_t vocab_start,
    int64_t vocab_stop, int64_t ignore_index, const std::string& reduction, int64_t group_size,
    const std::string& group_name) {
  static auto op =
      op_handle<decltype(vocab_cross_entropy_forward)>("parallel_ext::vocab_cross_entropy_forward");
  return op.call(logits, labels, vocab_size, vocab_start, vocab_stop, ignore_index, reduction,
                 group_size, group_name);
}

at::Tensor vocab_cross_entropy_backward(const at::Tensor& grad_loss, const at::Tensor& logits,
                                        const at::Tensor& labels, const at::Tensor& normalizer,
                                        int64_t vocab_start, int64_t ignore_index,
                                        const std::string& reduction) {
  static auto op = op_handle<decltype(vocab_cross_entropy_backward)>(
      "parallel_ext::vocab_cross_entropy_backward");
  return op.call(grad_loss, logits, labels, normalizer, vocab_start, ignore_index, reduction);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("vocab_cross_entropy", loss_kernel);
  m.impl("vocab_cross_entropy_forward", forward_kernel);
  m.impl("vocab_cross_entropy_backward", backward_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("vocab_cross_entropy", loss_meta);
  m.impl("vocab_cross_entropy_forward", forward_meta);
  m.impl("vocab_cross_entropy_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("vocab_cross_entropy", loss_autograd);
  m.impl("vocab_cross_entropy_backward", backward_autograd);
}

}  // namespace parallel_ext
