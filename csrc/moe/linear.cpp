// A linear layer of each expert, on the rows that are its own.
#include "moe/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "base/workspace.h"
#include "check.h"
#include "dispatch.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

at::Tensor moe_linear_kernel(const at::Tensor& rows, const at::Tensor& weight,
                             at::IntArrayRef counts, double) {
  check_moe_linear("moe_linear", rows, weight, counts);
  at::Tensor output = pooled_empty({rows.size(0), weight.size(1)}, rows.options());
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    at::Tensor out = output.narrow(0, first, count);
    at::mm_out(out, rows.narrow(0, first, count), weight.select(0, expert).t());
  });
  return output;
}

TwoTensors moe_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& rows,
                                      const at::Tensor& weight, at::IntArrayRef counts,
                                      std::array<bool, 2> needed, double weight_grad_scale) {
  const char* op = "moe_linear_backward";
  check_moe_linear(op, rows, weight, counts);
  check_same_dtype(op, "grad_output", grad_output, "rows", rows);
  check_shape(op, "grad_output", grad_output, {rows.size(0), weight.size(1)});
  at::Tensor grad_rows = at::empty({0}, rows.options()), grad_weight = at::empty_like(grad_rows);
  if (needed[0]) grad_rows = pooled_empty(rows.sizes(), rows.options());
  if (needed[1]) grad_weight = at::empty(weight.sizes(), weight.options());
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    const at::Tensor grad = grad_output.narrow(0, first, count);
    if (needed[0]) {
      at::Tensor out = grad_rows.narrow(0, first, count);
      at::mm_out(out, grad, weight.select(0, expert));
    }
    if (needed[1]) {
      at::Tensor out = grad_weight.select(0, expert);
      scaled_product_out(out, grad.t(), rows.narrow(0, first, count), weight_grad_scale);
    }
  });
  return {grad_rows, grad_weight};
}

at::Tensor moe_linear_meta(const at::Tensor& rows, const at::Tensor& weight, at::IntArrayRef,
                           double) {
  return at::empty_symint({rows.sym_size(0), weight.sym_size(1)}, rows.options());
}

TwoTensors moe_linear_backward_meta(const at::Tensor&, const at::Tensor& rows,
                                    const at::Tensor& weight, at::IntArrayRef,
                                    std::array<bool, 2> needed, double) {
  const at::Tensor none = at::empty({0}, rows.options());
  return {
      needed[0] ? at::empty_symint(rows.sym_sizes(), rows.options()) : none,
      needed[1] ? at::empty_symint(weight.sym_sizes(), weight.options()) : at::empty_like(none)};
}

class MoeLinear : public torch::autograd::Function<MoeLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weight,
                            at::IntArrayRef counts, double weight_grad_scale) {
    ctx->save_for_backward({rows, weight});
    ctx->saved_data["counts"] = counts.vec();
    ctx->saved_data["weight_grad_scale"] = weight_grad_scale;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return moe_linear(rows, weight, counts, weight_grad_scale);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 2> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    auto [grad_rows, grad_weight] = moe_linear_backward(
        grad_outputs[0], saved[0], saved[1], ctx->saved_data["counts"].toIntVector(), needed,
        ctx->saved_data["weight_grad_scale"].toDouble());
    return {needed[0] ? grad_rows : Variable(), needed[1] ? grad_weight : Variable(), Variable(),
            Variable()};
  }
};

at::Tensor moe_linear_autograd(const at::Tensor& rows, const at::Tensor& weight,
                               at::IntArrayRef counts, double weight_grad_scale) {
  return MoeLinear::apply(rows, weight, counts, weight_grad_scale);
}

TwoTensors moe_linear_backward_autograd(const at::Tensor& grad_output, const at::Tensor& rows,
                                        const at::Tensor& weight, at::IntArrayRef counts,
                                        std::array<bool, 2> needed, double weight_grad_scale) {
  refuse_second_derivative("moe_linear", {grad_output, rows, weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return moe_linear_backward(grad_output, rows, weight, counts, needed, weight_grad_scale);
}

}  // namespace

at::Tensor moe_linear(const at::Tensor& rows, const at::Tensor& weight, at::IntArrayRef counts,
                      double weight_grad_scale) {
  static auto op = op_handle<decltype(moe_linear)>("parallel_ext::moe_linear");
  return op.call(rows, weight, counts, weight_grad_scale);
}

std::tuple<at::Tensor, at::Tensor> moe_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& rows, const at::Tensor& weight,
    at::IntArrayRef counts, std::array<bool, 2> needed, double weight_grad_scale) {
  static auto op = op_handle<decltype(moe_linear_backward)>("parallel_ext::moe_linear_backward");
  return op.call(grad_output, rows, weight, counts, needed, weight_grad_scale);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_linear", moe_linear_kernel);
  m.impl("moe_linear_backward", moe_linear_backward_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("moe_linear", moe_linear_meta);
  m.impl("moe_linear_backward", moe_linear_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("moe_linear", moe_linear_autograd);
  m.impl("moe_linear_backward", moe_linear_backward_autograd);
}

}  // namespace parallel_ext
