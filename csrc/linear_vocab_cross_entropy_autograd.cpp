// How the fused head and loss of linear_vocab_cross_entropy.cpp meets the dispatcher: its handles,
// shapes, autocast and gradient.
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "check.h"
#include "dispatch.h"
#include "linear.h"
#include "linear_vocab_cross_entropy.h"
#include "ops.h"
#include "vocab_shard.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear_vocab_cross_entropy";
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using EightTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                at::Tensor, at::Tensor, at::Tensor>;
using Softcap = std::optional<double>;
using MaybeTensor = std::optional<at::Tensor>;

EightTensors forward_meta(const at::Tensor& input, const at::Tensor& head_weight,
                          const MaybeTensor&, const at::Tensor& labels, const MaybeTensor&, int64_t,
                          int64_t, int64_t, int64_t, const std::string& reduction, double, double,
                          Softcap softcap, double, std::array<bool, 3> wanted,
                          std::array<bool, 3> needed, int64_t, const std::string&) {
  const auto options = input.options().dtype(wide_type(input));
  const auto if_there = [&](bool is_there, c10::SymIntArrayRef shape) {
    return is_there ? at::empty_symint(shape, options) : at::empty({0}, options);
  };
  const auto per_token = [&](bool is_there) { return if_there(is_there, labels.sym_sizes()); };
  const at::Tensor argmax = per_token(wanted[2]);
  const int64_t rows = wanted[1] ? kRowsWithEntropy : kRowsWithoutEntropy;
  const Ahead ahead = ahead_of(input.scalar_type(), reduction, softcap, needed);
  const auto of_ahead = [&](int64_t which, c10::SymIntArrayRef shape) {
    const bool is_there = ahead == Ahead::kGradients && needed[which];
    return is_there ? at::empty_symint(shape, options.dtype(type_ahead(input)))
                    : at::empty({0}, options);
  };
  return {reduction == "none" ? per_token(true) : at::empty({}, options),
          per_token(wanted[0]),
          per_token(wanted[1]),
          at::empty_symint(argmax.sym_sizes(), options.dtype(at::kLong)),
          at::empty_symint({rows, labels.sym_size(0)}, options),
          ahead == Ahead::kRows ? at::empty_symint(input.sym_sizes(), options)
                                : of_ahead(0, input.sym_sizes()),
          of_ahead(1, head_weight.sym_sizes()),
          of_ahead(2, head_weight.sym_sizes().slice(0, 1))};
}

ThreeTensors backward_meta(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                           const at::Tensor& input, const at::Tensor& head_weight,
                           const MaybeTensor&, const at::Tensor&, const MaybeTensor&,
                           const at::Tensor&, int64_t, int64_t, int64_t, const std::string&, double,
                           double, Softcap, double, std::array<bool, 3> needed) {
  const auto if_needed = [&](int64_t which, c10::SymIntArrayRef shape) {
    return needed[which] ? at::empty_symint(shape, input.options())
                         : at::empty({0}, input.options());
  };
  return {if_needed(0, input.sym_sizes()), if_needed(1, head_weight.sym_sizes()),
          if_needed(2, head_weight.sym_sizes().slice(0, 1))};
}

at::Tensor frozen_backward_meta(const MaybeTensor&, const MaybeTensor&,
                                const at::Tensor& expected_rows, const at::Tensor& head_weight,
                                const at::Tensor&, const MaybeTensor&, const at::Tensor&, int64_t,
                                int64_t, int64_t, const std::string&, double, double, double) {
  return at::empty_symint(expected_rows.sym_sizes(), head_weight.options());
}

// The kernel where nothing has a gradient, and the Meta kernel.
FourTensors loss_without_gradient(const at::Tensor& input, const at::Tensor& head_weight,
                                  const MaybeTensor& head_bias, const at::Tensor& labels,
                                  const MaybeTensor& weight, int64_t vocab_size,
                                  int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
                                  const std::string& reduction, double label_smoothing,
                                  double z_loss, Softcap softcap, double logit_scale,
                                  std::array<bool, 3> wanted, int64_t group_size,
                                  const std::string& group_name) {
  const auto outputs = linear_vocab_cross_entropy_forward(
      input, head_weight, head_bias, labels, weight, vocab_size, vocab_start, vocab_stop,
      ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, wanted,
      {false, false, false}, group_size, group_name);
  return {std::get<0>(outputs), std::get<1>(outputs), std::get<2>(outputs), std::get<3>(outputs)};
}

// Autograd.

class LinearVocabCrossEntropy : public torch::autograd::Function<LinearVocabCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& head_weight, const MaybeTensor& head_bias,
                               const at::Tensor& labels, const MaybeTensor& weight,
                               int64_t vocab_size, int64_t vocab_start, int64_t vocab_stop,
                               int64_t ignore_index, const std::string& reduction,
                               double label_smoothing, double z_loss, Softcap softcap,
                               double logit_scale, std::array<bool, 3> wanted,
                               std::array<bool, 3> needed, int64_t group_size,
                               const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [loss, log_sum_exp, entropy, argmax, normalizer, grad_input, grad_head, grad_bias] =
        linear_vocab_cross_entropy_forward(input, head_weight, head_bias, labels, weight,
                                           vocab_size, vocab_start, vocab_stop, ignore_index,
                                           reduction, label_smoothing, z_loss, softcap, logit_scale,
                                           wanted, needed, group_size, group_name);
    variable_list constants{argmax};
    if (!wanted[0]) constants.push_back(log_sum_exp);
    if (!wanted[1]) constants.push_back(entropy);
    ctx->mark_non_differentiable(constants);
    ctx->set_materialize_grads(false);
    auto& data = ctx->saved_data;
    const Ahead ahead = ahead_of(input.scalar_type(), reduction, softcap, needed);
    const bool rows = ahead == Ahead::kRows, again = !rows || wanted[1];
    ctx->save_for_backward({again ? input : at::Tensor(), head_weight,
                            head_bias.value_or(at::Tensor()), labels, weight.value_or(at::Tensor()),
                            normalizer, rows ? grad_input : at::Tensor()});
    if (ahead == Ahead::kGradients) {
      // Not saved variables: the first backward takes them, scales them and hands them out.
      data["gradients"] = std::vector<at::Tensor>{grad_input, grad_head, grad_bias};
    }
    data["needed"] = std::vector<bool>(needed.begin(), needed.end());
    data["vocab_size"] = vocab_size;
    data["vocab_start"] = vocab_start;
    data["ignore_index"] = ignore_index;
    data["reduction"] = reduction;
    data["label_smoothing"] = label_smoothing;
    data["z_loss"] = z_loss;
    data["softcap"] = softcap;
    data["logit_scale"] = logit_scale;
    data["group_size"] = group_size;
    data["group_name"] = group_name;
    return {loss, log_sum_exp, entropy, argmax};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto given = [](const at::Tensor& tensor) {
      return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
    };
    variable_list grads(18);
    const auto grad_loss = given(grad_outputs[0]), grad_log_sum_exp = given(grad_outputs[1]);
    const auto grad_entropy = given(grad_outputs[2]);
    if (!grad_loss && !grad_log_sum_exp && !grad_entropy) return grads;
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), kOp,
                                ": second derivatives are not implemented; call backward without "
                                "create_graph=True");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &head_weight = saved[1], &normalizer = saved[5];
    const at::Tensor& rows = saved[6];
    const auto bias = given(saved[2]), weight = given(saved[4]);
    auto& data = ctx->saved_data;
    const int64_t vocab_size = data["vocab_size"].toInt();
    const int64_t vocab_start = data["vocab_start"].toInt();
    const int64_t ignore_index = data["ignore_index"].toInt();
    const std::string reduction = data["reduction"].toStringRef();
    const double label_smoothing = data["label_smoothing"].toDouble();
    const double z_loss = data["z_loss"].toDouble();
    const double logit_scale = data["logit_scale"].toDouble();
    const auto in_forward = data["needed"].toBoolList();
    std::array<bool, 3> needed{};
    for (size_t which = 0; which < needed.size(); ++which) {
      needed[which] = in_forward[which] && ctx->needs_input_grad(which);
    }
    std::vector<at::Tensor> gradients;
    if (const auto ahead = data.find("gradients"); ahead != data.end()) {
      gradients = ahead->second.toTensorVector();
      data.erase(ahead);  // used or not: a kept loss must not keep them
    }
    if (!gradients.empty() && !grad_log_sum_exp && !grad_entropy) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      // Who divides a sum by the number of valid tokens brings infinity where there is none.
      const at::Tensor factor = grad_loss->masked_fill(saved[3].eq(ignore_index).all(), 0);
      for (size_t which = 0; which < needed.size(); ++which) {
        if (needed[which]) {
          grads[which] = scaled(std::move(gradients[which]), factor, input.scalar_type());
        }
      }
    } else if (rows.defined() && !grad_entropy) {
      grads[0] = linear_vocab_cross_entropy_frozen_backward(
          grad_loss, grad_log_sum_exp, rows, head_weight, saved[3], weight, normalizer, vocab_size,
          vocab_start, ignore_index, reduction, label_smoothing, z_loss, logit_scale);
    } else {
      const auto [grad_input, grad_head, grad_bias] = linear_vocab_cross_entropy_backward(
          grad_loss, grad_log_sum_exp, grad_entropy, input, head_weight, bias, saved[3], weight,
          normalizer, vocab_size, vocab_start, ignore_index, reduction, label_smoothing, z_loss,
          data["softcap"].toOptional<double>(), logit_scale, needed);
      if (needed[0]) grads[0] = grad_input;
      if (needed[1]) grads[1] = grad_head;
      if (needed[2]) grads[2] = grad_bias;
    }
    if (grads[0].defined()) {  // partial so far: each rank has multiplied by its own rows
      grads[0] =
          reduce_from_tp(grads[0], data["group_size"].toInt(), data["group_name"].toStringRef());
    }
    return grads;
  }

 private:
  // In the gradient's own memory.
  static at::Tensor scaled(at::Tensor gradient, const at::Tensor& factor, at::ScalarType dtype) {
    return gradient.mul_(factor).to(dtype);
  }
};

FourTensors loss_autograd(const at::Tensor& input, const at::Tensor& head_weight,
                          const MaybeTensor& head_bias, const at::Tensor& labels,
                          const MaybeTensor& weight, int64_t vocab_size, int64_t vocab_start,
                          int64_t vocab_stop, int64_t ignore_index, const std::string& reduction,
                          double label_smoothing, double z_loss, Softcap softcap,
                          double logit_scale, std::array<bool, 3> wanted, int64_t group_size,
                          const std::string& group_name) {
  const bool grad = at::GradMode::is_enabled();
  TORCH_CHECK_VALUE(!weight || !weight->requires_grad() || !grad, kOp,
                    ": weight requires a gradient, and there is none; pass weight.detach()");
  const std::array<bool, 3> needed{grad && input.requires_grad(),
                                   grad && head_weight.requires_grad(),
                                   grad && head_bias && head_bias->requires_grad()};
  const auto outputs = LinearVocabCrossEntropy::apply(
      input, head_weight, head_bias, labels, weight, vocab_size, vocab_start, vocab_stop,
      ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, wanted, needed,
      group_size, group_name);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

ThreeTensors backward_autograd(const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
                               const MaybeTensor& grad_entropy, const at::Tensor& input,
                               const at::Tensor& head_weight, const MaybeTensor& head_bias,
                               const at::Tensor& labels, const MaybeTensor& weight,
                               const at::Tensor& normalizer, int64_t vocab_size,
                               int64_t vocab_start, int64_t ignore_index,
                               const std::string& reduction, double label_smoothing, double z_loss,
                               Softcap softcap, double logit_scale, std::array<bool, 3> needed) {
  refuse_second_derivative(
      kOp, {grad_loss.value_or(at::Tensor()), grad_log_sum_exp.value_or(at::Tensor()),
            grad_entropy.value_or(at::Tensor()), input, head_weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return linear_vocab_cross_entropy_backward(grad_loss, grad_log_sum_exp, grad_entropy, input,
                                             head_weight, head_bias, labels, weight, normalizer,
                                             vocab_size, vocab_start, ignore_index, reduction,
                                             label_smoothing, z_loss, softcap, logit_scale, needed);
}

at::Tensor frozen_backward_autograd(const MaybeTensor& grad_loss,
                                    const MaybeTensor& grad_log_sum_exp,
                                    const at::Tensor& expected_rows, const at::Tensor& head_weight,
                                    const at::Tensor& labels, const MaybeTensor& weight,
                                    const at::Tensor& normalizer, int64_t vocab_size,
                                    int64_t vocab_start, int64_t ignore_index,
                                    const std::string& reduction, double label_smoothing,
                                    double z_loss, double logit_scale) {
  refuse_second_derivative(
      kOp, {grad_loss.value_or(at::Tensor()), grad_log_sum_exp.value_or(at::Tensor()),
            expected_rows, head_weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return linear_vocab_cross_entropy_frozen_backward(
      grad_loss, grad_log_sum_exp, expected_rows, head_weight, labels, weight, normalizer,
      vocab_size, vocab_start, ignore_index, reduction, label_smoothing, z_loss, logit_scale);
}

// Autocast: the GEMMs run in the lower precision, as those of torch.nn.functional.linear.
template <c10::DeviceType device>
FourTensors loss_autocast(const at::Tensor& input, const at::Tensor& head_weight,
                          const MaybeTensor& head_bias, const at::Tensor& labels,
                          const MaybeTensor& weight, int64_t vocab_size, int64_t vocab_start,
                          int64_t vocab_stop, int64_t ignore_index, const std::string& reduction,
                          double label_smoothing, double z_loss, Softcap softcap,
                          double logit_scale, std::array<bool, 3> wanted, int64_t group_size,
                          const std::string& group_name) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return linear_vocab_cross_entropy(at::autocast::cached_cast(dtype, input, device),
                                    at::autocast::cached_cast(dtype, head_weight, device),
                                    at::autocast::cached_cast(dtype, head_bias, device), labels,
                                    weight, vocab_size, vocab_start, vocab_stop, ignore_index,
                                    reduction, label_smoothing, z_loss, softcap, logit_scale,
                                    wanted, group_size, group_name);
}

}  // namespace

FourTensors linear_vocab_cross_entropy(const at::Tensor& input, const at::Tensor& head_weight,
                                       const MaybeTensor& head_bias, const at::Tensor& labels,
                                       const MaybeTensor& weight, int64_t vocab_size,
                                       int64_t vocab_start, int64_t vocab_stop,
                                       int64_t ignore_index, const std::string& reduction,
                                       double label_smoothing, double z_loss, Softcap softcap,
                                       double logit_scale, std::array<bool, 3> wanted,
                                       int64_t group_size, const std::string& group_name) {
  static auto op =
      op_handle<decltype(linear_vocab_cross_entropy)>("parallel_ext::linear_vocab_cross_entropy");
  return op.call(input, head_weight, head_bias, labels, weight, vocab_size, vocab_start, vocab_stop,
                 ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, wanted,
                 group_size, group_name);
}

EightTensors linear_vocab_cross_entropy_forward(
    const at::Tensor& input, const at::Tensor& head_weight, const MaybeTensor& head_bias,
    const at::Tensor& labels, const MaybeTensor& weight, int64_t vocab_size, int64_t vocab_start,
    int64_t vocab_stop, int64_t ignore_index, const std::string& reduction, double label_smoothing,
    double z_loss, Softcap softcap, double logit_scale, std::array<bool, 3> wanted,
    std::array<bool, 3> needed, int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(linear_vocab_cross_entropy_forward)>(
      "parallel_ext::linear_vocab_cross_entropy_forward");
  return op.call(input, head_weight, head_bias, labels, weight, vocab_size, vocab_start, vocab_stop,
                 ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, wanted,
                 needed, group_size, group_name);
}

ThreeTensors linear_vocab_cross_entropy_backward(
    const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
    const MaybeTensor& grad_entropy, const at::Tensor& input, const at::Tensor& head_weight,
    const MaybeTensor& head_bias, const at::Tensor& labels, const MaybeTensor& weight,
    const at::Tensor& normalizer, int64_t vocab_size, int64_t vocab_start, int64_t ignore_index,
    const std::string& reduction, double label_smoothing, double z_loss, Softcap softcap,
    double logit_scale, std::array<bool, 3> needed) {
  static auto op = op_handle<decltype(linear_vocab_cross_entropy_backward)>(
      "parallel_ext::linear_vocab_cross_entropy_backward");
  return op.call(grad_loss, grad_log_sum_exp, grad_entropy, input, head_weight, head_bias, labels,
                 weight, normalizer, vocab_size, vocab_start, ignore_index, reduction,
                 label_smoothing, z_loss, softcap, logit_scale, needed);
}

at::Tensor linear_vocab_cross_entropy_frozen_backward(
    const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
    const at::Tensor& expected_rows, const at::Tensor& head_weight, const at::Tensor& labels,
    const MaybeTensor& weight, const at::Tensor& normalizer, int64_t vocab_size,
    int64_t vocab_start, int64_t ignore_index, const std::string& reduction, double label_smoothing,
    double z_loss, double logit_scale) {
  static auto op = op_handle<decltype(linear_vocab_cross_entropy_frozen_backward)>(
      "parallel_ext::linear_vocab_cross_entropy_frozen_backward");
  return op.call(grad_loss, grad_log_sum_exp, expected_rows, head_weight, labels, weight,
                 normalizer, vocab_size, vocab_start, ignore_index, reduction, label_smoothing,
                 z_loss, logit_scale);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("linear_vocab_cross_entropy", loss_without_gradient);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("linear_vocab_cross_entropy", loss_without_gradient);
  m.impl("linear_vocab_cross_entropy_forward", forward_meta);
  m.impl("linear_vocab_cross_entropy_backward", backward_meta);
  m.impl("linear_vocab_cross_entropy_frozen_backward", frozen_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("linear_vocab_cross_entropy", loss_autograd);
  m.impl("linear_vocab_cross_entropy_backward", backward_autograd);
  m.impl("linear_vocab_cross_entropy_frozen_backward", frozen_backward_autograd);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCPU, m) {
  m.impl("linear_vocab_cross_entropy", loss_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCUDA, m) {
  m.impl("linear_vocab_cross_entropy", loss_autocast<c10::DeviceType::CUDA>);
}

}  // namespace parallel_ext
