// A linear layer and its low-rank adapter in one:
// output = input weight^T + scale (dropout(input) A^T) B^T.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/empty.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "linear/dropout.h"
#include "linear/linear.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

void check_lora_linear(const char* op, const at::Tensor& input, const at::Tensor& weight,
                       const at::Tensor& lora_a, const at::Tensor& lora_b,
                       const std::optional<at::Tensor>& bias) {
  check_linear(op, input, weight, bias);
  check_floating(op, "lora_a", lora_a);
  check_same_dtype(op, "lora_b", lora_b, "lora_a", lora_a);
  check_dim(op, "lora_a", lora_a, 2);
  check_dim(op, "lora_b", lora_b, 2);
  TORCH_CHECK_VALUE(lora_a.size(1) == weight.size(1), op, ": lora_a of shape ", lora_a.sizes(),
                    " does not fit the local weight of shape ", weight.sizes(),
                    "; its last dimension must be ", weight.size(1));
  TORCH_CHECK_VALUE(lora_b.size(0) == weight.size(0) && lora_b.size(1) == lora_a.size(0), op,
                    ": lora_b of shape ", lora_b.sizes(), " does not fit lora_a of shape ",
                    lora_a.sizes(), " and the local weight of shape ", weight.sizes(),
                    "; it must be [", weight.size(0), ", ", lora_a.size(0), "]");
}

constexpr int64_t kTileBytes = 1 << 20;  // of the input at a time, whose dropped form fits in cache

// Calls use(first_row, input, dropped) for tiles of rows, with a buffer for their dropped form. On
// other devices than the CPU one tile holds all rows.
template <typename Use>
void for_tiles(const at::Tensor& rows, const Use& use) {
  const int64_t num_rows = rows.size(0), row_bytes = rows.size(1) * rows.element_size();
  const int64_t wanted = rows.is_cpu()
                             ? std::max<int64_t>(16, kTileBytes / std::max<int64_t>(1, row_bytes))
                             : num_rows;
  const at::Tensor buffer = at::empty({std::min(wanted, num_rows), rows.size(1)}, rows.options());
  for (int64_t first = 0; first < num_rows; first += wanted) {
    const int64_t count = std::min(wanted, num_rows - first);
    use(first, rows.narrow(0, first, count), buffer.narrow(0, 0, count));
  }
}

// lora_a dropout(rows)^T without the dropout's scale, as [r, T] and not [T, r]: CPU GEMMs take
// about half of the time if the long dimension is contiguous.
at::Tensor lora_a_out_of(const at::Tensor& rows, const at::Tensor& lora_a, const Dropout& dropout) {
  if (dropout.p == 0) return at::mm(lora_a, rows.t());
  at::Tensor lora_a_out = at::empty({lora_a.size(0), rows.size(0)}, rows.options());
  for_tiles(rows, [&](int64_t first, const at::Tensor& input, const at::Tensor& dropped) {
    drop(dropout, first, input, dropped);
    lora_a_out.narrow(1, first, input.size(0)).copy_(at::mm(lora_a, dropped.t()));
  });
  return lora_a_out;
}

// The input as a matrix; contiguous for the loops of dropout, since a GEMM takes any strides.
at::Tensor rows_of(const at::Tensor& input, const Dropout& dropout) {
  return dropout.p == 0 ? as_matrix(input) : as_matrix(input).contiguous();
}

Tensors<2> lora_linear_forward_kernel(const at::Tensor& input, const at::Tensor& weight,
                                      const at::Tensor& lora_a, const at::Tensor& lora_b,
                                      const std::optional<at::Tensor>& bias, double scale,
                                      double dropout_p, at::IntArrayRef dropout_counter,
                                      const Group& group) {
  const char* op = "lora_linear";
  check_lora_linear(op, input, weight, lora_a, lora_b, bias);
  const auto dropout = Dropout::parse(op, dropout_p, dropout_counter, as_matrix(input));
  const at::Tensor rows = rows_of(input, dropout);
  const auto dtype = dtype_of_adapter(input);
  at::Tensor lora_a_out = lora_a_out_of(rows.to(dtype), lora_a.to(dtype), dropout);
  at::Tensor output = at::empty({rows.size(0), weight.size(0)}, rows.options());
  sum_of_products_out(output, rows, weight.t(), lora_a_out.t(), lora_b.to(dtype).t(),
                      scale * dropout.scale(), group.alone() ? bias : std::nullopt);
  if (!group.alone()) {
    all_reduce_sum(op, output, group);  // numel(output), every rank
    if (bias) output.add_(*bias);
  }
  return {output.view(with_last(input.sizes(), weight.size(0))), lora_a_out};
}

Tensors<2> lora_linear_forward_meta(const at::Tensor& input, const at::Tensor& weight,
                                    const at::Tensor& lora_a) {
  const auto shape = shape_with(input, -1, weight.sym_size(0));
  c10::SymInt num_tokens = 1;
  for (size_t dim = 0; dim + 1 < shape.size(); ++dim) num_tokens = num_tokens * shape[dim];
  return {at::empty_symint(shape, input.options()),
          at::empty_symint({lora_a.sym_size(0), num_tokens},
                           input.options().dtype(dtype_of_adapter(input)))};
}

// Adds scale * mask * (grad_lora_a_out^T lora_a) to grad_input, if it is given, and returns
// grad_lora_a_out dropout(rows). Draws the mask of the forward again.
at::Tensor through_dropout(const at::Tensor& rows, const at::Tensor& grad_lora_a_out,
                           const at::Tensor& lora_a, const Dropout& dropout, double scale,
                           const at::Tensor& grad_input) {
  // A 16-bit sum over all tiles would round once for each tile.
  at::Tensor grad_a = at::zeros(lora_a.sizes(), lora_a.options().dtype(wide_type(rows)));
  for_tiles(rows, [&](int64_t first, const at::Tensor& input, const at::Tensor& dropped) {
    const at::Tensor grads = grad_lora_a_out.narrow(1, first, input.size(0));
    if (grad_input.defined()) {
      drop_and_add(dropout, first, input, dropped, at::mm(grads.t(), lora_a), scale,
                   grad_input.narrow(0, first, input.size(0)));
    } else {
      drop(dropout, first, input, dropped);
    }
    grad_a.add_(at::mm(grads, dropped));
  });
  return grad_a;
}

// In the dtype of `like`; rounded after it is scaled, since fp16 may hold only the scaled number.
at::Tensor scaled(const at::Tensor& gradient, double scale, const at::Tensor& like) {
  return gradient.to(wide_type(gradient)).mul_(scale).to(like.scalar_type());
}

Tensors<5> lora_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                       const at::Tensor& weight, const at::Tensor& lora_a,
                                       const at::Tensor& lora_b, const at::Tensor& lora_a_out,
                                       double scale, double dropout_p,
                                       at::IntArrayRef dropout_counter,
                                       std::array<bool, 5> needed) {
  const char* op = "lora_linear_backward";
  check_lora_linear(op, input, weight, lora_a, lora_b, {});
  check_grad_output(op, grad_output, input, weight);
  check_shape(op, "lora_a_out", lora_a_out, {lora_a.size(0), as_matrix(input).size(0)});
  const auto dropout = Dropout::parse(op, dropout_p, dropout_counter, as_matrix(input));
  const at::Tensor grad_rows = as_matrix(grad_output), rows = rows_of(input, dropout);
  const auto nothing = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
  at::Tensor grad_input = nothing(input), grad_weight = nothing(weight),
             grad_bias = nothing(weight);
  at::Tensor grad_a = nothing(lora_a), grad_b = nothing(lora_b);
  const auto dtype = dtype_of_adapter(input);
  const at::Tensor wide_rows = rows.to(dtype), wide_grads = grad_rows.to(dtype);
  scale *= dropout.scale();
  if (needed[0] && dropout.p > 0) grad_input = at::mm(grad_rows, weight).to(dtype);
  if (needed[0] || needed[2]) {
    const at::Tensor factor_a = lora_a.to(dtype);
    // [r, T], without the scale
    const at::Tensor grad_lora_a_out = at::mm(lora_b.to(dtype).t(), wide_grads.t());
    if (dropout.p > 0) {
      grad_a = through_dropout(wide_rows, grad_lora_a_out, factor_a, dropout, scale,
                               needed[0] ? grad_input : at::Tensor());
    } else {
      if (needed[0]) {
        grad_input = at::empty(rows.sizes(), rows.options());
        sum_of_products_out(grad_input, grad_rows, weight, grad_lora_a_out.t(), factor_a, scale);
      }
      if (needed[2]) grad_a = at::mm(grad_lora_a_out, wide_rows);
    }
  }
  if (needed[0]) grad_input = grad_input.to(input.scalar_type()).view(input.sizes());
  if (needed[1]) grad_weight = at::mm(grad_rows.t(), rows);
  if (needed[4]) grad_bias = grad_rows.sum(0);
  grad_a = needed[2] ? scaled(grad_a, scale, lora_a) : nothing(lora_a);
  if (needed[3]) {
    grad_b = at::empty(lora_b.sizes(), lora_b.options());
    grad_b.copy_(scaled(at::mm(lora_a_out, wide_grads), scale, lora_b).t());
  }
  return {grad_input, grad_weight, grad_a, grad_b, grad_bias};
}

Tensors<5> lora_linear_backward_meta(const at::Tensor&, const at::Tensor& input,
                                     const at::Tensor& weight, const at::Tensor& lora_a,
                                     const at::Tensor& lora_b, const at::Tensor&, double, double,
                                     at::IntArrayRef, std::array<bool, 5> needed) {
  return {empty_like_if(needed[0], input), empty_like_if(needed[1], weight),
          empty_like_if(needed[2], lora_a), empty_like_if(needed[3], lora_b),
          empty_if(needed[4], weight.sym_sizes().slice(0, 1), weight.options())};
}

struct LoraLinear
    : Gradient<LoraLinear, lora_linear, Saved<0, 1, 2, 3>, Saved<1>, lora_linear_forward> {
  static variable_list rule(const ForwardCall<lora_linear>& forward, const variable_list& grads) {
    const auto [input, weight, lora_a, lora_b, bias, scale, dropout, dropout_counter, group] =
        forward.arguments();
    return forward.gradients(lora_linear_backward(grads[0], input, weight, lora_a, lora_b,
                                                  forward.output(1), scale, dropout,
                                                  dropout_counter, forward.needed<5>()));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  // Autocast leaves lora_a and lora_b to the kernel, which casts them to the dtype of the input.
  implement<lora_linear>(library)
      .kernel_by<lora_linear_forward>()
      .gradient<LoraLinear>()
      .autocast<0, 1, 4>();
  implement<lora_linear_forward>(library)
      .kernel<lora_linear_forward_kernel>()
      .meta<lora_linear_forward_meta>();
  implement<lora_linear_backward>(library)
      .kernel<lora_linear_backward_kernel>()
      .meta<lora_linear_backward_meta>();
}

}  // namespace parallel_ext
