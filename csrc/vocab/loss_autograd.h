// What the gradients of the ops of the loss share.
#pragma once

#include "base/empty.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "vocab/loss.h"

namespace parallel_ext {

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// The arguments of a forward that are no tensors. The class weight is saved as a tensor.
struct LossCall {
  VocabLoss loss;
  Group group;

  VocabLoss loss_with(const at::Tensor& weight) const {
    VocabLoss whole = loss;
    whole.weight = if_defined(weight);
    return whole;
  }
};

// Keeps them in the graph, and marks the outputs that have no gradient.
inline void keep_for_backward(AutogradContext* ctx, LossCall call, std::array<bool, 3> wanted,
                              const Tensors<4>& outputs) {
  const auto& [total, log_sum_exp, entropy, argmax] = outputs;
  variable_list constants{argmax};
  if (!wanted[0]) constants.push_back(log_sum_exp);
  if (!wanted[1]) constants.push_back(entropy);
  ctx->mark_non_differentiable(constants);
  ctx->set_materialize_grads(false);
  call.loss.weight.reset();
  keep_in_graph(ctx, std::move(call));
}

// The Meta form of LossOutputs, for logits in the dtype of `like`.
inline Tensors<5> loss_outputs_meta(const at::Tensor& like, const at::Tensor& labels,
                                    std::array<bool, 3> wanted, const VocabLoss& loss) {
  const auto options = like.options().dtype(wide_type(like));
  const auto per_token = [&](bool is_wanted, const at::TensorOptions& of_output) {
    return empty_if(is_wanted, labels.sym_sizes(), of_output);
  };
  const int64_t rows = wanted[1] ? kRowsWithEntropy : kRowsWithoutEntropy;
  return {loss.reduction == "none" ? per_token(true, options) : at::empty({}, options),
          per_token(wanted[0], options), per_token(wanted[1], options),
          per_token(wanted[2], options.dtype(at::kLong)),
          at::empty_symint({rows, labels.sym_size(0)}, options)};
}

inline LossGradients gradients_of(const variable_list& grad_outputs) {
  return {if_defined(grad_outputs[0]), if_defined(grad_outputs[1]), if_defined(grad_outputs[2])};
}

// In a backward, of whose result nothing shows what it depends on.
inline void refuse_create_graph(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), op, kNoSecondDerivative);
}

inline void refuse_gradient_of_weight(const char* op, const VocabLoss& loss) {
  TORCH_CHECK_VALUE(!loss.weight || !loss.weight->requires_grad() || !at::GradMode::is_enabled(),
                    op, ": weight requires a gradient, and there is none; pass weight.detach()");
}

}  // namespace parallel_ext
