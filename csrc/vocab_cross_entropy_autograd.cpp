// How the cross entropy of vocab_cross_entropy.cpp meets the dispatcher: its handles, shapes and
// gradient. The normalizer is saved, never the loss, which users add to in place.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "check.h"
#include "dispatch.h"
#include "ops.h"
#include "vocab_shard.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr const char* kOp = "vocab_cross_entropy";
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Softcap = std::optional<double>;
using MaybeTensor = std::optional<at::Tensor>;

FiveTensors forward_meta(const at::Tensor& logits, const at::Tensor& labels, const MaybeTensor&,
                         int64_t, int64_t, int64_t, int64_t, const std::string& reduction, double,
                         double, Softcap, double, std::array<bool, 3> wanted, int64_t,
                         const std::string&) {
  const auto options = logits.options().dtype(wide_type(logits));
  const auto per_token = [&](bool of_tokens, at::ScalarType dtype) {
    return of_tokens ? at::empty_symint(labels.sym_sizes(), options.dtype(dtype))
                     : at::empty({0}, options.dtype(dtype));
  };
  const auto wide = wide_type(logits);
  const int64_t rows = wanted[1] ? kRowsWithEntropy : kRowsWithoutEntropy;
  return {reduction == "none" ? per_token(true, wide) : at::empty({}, options),
          per_token(wanted[0], wide), per_token(wanted[1], wide), per_token(wanted[2], at::kLong),
          at::empty_symint({rows, labels.sym_size(0)}, options)};
}

at::Tensor backward_meta(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                         const at::Tensor& logits, const at::Tensor&, const MaybeTensor&,
                         const at::Tensor&, int64_t, int64_t, int64_t, const std::string&, double,
                         double, Softcap, double) {
  const auto stride =
      has_adjacent_columns(logits) ? logits.sym_stride(0) : logits.sym_size(1).max(1);
  return at::empty_strided_symint(logits.sym_sizes(), {stride, 1}, logits.options());
}

void consuming_backward_meta(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                             at::Tensor&, const at::Tensor&, const MaybeTensor&, const at::Tensor&,
                             int64_t, int64_t, int64_t, const std::string&, double, double, Softcap,
                             double) {}

FourTensors loss_meta(const at::Tensor& logits, const at::Tensor& labels, const MaybeTensor& weight,
                      int64_t vocab_size, int64_t vocab_start, int64_t vocab_stop,
                      int64_t ignore_index, const std::string& reduction, double label_smoothing,
                      double z_loss, Softcap softcap, double logit_scale,
                      std::array<bool, 3> wanted, bool, int64_t group_size,
                      const std::string& group_name) {
  const auto [loss, log_sum_exp, entropy, argmax, _] = forward_meta(
      logits, labels, weight, vocab_size, vocab_start, vocab_stop, ignore_index, reduction,
      label_smoothing, z_loss, softcap, logit_scale, wanted, group_size, group_name);
  return {loss, log_sum_exp, entropy, argmax};
}

// Autograd.

class VocabCrossEntropy : public torch::autograd::Function<VocabCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& logits,
                               const at::Tensor& labels, const MaybeTensor& weight,
                               int64_t vocab_size, int64_t vocab_start, int64_t vocab_stop,
                               int64_t ignore_index, const std::string& reduction,
                               double label_smoothing, double z_loss, Softcap softcap,
                               double logit_scale, std::array<bool, 3> wanted, bool consume_logits,
                               int64_t group_size, const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [loss, log_sum_exp, entropy, argmax, normalizer] = vocab_cross_entropy_forward(
        logits, labels, weight, vocab_size, vocab_start, vocab_stop, ignore_index, reduction,
        label_smoothing, z_loss, softcap, logit_scale, wanted, group_size, group_name);
    variable_list constants{argmax};
    if (!wanted[0]) constants.push_back(log_sum_exp);
    if (!wanted[1]) constants.push_back(entropy);
    ctx->mark_non_differentiable(constants);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({logits, labels, weight.value_or(at::Tensor()), normalizer});
    ctx->saved_data["vocab_size"] = vocab_size;
    ctx->saved_data["vocab_start"] = vocab_start;
    ctx->saved_data["ignore_index"] = ignore_index;
    ctx->saved_data["reduction"] = reduction;
    ctx->saved_data["label_smoothing"] = label_smoothing;
    ctx->saved_data["z_loss"] = z_loss;
    ctx->saved_data["softcap"] = softcap;
    ctx->saved_data["logit_scale"] = logit_scale;
    ctx->saved_data["consume_logits"] = consume_logits;
    return {loss, log_sum_exp, entropy, argmax};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto given = [](const at::Tensor& tensor) {
      return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
    };
    variable_list grads(16);
    auto& data = ctx->saved_data;
    TORCH_CHECK_VALUE(!data["consumed"].isBool(), kOp,
                      ": a backward has written the gradient over these logits, as "
                      "consume_logits=True allows, so it cannot run again");
    const auto saved = ctx->get_saved_variables();
    const auto grad_loss = given(grad_outputs[0]), grad_log_sum_exp = given(grad_outputs[1]);
    const auto grad_entropy = given(grad_outputs[2]);
    if (!grad_loss && !grad_log_sum_exp && !grad_entropy) return grads;
    const auto run = [&](auto backward, auto& logits) {
      return backward(grad_loss, grad_log_sum_exp, grad_entropy, logits, saved[1], given(saved[2]),
                      saved[3], data["vocab_size"].toInt(), data["vocab_start"].toInt(),
                      data["ignore_index"].toInt(), data["reduction"].toStringRef(),
                      data["label_smoothing"].toDouble(), data["z_loss"].toDouble(),
                      data["softcap"].toOptional<double>(), data["logit_scale"].toDouble());
    };
    if (data["consume_logits"].toBool()) {
      at::Tensor logits = saved[0].detach();
      run(vocab_cross_entropy_backward_, logits);
      data["consumed"] = true;
      grads[0] = logits;
    } else {
      grads[0] = run(vocab_cross_entropy_backward, saved[0]);
    }
    return grads;
  }
};

void refuse_second(const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
                   const MaybeTensor& grad_entropy, const at::Tensor& logits) {
  refuse_second_derivative(
      kOp, {grad_loss.value_or(at::Tensor()), grad_log_sum_exp.value_or(at::Tensor()),
            grad_entropy.value_or(at::Tensor()), logits});
}

at::Tensor backward_autograd(const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
                             const MaybeTensor& grad_entropy, const at::Tensor& logits,
                             const at::Tensor& labels, const MaybeTensor& weight,
                             const at::Tensor& normalizer, int64_t vocab_size, int64_t vocab_start,
                             int64_t ignore_index, const std::string& reduction,
                             double label_smoothing, double z_loss, Softcap softcap,
                             double logit_scale) {
  refuse_second(grad_loss, grad_log_sum_exp, grad_entropy, logits);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return vocab_cross_entropy_backward(grad_loss, grad_log_sum_exp, grad_entropy, logits, labels,
                                      weight, normalizer, vocab_size, vocab_start, ignore_index,
                                      reduction, label_smoothing, z_loss, softcap, logit_scale);
}

void consuming_backward_autograd(const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
                                 const MaybeTensor& grad_entropy, at::Tensor& logits,
                                 const at::Tensor& labels, const MaybeTensor& weight,
                                 const at::Tensor& normalizer, int64_t vocab_size,
                                 int64_t vocab_start, int64_t ignore_index,
                                 const std::string& reduction, double label_smoothing,
                                 double z_loss, Softcap softcap, double logit_scale) {
  refuse_second(grad_loss, grad_log_sum_exp, grad_entropy, logits);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  vocab_cross_entropy_backward_(grad_loss, grad_log_sum_exp, grad_entropy, logits, labels, weight,
                                normalizer, vocab_size, vocab_start, ignore_index, reduction,
                                label_smoothing, z_loss, softcap, logit_scale);
  torch::autograd::impl::bump_version(logits);  // whoever else has saved them must not use them
}

FourTensors loss_autograd(const at::Tensor& logits, const at::Tensor& labels,
                          const MaybeTensor& weight, int64_t vocab_size, int64_t vocab_start,
                          int64_t vocab_stop, int64_t ignore_index, const std::string& reduction,
                          double label_smoothing, double z_loss, Softcap softcap,
                          double logit_scale, std::array<bool, 3> wanted, bool consume_logits,
                          int64_t group_size, const std::string& group_name) {
  TORCH_CHECK_VALUE(!weight || !weight->requires_grad() || !at::GradMode::is_enabled(), kOp,
                    ": weight requires a gradient, and there is none; pass weight.detach()");
  if (consume_logits && logits.requires_grad() && at::GradMode::is_enabled()) {
    TORCH_CHECK_VALUE(!logits.is_leaf() && !(logits.is_view() && logits._base().is_leaf()), kOp,
                      ": consume_logits=True would write a gradient over a leaf, which the user "
                      "keeps; pass logits that were computed");
    TORCH_CHECK_VALUE(logits.dim() == 2 && has_adjacent_columns(logits), kOp,
                      ": consume_logits=True needs columns one apart and rows that do not overlap, "
                      "got strides ",
                      logits.sym_strides());
  }
  const auto outputs =
      VocabCrossEntropy::apply(logits, labels, weight, vocab_size, vocab_start, vocab_stop,
                               ignore_index, reduction, label_smoothing, z_loss, softcap,
                               logit_scale, wanted, consume_logits, group_size, group_name);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

}  // namespace

FourTensors vocab_cross_entropy(const at::Tensor& logits, const at::Tensor& labels,
                                const MaybeTensor& weight, int64_t vocab_size, int64_t vocab_start,
                                int64_t vocab_stop, int64_t ignore_index,
                                const std::string& reduction, double label_smoothing, double z_loss,
                                Softcap softcap, double logit_scale, std::array<bool, 3> wanted,
                                bool consume_logits, int64_t group_size,
                                const std::string& group_name) {
  static auto op = op_handle<decltype(vocab_cross_entropy)>("parallel_ext::vocab_cross_entropy");
  return op.call(logits, labels, weight, vocab_size, vocab_start, vocab_stop, ignore_index,
                 reduction, label_smoothing, z_loss, softcap, logit_scale, wanted, consume_logits,
                 group_size, group_name);
}

FiveTensors vocab_cross_entropy_forward(const at::Tensor& logits, const at::Tensor& labels,
                                        const MaybeTensor& weight, int64_t vocab_size,
                                        int64_t vocab_start, int64_t vocab_stop,
                                        int64_t ignore_index, const std::string& reduction,
                                        double label_smoothing, double z_loss, Softcap softcap,
                                        double logit_scale, std::array<bool, 3> wanted,
                                        int64_t group_size, const std::string& group_name) {
  static auto op =
      op_handle<decltype(vocab_cross_entropy_forward)>("parallel_ext::vocab_cross_entropy_forward");
  return op.call(logits, labels, weight, vocab_size, vocab_start, vocab_stop, ignore_index,
                 reduction, label_smoothing, z_loss, softcap, logit_scale, wanted, group_size,
                 group_name);
}

at::Tensor vocab_cross_entropy_backward(const MaybeTensor& grad_loss,
                                        const MaybeTensor& grad_log_sum_exp,
                                        const MaybeTensor& grad_entropy, const at::Tensor& logits,
                                        const at::Tensor& labels, const MaybeTensor& weight,
                                        const at::Tensor& normalizer, int64_t vocab_size,
                                        int64_t vocab_start, int64_t ignore_index,
                                        const std::string& reduction, double label_smoothing,
                                        double z_loss, Softcap softcap, double logit_scale) {
  static auto op = op_handle<decltype(vocab_cross_entropy_backward)>(
      "parallel_ext::vocab_cross_entropy_backward");
  return op.call(grad_loss, grad_log_sum_exp, grad_entropy, logits, labels, weight, normalizer,
                 vocab_size, vocab_start, ignore_index, reduction, label_smoothing, z_loss, softcap,
                 logit_scale);
}

void vocab_cross_entropy_backward_(const MaybeTensor& grad_loss,
                                   const MaybeTensor& grad_log_sum_exp,
                                   const MaybeTensor& grad_entropy, at::Tensor& logits,
                                   const at::Tensor& labels, const MaybeTensor& weight,
                                   const at::Tensor& normalizer, int64_t vocab_size,
                                   int64_t vocab_start, int64_t ignore_index,
                                   const std::string& reduction, double label_smoothing,
                                   double z_loss, Softcap softcap, double logit_scale) {
  static auto op = op_handle<decltype(vocab_cross_entropy_backward_)>(
      "parallel_ext::vocab_cross_entropy_backward_");
  op.call(grad_loss, grad_log_sum_exp, grad_entropy, logits, labels, weight, normalizer, vocab_size,
          vocab_start, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("vocab_cross_entropy", loss_meta);
  m.impl("vocab_cross_entropy_forward", forward_meta);
  m.impl("vocab_cross_entropy_backward", backward_meta);
  m.impl("vocab_cross_entropy_backward_", consuming_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("vocab_cross_entropy", loss_autograd);
  m.impl("vocab_cross_entropy_backward", backward_autograd);
  m.impl("vocab_cross_entropy_backward_", consuming_backward_autograd);
}

}  // namespace parallel_ext
