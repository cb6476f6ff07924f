// Shapes, autograd and registration of the fused head and loss of vocab/linear_cross_entropy.cpp.
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>

#include "base/empty.h"
#include "base/kernel_choice.h"
#include "check.h"
#include "comm/comm.h"
#include "linear/ops.h"
#include "vocab/linear_cross_entropy.h"
#include "vocab/loss_autograd.h"
#include "vocab/ops.h"

namespace parallel_ext {
namespace {

Tensors<9> linear_loss_forward_meta(const at::Tensor& input, const at::Tensor& head_weight,
                                    const MaybeTensor&, const at::Tensor& labels,
                                    std::array<bool, 3> wanted, std::array<bool, 3> needed,
                                    const Group&, const VocabLoss& loss) {
  const auto options = input.options().dtype(wide_type(input));
  const Ahead ahead = ahead_of(loss, input.scalar_type(), needed);
  const auto gradient = [&](int64_t which, c10::SymIntArrayRef shape) {
    const bool is_there = ahead == Ahead::kGradients && needed[which];
    return empty_if(is_there, shape, is_there ? options.dtype(type_ahead(input)) : options);
  };
  return std::tuple_cat(
      loss_outputs_meta(input, labels, wanted, loss),
      Tensors<4>(empty_if(ahead == Ahead::kExpectedRows, input.sym_sizes(), options),
                 gradient(0, input.sym_sizes()), gradient(1, head_weight.sym_sizes()),
                 gradient(2, head_weight.sym_sizes().slice(0, 1))));
}

Tensors<3> linear_loss_backward_meta(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                     const at::Tensor& input, const at::Tensor& head_weight,
                                     const MaybeTensor&, const at::Tensor&, const at::Tensor&,
                                     std::array<bool, 3> needed) {
  return {empty_if(needed[0], input.sym_sizes(), input.options()),
          empty_if(needed[1], head_weight.sym_sizes(), input.options()),
          empty_if(needed[2], head_weight.sym_sizes().slice(0, 1), input.options())};
}

at::Tensor linear_loss_frozen_backward_meta(const MaybeTensor&, const MaybeTensor&,
                                            const at::Tensor& expected_rows,
                                            const at::Tensor& head_weight) {
  return at::empty_symint(expected_rows.sym_sizes(), head_weight.options());
}

// The hidden states that a rank has: all of them, [T, H], or, of ranks with tokens of their own,
// [B, sizes[rank], H]: gathered for the products, and the gradient is summed for each rank's.
struct Hidden {
  std::vector<int64_t> sizes;  // tokens of a sequence that each rank has; {} where it has all
  int64_t rank;
  Group group;

  at::Tensor of_all(const at::Tensor& input) const {
    if (sizes.empty()) return input;
    check_dim(kLinearLoss, "input", input, 3);
    return gather_tokens(input, sizes, rank, true, group).flatten(0, 1);
  }

  // The sum of the ranks' parts of the gradient, [T, H], in the shape of the input.
  at::Tensor summed(const at::Tensor& partial, const c10::SymInt& sequences) const {
    if (sizes.empty()) return reduce_from_region(partial, group);
    const int64_t tokens = sum_of_counts(kLinearLoss, "sizes", sizes);
    const auto whole = partial.view_symint({sequences, tokens, partial.sym_size(-1)});
    return sum_tokens(whole, sizes, rank, group);
  }
};

// The kernel where nothing has a gradient, and the Meta kernel.
Tensors<4> linear_loss_without_gradient(const at::Tensor& input, const at::Tensor& head_weight,
                                        const MaybeTensor& head_bias, const at::Tensor& labels,
                                        std::array<bool, 3> wanted, at::IntArrayRef sizes,
                                        int64_t rank, const Group& group, const VocabLoss& loss) {
  const Hidden hidden{sizes.vec(), rank, group};
  return from_list<Tensors<4>>(as_list(
      linear_vocab_cross_entropy_forward(hidden.of_all(input), head_weight, head_bias, labels,
                                         wanted, {false, false, false}, group, loss)));
}

class LinearVocabCrossEntropy : public torch::autograd::Function<LinearVocabCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& head_weight, const MaybeTensor& head_bias,
                               const at::Tensor& labels, std::array<bool, 3> wanted,
                               std::array<bool, 3> needed, at::IntArrayRef sizes, int64_t rank,
                               const Group& group, const VocabLoss& loss) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Hidden hidden{sizes.vec(), rank, group};
    auto [total, log_sum_exp, entropy, argmax, normalizer, expected_rows, grad_input, grad_head,
          grad_bias] =
        linear_vocab_cross_entropy_forward(hidden.of_all(input), head_weight, head_bias, labels,
                                           wanted, needed, group, loss);
    keep_for_backward(ctx, {loss, group}, wanted, {total, log_sum_exp, entropy, argmax});
    ctx->saved_data["sizes"] = hidden.sizes;
    ctx->saved_data["rank"] = rank;
    ctx->saved_data["sequences"] = input.sym_size(0);
    const Ahead ahead = ahead_of(loss, input.scalar_type(), needed);
    const bool frozen = ahead == Ahead::kExpectedRows, again = !frozen || wanted[1];
    ctx->save_for_backward(
        {again ? input : at::Tensor(), head_weight, head_bias.value_or(at::Tensor()), labels,
         loss.weight.value_or(at::Tensor()), normalizer, frozen ? expected_rows : at::Tensor()});
    if (ahead == Ahead::kGradients) {
      if (needed[0] && !sizes.empty()) {  // so that this rank keeps that of its own tokens only
        const auto dtype = input.scalar_type();
        if (dtype != at::kHalf && dtype != grad_input.scalar_type()) {  // a sum may overflow fp16
          grad_input = grad_input.to(dtype);
        }
        grad_input = hidden.summed(grad_input, input.sym_size(0));
      }
      // Not saved variables: the first backward scales them in place and returns them.
      ctx->saved_data["gradients"] = std::vector<at::Tensor>{grad_input, grad_head, grad_bias};
    }
    return {total, log_sum_exp, entropy, argmax};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    variable_list grads(10);
    const auto [grad_loss, grad_log_sum_exp, grad_entropy] = gradients_of(grad_outputs);
    if (!grad_loss && !grad_log_sum_exp && !grad_entropy) return grads;
    refuse_create_graph(kLinearLoss);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &input = saved[0], &head_weight = saved[1], &labels = saved[3];
    const at::Tensor &normalizer = saved[5], &expected_rows = saved[6];
    const auto bias = if_defined(saved[2]);
    const auto& call = kept_in_graph<LossCall>(ctx);
    const VocabLoss loss = call.loss_with(saved[4]);
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                     bias && ctx->needs_input_grad(2)};
    auto& data = ctx->saved_data;
    const Hidden hidden{data["sizes"].toIntVector(), data["rank"].toInt(), call.group};
    std::vector<at::Tensor> gradients;
    if (const auto ahead = data.find("gradients"); ahead != data.end()) {
      gradients = ahead->second.toTensorVector();
      data.erase(ahead);  // even if unused: a loss that is kept must not keep them
    }
    if (!gradients.empty() && !grad_log_sum_exp && !grad_entropy) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      // A caller that divides a sum by the number of valid tokens divides by zero without any.
      const at::Tensor factor = grad_loss->masked_fill(labels.eq(loss.ignore_index).all(), 0);
      for (size_t which = 0; which < needed.size(); ++which) {
        if (needed[which]) {
          grads[which] = scaled(std::move(gradients[which]), factor, input.scalar_type());
        }
      }
      if (!hidden.sizes.empty()) return grads;  // summed in the forward
    } else if (expected_rows.defined() && !grad_entropy) {
      grads[0] = linear_vocab_cross_entropy_frozen_backward(
          grad_loss, grad_log_sum_exp, expected_rows, head_weight, labels, normalizer, loss);
    } else {
      const auto [grad_input, grad_head, grad_bias] = linear_vocab_cross_entropy_backward(
          grad_loss, grad_log_sum_exp, grad_entropy, hidden.of_all(input), head_weight, bias,
          labels, normalizer, needed, loss);
      if (needed[0]) grads[0] = grad_input;
      if (needed[1]) grads[1] = grad_head;
      if (needed[2]) grads[2] = grad_bias;
    }
    if (grads[0].defined()) {  // partial: each rank has multiplied by its own rows
      grads[0] = hidden.summed(grads[0], data["sequences"].toSymInt());
    }
    return grads;
  }

 private:
  // Scales in place. The factor is not read back from a device or from a compiler's tracer.
  static at::Tensor scaled(at::Tensor gradient, const at::Tensor& factor, at::ScalarType dtype) {
    const bool traced = at::isTensorSubclassLike(gradient) || at::isTensorSubclassLike(factor);
    if (use_cuda_kernel(gradient) && gradient.is_contiguous() && !traced) {
      multiply_on_cuda(gradient, factor);
    } else if (!factor.is_cpu() || traced || factor.item().toDouble() != 1) {
      gradient.mul_(factor);
    }
    return gradient.to(dtype);
  }
};

Tensors<4> linear_loss_autograd(const at::Tensor& input, const at::Tensor& head_weight,
                                const MaybeTensor& head_bias, const at::Tensor& labels,
                                std::array<bool, 3> wanted, at::IntArrayRef sizes, int64_t rank,
                                const Group& group, const VocabLoss& loss) {
  refuse_gradient_of_weight(kLinearLoss, loss);
  const bool grad = at::GradMode::is_enabled();
  const std::array<bool, 3> needed{grad && input.requires_grad(),
                                   grad && head_weight.requires_grad(),
                                   grad && head_bias && head_bias->requires_grad()};
  return from_list<Tensors<4>>(LinearVocabCrossEntropy::apply(
      input, head_weight, head_bias, labels, wanted, needed, sizes, rank, group, loss));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<linear_vocab_cross_entropy>(library)
      .kernel<linear_loss_without_gradient>()
      .meta<linear_loss_without_gradient>()
      .on<linear_loss_autograd>(c10::DispatchKey::Autograd)
      .autocast<0, 1, 2>();
  implement<linear_vocab_cross_entropy_forward>(library).meta<linear_loss_forward_meta>();
  implement<linear_vocab_cross_entropy_backward>(library).meta<linear_loss_backward_meta>();
  implement<linear_vocab_cross_entropy_frozen_backward>(library)
      .meta<linear_loss_frozen_backward_meta>();
}

}  // namespace parallel_ext
