// The linear layers of experts with their low-rank adapters, each applied to the rows of its
// expert: output = rows weight^T + scale (rows A^T) B^T.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "base/empty.h"
#include "base/workspace.h"
#include "check.h"
#include "gradient.h"
#include "linear/linear.h"
#include "moe/linear.h"
#include "moe/ops.h"

namespace parallel_ext {
namespace {

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

Tensors<2> moe_lora_linear_forward_kernel(const at::Tensor& rows, const at::Tensor& weight,
                                          const at::Tensor& lora_a, const at::Tensor& lora_b,
                                          at::IntArrayRef counts, double scale) {
  check_moe_linear("moe_lora_linear", rows, weight, counts);
  check_factors("moe_lora_linear", weight, lora_a, lora_b);
  const auto dtype = dtype_of_adapter(rows);
  const at::Tensor wide = rows.to(dtype), a = lora_a.to(dtype), b = lora_b.to(dtype);
  at::Tensor output = pooled_empty({rows.size(0), weight.size(1)}, rows.options());
  at::Tensor lora_a_out = at::empty({rows.size(0), lora_a.size(1)}, wide.options());
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    at::Tensor own_lora_a_out = lora_a_out.narrow(0, first, count),
               out = output.narrow(0, first, count);
    at::mm_out(own_lora_a_out, wide.narrow(0, first, count), a.select(0, expert).t());
    sum_of_products_out(out, rows.narrow(0, first, count), weight.select(0, expert).t(),
                        own_lora_a_out, b.select(0, expert).t(), scale);
  });
  return {output, lora_a_out};
}

Tensors<2> moe_lora_linear_forward_meta(const at::Tensor& rows, const at::Tensor& weight,
                                        const at::Tensor& lora_a) {
  return {at::empty_symint({rows.sym_size(0), weight.sym_size(1)}, rows.options()),
          at::empty_symint({rows.sym_size(0), lora_a.sym_size(1)},
                           rows.options().dtype(dtype_of_adapter(rows)))};
}

Tensors<4> moe_lora_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& rows,
                                           const at::Tensor& weight, const at::Tensor& lora_a,
                                           const at::Tensor& lora_b, const at::Tensor& lora_a_out,
                                           at::IntArrayRef counts, double scale,
                                           std::array<bool, 4> needed, double weight_grad_scale) {
  const char* op = "moe_lora_linear_backward";
  check_moe_linear(op, rows, weight, counts);
  check_factors(op, weight, lora_a, lora_b);
  check_same_dtype(op, "grad_output", grad_output, "rows", rows);
  check_shape(op, "grad_output", grad_output, {rows.size(0), weight.size(1)});
  check_shape(op, "lora_a_out", lora_a_out, {rows.size(0), lora_a.size(1)});
  const auto dtype = dtype_of_adapter(rows);
  const at::Tensor wide = rows.to(dtype), wide_grads = grad_output.to(dtype);
  const at::Tensor a = lora_a.to(dtype), b = lora_b.to(dtype);
  at::Tensor grad_rows = empty_like_if(needed[0], rows),
             grad_weight = empty_like_if(needed[1], weight), grad_a = empty_like_if(needed[2], a),
             grad_b = empty_like_if(needed[3], b);
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    const at::Tensor own = wide.narrow(0, first, count), grad = wide_grads.narrow(0, first, count);
    const at::Tensor base_grad = grad_output.narrow(0, first, count);
    at::Tensor grad_lora_a_out;  // without the scale
    if (needed[0] || needed[2]) grad_lora_a_out = at::mm(grad, b.select(0, expert));
    if (needed[0]) {
      at::Tensor out = grad_rows.narrow(0, first, count);
      sum_of_products_out(out, base_grad, weight.select(0, expert), grad_lora_a_out,
                          a.select(0, expert), scale);
    }
    if (needed[1]) {
      at::Tensor out = grad_weight.select(0, expert);
      scaled_product_out(out, base_grad.t(), rows.narrow(0, first, count), weight_grad_scale);
    }
    if (needed[2]) {
      at::Tensor out = grad_a.select(0, expert);
      scaled_product_out(out, grad_lora_a_out.t(), own, scale * weight_grad_scale);
    }
    if (needed[3]) {
      at::Tensor out = grad_b.select(0, expert);
      scaled_product_out(out, grad.t(), lora_a_out.narrow(0, first, count),
                         scale * weight_grad_scale);
    }
  });
  return {grad_rows, grad_weight, grad_a.to(lora_a.scalar_type()), grad_b.to(lora_b.scalar_type())};
}

Tensors<4> moe_lora_linear_backward_meta(const at::Tensor&, const at::Tensor& rows,
                                         const at::Tensor& weight, const at::Tensor& lora_a,
                                         const at::Tensor& lora_b, const at::Tensor&,
                                         at::IntArrayRef, double, std::array<bool, 4> needed) {
  return {empty_like_if(needed[0], rows), empty_like_if(needed[1], weight),
          empty_like_if(needed[2], lora_a), empty_like_if(needed[3], lora_b)};
}

struct MoeLoraLinear : Gradient<MoeLoraLinear, moe_lora_linear, Saved<0, 1, 2, 3>, Saved<1>,
                                moe_lora_linear_forward> {
  static variable_list rule(const ForwardCall<moe_lora_linear>& forward,
                            const variable_list& grads) {
    const auto [rows, weight, lora_a, lora_b, counts, scale, weight_grad_scale] =
        forward.arguments();
    return forward.gradients(moe_lora_linear_backward(grads[0], rows, weight, lora_a, lora_b,
                                                      forward.output(1), counts, scale,
                                                      forward.needed<4>(), weight_grad_scale));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  // Autocast leaves lora_a and lora_b to the kernel, which casts them to the dtype of the rows.
  implement<moe_lora_linear>(library)
      .kernel_by<moe_lora_linear_forward>()
      .gradient<MoeLoraLinear>()
      .autocast<0, 1>();
  implement<moe_lora_linear_forward>(library)
      .kernel<moe_lora_linear_forward_kernel>()
      .meta<moe_lora_linear_forward_meta>();
  implement<moe_lora_linear_backward>(library)
      .kernel<moe_lora_linear_backward_kernel>()
      .meta<moe_lora_linear_backward_meta>();
}

}  // namespace parallel_ext
