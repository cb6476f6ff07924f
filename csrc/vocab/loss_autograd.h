// What the gradients of the ops of the loss have in common: what a graph keeps of their options,
// and which of their outputs have gradients.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "vocab/loss_op.h"

namespace parallel_ext {

// All but the class weight, which goes with the saved variables, and marks what has no gradient.
inline void keep_for_backward(torch::autograd::AutogradContext* ctx, const VocabLoss& loss,
                              std::array<bool, 3> wanted, const at::Tensor& log_sum_exp,
                              const at::Tensor& entropy, const at::Tensor& argmax) {
  torch::autograd::variable_list constants{argmax};
  if (!wanted[0]) constants.push_back(log_sum_exp);
  if (!wanted[1]) constants.push_back(entropy);
  ctx->mark_non_differentiable(constants);
  ctx->set_materialize_grads(false);
  auto& data = ctx->saved_data;
  data["vocab_size"] = loss.vocab_size;
  data["vocab_start"] = loss.vocab_start;
  data["vocab_stop"] = loss.vocab_stop;
  data["ignore_index"] = loss.ignore_index;
  data["reduction"] = loss.reduction;
  data["label_smoothing"] = loss.label_smoothing;
  data["z_loss"] = loss.z_loss;
  data["softcap"] = loss.softcap;
  data["logit_scale"] = loss.logit_scale;
}

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

inline VocabLoss kept_loss(torch::autograd::AutogradContext* ctx, const at::Tensor& weight) {
  auto& data = ctx->saved_data;
  return {if_defined(weight),
          data["vocab_size"].toInt(),
          data["vocab_start"].toInt(),
          data["vocab_stop"].toInt(),
          data["ignore_index"].toInt(),
          data["reduction"].toStringRef(),
          data["label_smoothing"].toDouble(),
          data["z_loss"].toDouble(),
          data["softcap"].toOptional<double>(),
          data["logit_scale"].toDouble()};
}

inline LossGradients gradients_of(const torch::autograd::variable_list& grad_outputs) {
  return {if_defined(grad_outputs[0]), if_defined(grad_outputs[1]), if_defined(grad_outputs[2])};
}

inline void refuse_gradient_of_weight(const char* op, const VocabLoss& loss) {
  TORCH_CHECK_VALUE(!loss.weight || !loss.weight->requires_grad() || !at::GradMode::is_enabled(),
                    op, ": weight requires a gradient, and there is none; pass weight.detach()");
}

}  // namespace parallel_ext
