// A linear layer of each expert and its low-rank adapter in one, on the rows that are its own:
// output = rows weight^T + scale (rows A^T) B^T.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "base/workspace.h"
#include "check.h"
#include "dispatch.h"
#include "linear/lora.h"
#include "moe/linear.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_factors(const char* op, const at::Tensor& weight, const at::Tensor& lora_a,
                   const at::Tensor& lora_b) {
  check_floating(op, "lora_a", lora_a);
  check_same_dtype(op, "lora_b", lora_b, "lora_a", lora_a);
  check_dim(op, "lora_a", lora_a, 3);
  check_dim(op, "lora_b", lora_b, 3);
  TORCH_CHECK_VALUE(lora_a.size(0) == weight.size(0) && lora_a.size(2) == weight.size(2), op,
                    ": lora_a of shape ", lora_a.sizes(), " does not fit weights of shape ",
                    weight.sizes(), "; it must be [", weight.size(0), ", r, ", weight.size(2), "]");
  TORCH_CHECK_VALUE(lora_b.size(0) == weight.size(0) && lora_b.size(1) == weight.size(1) &&
                        lora_b.size(2) == lora_a.size(1),
                    op, ": lora_b of shape ", lora_b.sizes(), " does not fit lora_a of shape ",
                    lora_a.sizes(), " and weights of shape ", weight.sizes(), "; it must be [",
                    weight.size(0), ", ", weight.size(1), ", ", lora_a.size(1), "]");
}

TwoTensors moe_lora_linear_forward_kernel(const at::Tensor& rows, const at::Tensor& weight,
                                          const at::Tensor& lora_a, const at::Tensor& lora_b,
                                          at::IntArrayRef counts, double scale) {
  check_moe_linear("moe_lora_linear", rows, weight, counts);
  check_factors("moe_lora_linear", weight, lora_a, lora_b);
  const auto dtype = dtype_of_adapter(rows);
  const at::Tensor wide = rows.to(dtype), a = lora_a.to(dtype), b = lora_b.to(dtype);
  at::Tensor output = pooled_empty({rows.size(0), weight.size(1)}, rows.options());
  at::Tensor low = at::empty({rows.size(0), lora_a.size(1)}, wide.options());
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    at::Tensor own_low = low.narrow(0, first, count), out = output.narrow(0, first, count);
    at::mm_out(own_low, wide.narrow(0, first, count), a.select(0, expert).t());
    at::mm_out(out, rows.narrow(0, first, count), weight.select(0, expert).t());
    add_scaled_product(out, own_low, b.select(0, expert).t(), scale);
  });
  return {output, low};
}

TwoTensors moe_lora_linear_forward_meta(const at::Tensor& rows, const at::Tensor& weight,
                                        const at::Tensor& lora_a, const at::Tensor&,
                                        at::IntArrayRef, double) {
  return {at::empty_symint({rows.sym_size(0), weight.sym_size(1)}, rows.options()),
          at::empty_symint({rows.sym_size(0), lora_a.sym_size(1)},
                           rows.options().dtype(dtype_of_adapter(rows)))};
}

FourTensors moe_lora_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& rows,
                                            const at::Tensor& weight, const at::Tensor& lora_a,
                                            const at::Tensor& lora_b, const at::Tensor& low,
                                            at::IntArrayRef counts, double scale,
                                            std::array<bool, 4> needed, double weight_grad_scale) {
  const char* op = "moe_lora_linear_backward";
  check_moe_linear(op, rows, weight, counts);
  check_factors(op, weight, lora_a, lora_b);
  check_same_dtype(op, "grad_output", grad_output, "rows", rows);
  check_shape(op, "grad_output", grad_output, {rows.size(0), weight.size(1)});
  check_shape(op, "low", low, {rows.size(0), lora_a.size(1)});
  const auto dtype = dtype_of_adapter(rows);
  const at::Tensor wide = rows.to(dtype), wide_grads = grad_output.to(dtype);
  const at::Tensor a = lora_a.to(dtype), b = lora_b.to(dtype);
  const auto if_needed = [&](size_t index, const at::Tensor& like) {
    return needed[index] ? at::empty(like.sizes(), like.options()) : at::empty({0}, like.options());
  };
  at::Tensor grad_rows = if_needed(0, rows), grad_weight = if_needed(1, weight),
             grad_a = if_needed(2, a), grad_b = if_needed(3, b);
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    const at::Tensor own = wide.narrow(0, first, count), grad = wide_grads.narrow(0, first, count);
    const at::Tensor base_grad = grad_output.narrow(0, first, count);
    at::Tensor grad_low;  // without the scale
    if (needed[0] || needed[2]) grad_low = at::mm(grad, b.select(0, expert));
    if (needed[0]) {
      at::Tensor out = grad_rows.narrow(0, first, count);
      at::mm_out(out, base_grad, weight.select(0, expert));
      add_scaled_product(out, grad_low, a.select(0, expert), scale);
    }
    if (needed[1]) {
      at::Tensor out = grad_weight.select(0, expert);
      scaled_product_out(out, base_grad.t(), rows.narrow(0, first, count), weight_grad_scale);
    }
    if (needed[2]) {
      at::Tensor out = grad_a.select(0, expert);
      scaled_product_out(out, grad_low.t(), own, scale * weight_grad_scale);
    }
    if (needed[3]) {
      at::Tensor out = grad_b.select(0, expert);
      scaled_product_out(out, grad.t(), low.narrow(0, first, count), scale * weight_grad_scale);
    }
  });
  return {grad_rows, grad_weight, grad_a.to(lora_a.scalar_type()), grad_b.to(lora_b.scalar_type())};
}

FourTensors moe_lora_linear_backward_meta(const at::Tensor&, const at::Tensor& rows,
                                          const at::Tensor& weight, const at::Tensor& lora_a,
                                          const at::Tensor& lora_b, const at::Tensor&,
                                          at::IntArrayRef, double, std::array<bool, 4> needed,
                                          double) {
  const auto grad_of = [&](size_t index, const at::Tensor& tensor) {
    return needed[index] ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                         : at::empty({0}, tensor.options());
  };
  return {grad_of(0, rows), grad_of(1, weight), grad_of(2, lora_a), grad_of(3, lora_b)};
}

class MoeLoraLinear : public torch::autograd::Function<MoeLoraLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weight,
                            const at::Tensor& lora_a, const at::Tensor& lora_b,
                            at::IntArrayRef counts, double scale, double weight_grad_scale) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [output, low] = moe_lora_linear_forward(rows, weight, lora_a, lora_b, counts, scale);
    ctx->save_for_backward({rows, weight, lora_a, lora_b, low});
    ctx->saved_data["counts"] = counts.vec();
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["weight_grad_scale"] = weight_grad_scale;
    return output;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    std::array<bool, 4> needed{};
    for (size_t i = 0; i < 4; ++i) needed[i] = ctx->needs_input_grad(i);
    auto [grad_rows, grad_weight, grad_a, grad_b] = moe_lora_linear_backward(
        grad_outputs[0], saved[0], saved[1], saved[2], saved[3], saved[4],
        ctx->saved_data["counts"].toIntVector(), ctx->saved_data["scale"].toDouble(), needed,
        ctx->saved_data["weight_grad_scale"].toDouble());
    return {needed[0] ? grad_rows : Variable(),
            needed[1] ? grad_weight : Variable(),
            needed[2] ? grad_a : Variable(),
            needed[3] ? grad_b : Variable(),
            Variable(),
            Variable(),
            Variable()};
  }
};

at::Tensor moe_lora_linear_autograd(const at::Tensor& rows, const at::Tensor& weight,
                                    const at::Tensor& lora_a, const at::Tensor& lora_b,
                                    at::IntArrayRef counts, double scale,
                                    double weight_grad_scale) {
  return MoeLoraLinear::apply(rows, weight, lora_a, lora_b, counts, scale, weight_grad_scale);
}

FourTensors moe_lora_linear_backward_autograd(const at::Tensor& grad_output, const at::Tensor& rows,
                                              const at::Tensor& weight, const at::Tensor& lora_a,
                                              const at::Tensor& lora_b, const at::Tensor& low,
                                              at::IntArrayRef counts, double scale,
                                              std::array<bool, 4> needed,
                                              double weight_grad_scale) {
  refuse_second_derivative("moe_lora_linear", {grad_output, rows, weight, lora_a, lora_b});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return moe_lora_linear_backward(grad_output, rows, weight, lora_a, lora_b, low, counts, scale,
                                  needed, weight_grad_scale);
}

at::Tensor moe_lora_linear_kernel(const at::Tensor& rows, const at::Tensor& weight,
                                  const at::Tensor& lora_a, const at::Tensor& lora_b,
                                  at::IntArrayRef counts, double scale, double) {
  return std::get<0>(moe_lora_linear_forward(rows, weight, lora_a, lora_b, counts, scale));
}

}  // namespace

at::Tensor moe_lora_linear(const at::Tensor& rows, const at::Tensor& weight,
                           const at::Tensor& lora_a, const at::Tensor& lora_b,
                           at::IntArrayRef counts, double scale, double weight_grad_scale) {
  static auto op = op_handle<decltype(moe_lora_linear)>("parallel_ext::moe_lora_linear");
  return op.call(rows, weight, lora_a, lora_b, counts, scale, weight_grad_scale);
}

std::tuple<at::Tensor, at::Tensor> moe_lora_linear_forward(const at::Tensor& rows,
                                                           const at::Tensor& weight,
                                                           const at::Tensor& lora_a,
                                                           const at::Tensor& lora_b,
                                                           at::IntArrayRef counts, double scale) {
  static auto op =
      op_handle<decltype(moe_lora_linear_forward)>("parallel_ext::moe_lora_linear_forward");
  return op.call(rows, weight, lora_a, lora_b, counts, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_lora_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& rows, const at::Tensor& weight,
    const at::Tensor& lora_a, const at::Tensor& lora_b, const at::Tensor& low,
    at::IntArrayRef counts, double scale, std::array<bool, 4> needed, double weight_grad_scale) {
  static auto op =
      op_handle<decltype(moe_lora_linear_backward)>("parallel_ext::moe_lora_linear_backward");
  return op.call(grad_output, rows, weight, lora_a, lora_b, low, counts, scale, needed,
                 weight_grad_scale);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_lora_linear", moe_lora_linear_kernel);
  m.impl("moe_lora_linear_forward", moe_lora_linear_forward_kernel);
  m.impl("moe_lora_linear_backward", moe_lora_linear_backward_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("moe_lora_linear_forward", moe_lora_linear_forward_meta);
  m.impl("moe_lora_linear_backward", moe_lora_linear_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("moe_lora_linear", moe_lora_linear_autograd);
  m.impl("moe_lora_linear_backward", moe_lora_linear_backward_autograd);
}

}  // namespace parallel_ext
