// How the fused head and loss of vocab/linear_cross_entropy.cpp meets the dispatcher: its handles,
// shapes, autocast and gradient.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "check.h"
#include "linear/linear.h"
#include "ops.h"
#include "vocab/linear_cross_entropy.h"
#include "vocab/loss_autograd.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_vocab_cross_entropy";
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using NineTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                               at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

NineTensors forward_meta(const VocabLoss& loss, const at::Tensor& input,
                         const at::Tensor& head_weight, const MaybeTensor&,
                         const at::Tensor& labels, std::array<bool, 3> wanted,
                         std::array<bool, 3> needed, int64_t, const std::string&) {
  const auto options = input.options().dtype(wide_type(input));
  const auto if_there = [&](bool is_there, c10::SymIntArrayRef shape) {
    return is_there ? at::empty_symint(shape, options) : at::empty({0}, options);
  };
  const auto per_token = [&](bool is_there) { return if_there(is_there, labels.sym_sizes()); };
  const at::Tensor argmax = per_token(wanted[2]);
  const int64_t rows = wanted[1] ? kRowsWithEntropy : kRowsWithoutEntropy;
  const Ahead ahead = ahead_of(loss, input.scalar_type(), needed);
  const auto gradient = [&](int64_t which, c10::SymIntArrayRef shape) {
    const bool is_there = ahead == Ahead::kGradients && needed[which];
    return is_there ? at::empty_symint(shape, options.dtype(type_ahead(input)))
                    : at::empty({0}, options);
  };
  return {loss.reduction == "none" ? per_token(true) : at::empty({}, options),
          per_token(wanted[0]),
          per_token(wanted[1]),
          at::empty_symint(argmax.sym_sizes(), options.dtype(at::kLong)),
          at::empty_symint({rows, labels.sym_size(0)}, options),
          if_there(ahead == Ahead::kRows, input.sym_sizes()),
          gradient(0, input.sym_sizes()),
          gradient(1, head_weight.sym_sizes()),
          gradient(2, head_weight.sym_sizes().slice(0, 1))};
}

ThreeTensors backward_meta(const VocabLoss&, const MaybeTensor&, const MaybeTensor&,
                           const MaybeTensor&, const at::Tensor& input,
                           const at::Tensor& head_weight, const MaybeTensor&, const at::Tensor&,
                           const at::Tensor&, std::array<bool, 3> needed) {
  const auto if_needed = [&](int64_t which, c10::SymIntArrayRef shape) {
    return needed[which] ? at::empty_symint(shape, input.options())
                         : at::empty({0}, input.options());
  };
  return {if_needed(0, input.sym_sizes()), if_needed(1, head_weight.sym_sizes()),
          if_needed(2, head_weight.sym_sizes().slice(0, 1))};
}

at::Tensor frozen_backward_meta(const VocabLoss&, const MaybeTensor&, const MaybeTensor&,
                                const at::Tensor& expected_rows, const at::Tensor& head_weight,
                                const at::Tensor&, const at::Tensor&) {
  return at::empty_symint(expected_rows.sym_sizes(), head_weight.options());
}

// The kernel where nothing has a gradient, and the Meta kernel.
FourTensors loss_without_gradient(const VocabLoss& loss, const at::Tensor& input,
                                  const at::Tensor& head_weight, const MaybeTensor& head_bias,
                                  const at::Tensor& labels, std::array<bool, 3> wanted,
                                  int64_t group_size, const std::string& group_name) {
  const auto outputs =
      linear_vocab_cross_entropy_forward(loss, input, head_weight, head_bias, labels, wanted,
                                         {false, false, false}, group_size, group_name);
  return {std::get<0>(outputs), std::get<1>(outputs), std::get<2>(outputs), std::get<3>(outputs)};
}

// Autograd.

class LinearVocabCrossEntropy : public torch::autograd::Function<LinearVocabCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& head_weight, const MaybeTensor& head_bias,
                               const at::Tensor& labels, const VocabLoss& loss,
                               std::array<bool, 3> wanted, std::array<bool, 3> needed,
                               int64_t group_size, const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [total, log_sum_exp, entropy, argmax, normalizer, expected_rows, grad_input, grad_head,
          grad_bias] =
        linear_vocab_cross_entropy_forward(loss, input, head_weight, head_bias, labels, wanted,
                                           needed, group_size, group_name);
    keep_for_backward(ctx, loss, wanted, log_sum_exp, entropy, argmax);
    auto& data = ctx->saved_data;
    const Ahead ahead = ahead_of(loss, input.scalar_type(), needed);
    const bool frozen = ahead == Ahead::kRows, again = !frozen || wanted[1];
    ctx->save_for_backward(
        {again ? input : at::Tensor(), head_weight, head_bias.value_or(at::Tensor()), labels,
         loss.weight.value_or(at::Tensor()), normalizer, frozen ? expected_rows : at::Tensor()});
    if (ahead == Ahead::kGradients) {
      // Not saved variables: the first backward takes them, scales them and hands them out.
      data["gradients"] = std::vector<at::Tensor>{grad_input, grad_head, grad_bias};
    }
    data["group_size"] = group_size;
    data["group_name"] = group_name;
    return {total, log_sum_exp, entropy, argmax};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    variable_list grads(9);
    const auto [grad_loss, grad_log_sum_exp, grad_entropy] = gradients_of(grad_outputs);
    if (!grad_loss && !grad_log_sum_exp && !grad_entropy) return grads;
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), kOp,
                                ": second derivatives are not implemented; call backward without "
                                "create_graph=True");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &head_weight = saved[1], &labels = saved[3];
    const at::Tensor &normalizer = saved[5], &expected_rows = saved[6];
    const auto bias = if_defined(saved[2]);
    const VocabLoss loss = kept_loss(ctx, saved[4]);
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                     bias && ctx->needs_input_grad(2)};
    auto& data = ctx->saved_data;
    std::vector<at::Tensor> gradients;
    if (const auto ahead = data.find("gradients"); ahead != data.end()) {
      gradients = ahead->second.toTensorVector();
      data.erase(ahead);  // used or not: a kept loss must not keep them
    }
    if (!gradients.empty() && !grad_log_sum_exp && !grad_entropy) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      // Who divides a sum by the number of valid tokens brings infinity where there is none.
      const at::Tensor factor = grad_loss->masked_fill(labels.eq(loss.ignore_index).all(), 0);
      for (size_t which = 0; which < needed.size(); ++which) {
        if (needed[which]) {
          grads[which] = scaled(std::move(gradients[which]), factor, input.scalar_type());
        }
      }
    } else if (expected_rows.defined() && !grad_entropy) {
      grads[0] = linear_vocab_cross_entropy_frozen_backward(
          loss, grad_loss, grad_log_sum_exp, expected_rows, head_weight, labels, normalizer);
    } else {
      const auto [grad_input, grad_head, grad_bias] =
          linear_vocab_cross_entropy_backward(loss, grad_loss, grad_log_sum_exp, grad_entropy,
                                              input, head_weight, bias, labels, normalizer, needed);
      if (needed[0]) grads[0] = grad_input;
      if (needed[1]) grads[1] = grad_head;
      if (needed[2]) grads[2] = grad_bias;
    }
    if (grads[0].defined()) {  // partial so far: each rank has multiplied by its own rows
      grads[0] = reduce_from_region(grads[0], data["group_size"].toInt(),
                                    data["group_name"].toStringRef());
    }
    return grads;
  }

 private:
  // In the gradient's own memory. A device, or a compiler, cannot be asked for the factor.
  static at::Tensor scaled(at::Tensor gradient, const at::Tensor& factor, at::ScalarType dtype) {
    const bool known = factor.is_cpu() && !at::isTensorSubclassLike(factor);
    if (!known || factor.item().toDouble() != 1) gradient.mul_(factor);
    return gradient.to(dtype);
  }
};

FourTensors loss_autograd(const VocabLoss& loss, const at::Tensor& input,
                          const at::Tensor& head_weight, const MaybeTensor& head_bias,
                          const at::Tensor& labels, std::array<bool, 3> wanted, int64_t group_size,
                          const std::string& group_name) {
  refuse_gradient_of_weight(kOp, loss);
  const bool grad = at::GradMode::is_enabled();
  const std::array<bool, 3> needed{grad && input.requires_grad(),
                                   grad && head_weight.requires_grad(),
                                   grad && head_bias && head_bias->requires_grad()};
  const auto outputs = LinearVocabCrossEntropy::apply(input, head_weight, head_bias, labels, loss,
                                                      wanted, needed, group_size, group_name);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

ThreeTensors backward_autograd(const VocabLoss& loss, const MaybeTensor& grad_loss,
                               const MaybeTensor& grad_log_sum_exp, const MaybeTensor& grad_entropy,
                               const at::Tensor& input, const at::Tensor& head_weight,
                               const MaybeTensor& head_bias, const at::Tensor& labels,
                               const at::Tensor& normalizer, std::array<bool, 3> needed) {
  refuse_second_derivative(kOp, {grad_loss, grad_log_sum_exp, grad_entropy, input, head_weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return linear_vocab_cross_entropy_backward(loss, grad_loss, grad_log_sum_exp, grad_entropy, input,
                                             head_weight, head_bias, labels, normalizer, needed);
}

at::Tensor frozen_backward_autograd(const VocabLoss& loss, const MaybeTensor& grad_loss,
                                    const MaybeTensor& grad_log_sum_exp,
                                    const at::Tensor& expected_rows, const at::Tensor& head_weight,
                                    const at::Tensor& labels, const at::Tensor& normalizer) {
  refuse_second_derivative(kOp, {grad_loss, grad_log_sum_exp, expected_rows, head_weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return linear_vocab_cross_entropy_frozen_backward(loss, grad_loss, grad_log_sum_exp,
                                                    expected_rows, head_weight, labels, normalizer);
}

// Autocast: the GEMMs run in the lower precision, as those of torch.nn.functional.linear.
template <c10::DeviceType device>
FourTensors loss_autocast(const VocabLoss& loss, const at::Tensor& input,
                          const at::Tensor& head_weight, const MaybeTensor& head_bias,
                          const at::Tensor& labels, std::array<bool, 3> wanted, int64_t group_size,
                          const std::string& group_name) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return linear_vocab_cross_entropy(loss, at::autocast::cached_cast(dtype, input, device),
                                    at::autocast::cached_cast(dtype, head_weight, device),
                                    at::autocast::cached_cast(dtype, head_bias, device), labels,
                                    wanted, group_size, group_name);
}

}  // namespace

FourTensors linear_vocab_cross_entropy(const VocabLoss& loss, const at::Tensor& input,
                                       const at::Tensor& head_weight, const MaybeTensor& head_bias,
                                       const at::Tensor& labels, std::array<bool, 3> wanted,
                                       int64_t group_size, const std::string& group_name) {
  static const VocabLossOp<decltype(&linear_vocab_cross_entropy)> op(
      "parallel_ext::linear_vocab_cross_entropy");
  return op.call(loss, input, head_weight, head_bias, labels, wanted, group_size, group_name);
}

NineTensors linear_vocab_cross_entropy_forward(const VocabLoss& loss, const at::Tensor& input,
                                               const at::Tensor& head_weight,
                                               const MaybeTensor& head_bias,
                                               const at::Tensor& labels, std::array<bool, 3> wanted,
                                               std::array<bool, 3> needed, int64_t group_size,
                                               const std::string& group_name) {
  static const VocabLossOp<decltype(&linear_vocab_cross_entropy_forward)> op(
      "parallel_ext::linear_vocab_cross_entropy_forward");
  return op.call(loss, input, head_weight, head_bias, labels, wanted, needed, group_size,
                 group_name);
}

ThreeTensors linear_vocab_cross_entropy_backward(
    const VocabLoss& loss, const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
    const MaybeTensor& grad_entropy, const at::Tensor& input, const at::Tensor& head_weight,
    const MaybeTensor& head_bias, const at::Tensor& labels, const at::Tensor& normalizer,
    std::array<bool, 3> needed) {
  static const VocabLossOp<decltype(&linear_vocab_cross_entropy_backward)> op(
      "parallel_ext::linear_vocab_cross_entropy_backward");
  return op.call(loss, grad_loss, grad_log_sum_exp, grad_entropy, input, head_weight, head_bias,
                 labels, normalizer, needed);
}

at::Tensor linear_vocab_cross_entropy_frozen_backward(
    const VocabLoss& loss, const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
    const at::Tensor& expected_rows, const at::Tensor& head_weight, const at::Tensor& labels,
    const at::Tensor& normalizer) {
  static const VocabLossOp<decltype(&linear_vocab_cross_entropy_frozen_backward)> op(
      "parallel_ext::linear_vocab_cross_entropy_frozen_backward");
  return op.call(loss, grad_loss, grad_log_sum_exp, expected_rows, head_weight, labels, normalizer);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("linear_vocab_cross_entropy", vocab_loss_kernel<loss_without_gradient>);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("linear_vocab_cross_entropy", vocab_loss_kernel<loss_without_gradient>);
  m.impl("linear_vocab_cross_entropy_forward", vocab_loss_kernel<forward_meta>);
  m.impl("linear_vocab_cross_entropy_backward", vocab_loss_kernel<backward_meta>);
  m.impl("linear_vocab_cross_entropy_frozen_backward", vocab_loss_kernel<frozen_backward_meta>);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("linear_vocab_cross_entropy", vocab_loss_kernel<loss_autograd>);
  m.impl("linear_vocab_cross_entropy_backward", vocab_loss_kernel<backward_autograd>);
  m.impl("linear_vocab_cross_entropy_frozen_backward", vocab_loss_kernel<frozen_backward_autograd>);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCPU, m) {
  m.impl("linear_vocab_cross_entropy", vocab_loss_kernel<loss_autocast<c10::DeviceType::CPU>>);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCUDA, m) {
  m.impl("linear_vocab_cross_entropy", vocab_loss_kernel<loss_autocast<c10::DeviceType::CUDA>>);
}

}  // namespace parallel_ext
