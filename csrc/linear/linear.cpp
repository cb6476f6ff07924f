// Linear layers whose weight is sharded over the ranks: by rows (column_linear, after Megatron's
// name, which is that of the transposed matrix) or by columns (row_linear).
#include "linear/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>

#include "check.h"
#include "comm/comm.h"
#include "ops.h"

namespace parallel_ext {
namespace {

at::Tensor column_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, int64_t row_stride) {
  const char* op = "column_linear";
  check_linear(op, input, weight, bias);
  const int64_t features = weight.size(0);
  TORCH_CHECK_VALUE(row_stride >= features, op, ": row_stride ", row_stride,
                    " is smaller than the ", features, " features of a row");
  const at::Tensor rows = as_matrix(input);
  at::Tensor output = at::empty_strided({rows.size(0), features}, {row_stride, 1}, input.options());
  fill_gaps(output);
  if (bias) {
    at::addmm_out(output, *bias, rows, weight.t());
  } else {
    at::mm_out(output, rows, weight.t());
  }
  std::vector<int64_t> shape = input.sizes().vec(), strides(shape.size());
  shape.back() = features;
  int64_t stride = row_stride;
  strides.back() = 1;
  for (auto dim = static_cast<int64_t>(shape.size()) - 2; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(shape[dim], 1);
  }
  return output.as_strided(shape, strides);
}

at::Tensor column_linear_meta(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>&, int64_t row_stride) {
  auto shape = input.sym_sizes().vec(), strides = shape;
  shape.back() = weight.sym_size(0);
  c10::SymInt stride = row_stride;
  strides.back() = 1;
  for (auto dim = static_cast<int64_t>(shape.size()) - 2; dim >= 0; --dim) {
    strides[dim] = stride;
    stride = stride * shape[dim].max(1);
  }
  return at::empty_strided_symint(shape, strides, input.options());
}

Tensors<3> column_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                         const at::Tensor& weight, std::array<bool, 3> needed,
                                         const Group& group) {
  check_grad_output("column_linear_backward", grad_output, input, weight);
  const at::Tensor grad_rows = as_matrix(grad_output);
  at::Tensor grad_input = at::empty({0}, input.options()), grad_weight = at::empty_like(grad_input),
             grad_bias = at::empty_like(grad_input);
  std::function<void()> wait = [] {};
  if (needed[0]) {
    grad_input = at::mm(grad_rows, weight);
    // numel(input) elements, every rank; the GEMM of the weight's gradient runs meanwhile.
    wait = start_all_reduce_sum("column_linear_backward", grad_input, group);
  }
  try {
    if (needed[1]) grad_weight = at::mm(grad_rows.t(), as_matrix(input));
    if (needed[2]) grad_bias = grad_rows.sum(0);
  } catch (...) {  // such as out of memory: finish the sum, or the group could not be used again
    wait();
    throw;
  }
  wait();
  if (needed[0]) grad_input = grad_input.view(input.sizes());
  return {grad_input, grad_weight, grad_bias};
}

Tensors<3> column_linear_backward_meta(const at::Tensor&, const at::Tensor& input,
                                       const at::Tensor& weight, std::array<bool, 3> needed) {
  return {empty_like_if(needed[0], input), empty_like_if(needed[1], weight),
          empty_if(needed[2], weight.sym_sizes().slice(0, 1), weight.options())};
}

at::Tensor row_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const Group& group) {
  check_linear("row_linear", input, weight, bias);
  at::Tensor output = at::mm(as_matrix(input), weight.t());
  all_reduce_sum("row_linear", output, group);  // numel(output), every rank
  if (bias) output.add_(*bias);
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = weight.size(0);
  return output.view(shape);
}

at::Tensor row_linear_meta(const at::Tensor& input, const at::Tensor& weight) {
  auto shape = input.sym_sizes().vec();
  shape.back() = weight.sym_size(0);
  return at::empty_symint(shape, input.options());
}

struct ColumnLinear : Gradient<ColumnLinear, column_linear, Saved<0, 1>> {
  static variable_list rule(const ForwardCall<column_linear>& forward, const variable_list& grads) {
    const auto [input, weight, bias, row_stride, group] = forward.arguments();
    return forward.gradients(
        column_linear_backward(grads[0], input, weight, forward.needed<3>(), group));
  }
};

// The output is replicated and so is its gradient: the local product is this rank's own shard of
// the input's gradient, which is what column_linear_backward computes in a group of one.
struct RowLinear : Gradient<RowLinear, row_linear, Saved<0, 1>> {
  static variable_list rule(const ForwardCall<row_linear>& forward, const variable_list& grads) {
    const auto [input, weight, bias, group] = forward.arguments();
    refuse_second_derivative("row_linear", {grads[0], input, weight});
    return forward.gradients(
        column_linear_backward(grads[0], input, weight, forward.needed<3>(), Group{1, ""}));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<column_linear>(library)
      .kernel<column_linear_kernel>()
      .meta<column_linear_meta>()
      .gradient<ColumnLinear>()
      .autocast<0, 1, 2>();
  implement<column_linear_backward>(library)
      .kernel<column_linear_backward_kernel>()
      .meta<column_linear_backward_meta>();
  implement<row_linear>(library)
      .kernel<row_linear_kernel>()
      .meta<row_linear_meta>()
      .gradient<RowLinear>()
      .autocast<0, 1, 2>();
}

}  // namespace parallel_ext
