// How the cross entropy of vocab/cross_entropy.cpp meets the dispatcher: its handles, shapes and
// gradient. The normalizer is saved, never the loss, which users add to in place.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "check.h"
#include "ops.h"
#include "vocab/loss_autograd.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "vocab_cross_entropy";
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

FiveTensors forward_meta(const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels,
                         std::array<bool, 3> wanted, int64_t, const std::string&) {
  const auto wide = wide_type(logits);
  const auto options = logits.options().dtype(wide);
  const auto per_token = [&](bool of_tokens, at::ScalarType dtype) {
    return of_tokens ? at::empty_symint(labels.sym_sizes(), options.dtype(dtype))
                     : at::empty({0}, options.dtype(dtype));
  };
  const int64_t rows = wanted[1] ? kRowsWithEntropy : kRowsWithoutEntropy;
  return {loss.reduction == "none" ? per_token(true, wide) : at::empty({}, options),
          per_token(wanted[0], wide), per_token(wanted[1], wide), per_token(wanted[2], at::kLong),
          at::empty_symint({rows, labels.sym_size(0)}, options)};
}

at::Tensor backward_meta(const VocabLoss&, const MaybeTensor&, const MaybeTensor&,
                         const MaybeTensor&, const at::Tensor& logits, const at::Tensor&,
                         const at::Tensor&) {
  return at::empty_strided_symint(logits.sym_sizes(), {row_stride_of_gradient(logits), 1},
                                  logits.options());
}

void consuming_backward_meta(const VocabLoss&, const MaybeTensor&, const MaybeTensor&,
                             const MaybeTensor&, at::Tensor&, const at::Tensor&,
                             const at::Tensor&) {}

FourTensors loss_meta(const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels,
                      std::array<bool, 3> wanted, bool, int64_t group_size,
                      const std::string& group_name) {
  const auto [total, log_sum_exp, entropy, argmax, _] =
      forward_meta(loss, logits, labels, wanted, group_size, group_name);
  return {total, log_sum_exp, entropy, argmax};
}

// Autograd.

class VocabCrossEntropy : public torch::autograd::Function<VocabCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& logits,
                               const at::Tensor& labels, const VocabLoss& loss,
                               std::array<bool, 3> wanted, bool consume_logits, int64_t group_size,
                               const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [total, log_sum_exp, entropy, argmax, normalizer] =
        vocab_cross_entropy_forward(loss, logits, labels, wanted, group_size, group_name);
    keep_for_backward(ctx, loss, wanted, log_sum_exp, entropy, argmax);
    ctx->save_for_backward({logits, labels, loss.weight.value_or(at::Tensor()), normalizer});
    ctx->saved_data["consume_logits"] = consume_logits;
    return {total, log_sum_exp, entropy, argmax};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    variable_list grads(7);
    auto& data = ctx->saved_data;
    TORCH_CHECK_VALUE(!data["consumed"].isBool(), kOp,
                      ": a backward has written the gradient over these logits, as "
                      "consume_logits=True allows, so it cannot run again");
    const auto saved = ctx->get_saved_variables();
    const auto [grad_loss, grad_log_sum_exp, grad_entropy] = gradients_of(grad_outputs);
    if (!grad_loss && !grad_log_sum_exp && !grad_entropy) return grads;
    const VocabLoss loss = kept_loss(ctx, saved[2]);
    if (data["consume_logits"].toBool()) {
      at::Tensor logits = saved[0].detach();
      vocab_cross_entropy_backward_(loss, grad_loss, grad_log_sum_exp, grad_entropy, logits,
                                    saved[1], saved[3]);
      data["consumed"] = true;
      grads[0] = logits;
    } else {
      grads[0] = vocab_cross_entropy_backward(loss, grad_loss, grad_log_sum_exp, grad_entropy,
                                              saved[0], saved[1], saved[3]);
    }
    return grads;
  }
};

at::Tensor backward_autograd(const VocabLoss& loss, const MaybeTensor& grad_loss,
                             const MaybeTensor& grad_log_sum_exp, const MaybeTensor& grad_entropy,
                             const at::Tensor& logits, const at::Tensor& labels,
                             const at::Tensor& normalizer) {
  refuse_second_derivative(kOp, {grad_loss, grad_log_sum_exp, grad_entropy, logits});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return vocab_cross_entropy_backward(loss, grad_loss, grad_log_sum_exp, grad_entropy, logits,
                                      labels, normalizer);
}

void consuming_backward_autograd(const VocabLoss& loss, const MaybeTensor& grad_loss,
                                 const MaybeTensor& grad_log_sum_exp,
                                 const MaybeTensor& grad_entropy, at::Tensor& logits,
                                 const at::Tensor& labels, const at::Tensor& normalizer) {
  refuse_second_derivative(kOp, {grad_loss, grad_log_sum_exp, grad_entropy, logits});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  vocab_cross_entropy_backward_(loss, grad_loss, grad_log_sum_exp, grad_entropy, logits, labels,
                                normalizer);
  torch::autograd::impl::bump_version(logits);  // whoever else has saved them must not use them
}

FourTensors loss_autograd(const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels,
                          std::array<bool, 3> wanted, bool consume_logits, int64_t group_size,
                          const std::string& group_name) {
  refuse_gradient_of_weight(kOp, loss);
  if (consume_logits && logits.requires_grad() && at::GradMode::is_enabled()) {
    TORCH_CHECK_VALUE(!logits.is_leaf() && !(logits.is_view() && logits._base().is_leaf()), kOp,
                      ": consume_logits=True would write a gradient over a leaf, which the user "
                      "keeps; pass logits that were computed");
    TORCH_CHECK_VALUE(logits.dim() == 2 && has_adjacent_columns(logits), kOp,
                      ": consume_logits=True needs columns one apart and rows that do not overlap, "
                      "got strides ",
                      logits.sym_strides());
  }
  const auto outputs = VocabCrossEntropy::apply(logits, labels, loss, wanted, consume_logits,
                                                group_size, group_name);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

}  // namespace

FourTensors vocab_cross_entropy(const VocabLoss& loss, const at::Tensor& logits,
                                const at::Tensor& labels, std::array<bool, 3> wanted,
                                bool consume_logits, int64_t group_size,
                                const std::string& group_name) {
  static const VocabLossOp<decltype(&vocab_cross_entropy)> op("parallel_ext::vocab_cross_entropy");
  return op.call(loss, logits, labels, wanted, consume_logits, group_size, group_name);
}

FiveTensors vocab_cross_entropy_forward(const VocabLoss& loss, const at::Tensor& logits,
                                        const at::Tensor& labels, std::array<bool, 3> wanted,
                                        int64_t group_size, const std::string& group_name) {
  static const VocabLossOp<decltype(&vocab_cross_entropy_forward)> op(
      "parallel_ext::vocab_cross_entropy_forward");
  return op.call(loss, logits, labels, wanted, group_size, group_name);
}

at::Tensor vocab_cross_entropy_backward(const VocabLoss& loss, const MaybeTensor& grad_loss,
                                        const MaybeTensor& grad_log_sum_exp,
                                        const MaybeTensor& grad_entropy, const at::Tensor& logits,
                                        const at::Tensor& labels, const at::Tensor& normalizer) {
  static const VocabLossOp<decltype(&vocab_cross_entropy_backward)> op(
      "parallel_ext::vocab_cross_entropy_backward");
  return op.call(loss, grad_loss, grad_log_sum_exp, grad_entropy, logits, labels, normalizer);
}

void vocab_cross_entropy_backward_(const VocabLoss& loss, const MaybeTensor& grad_loss,
                                   const MaybeTensor& grad_log_sum_exp,
                                   const MaybeTensor& grad_entropy, at::Tensor& logits,
                                   const at::Tensor& labels, const at::Tensor& normalizer) {
  static const VocabLossOp<decltype(&vocab_cross_entropy_backward_)> op(
      "parallel_ext::vocab_cross_entropy_backward_");
  op.call(loss, grad_loss, grad_log_sum_exp, grad_entropy, logits, labels, normalizer);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("vocab_cross_entropy", vocab_loss_kernel<loss_meta>);
  m.impl("vocab_cross_entropy_forward", vocab_loss_kernel<forward_meta>);
  m.impl("vocab_cross_entropy_backward", vocab_loss_kernel<backward_meta>);
  m.impl("vocab_cross_entropy_backward_", vocab_loss_kernel<consuming_backward_meta>);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("vocab_cross_entropy", vocab_loss_kernel<loss_autograd>);
  m.impl("vocab_cross_entropy_backward", vocab_loss_kernel<backward_autograd>);
  m.impl("vocab_cross_entropy_backward_", vocab_loss_kernel<consuming_backward_autograd>);
}

}  // namespace parallel_ext
