// Linear layers whose weight is sharded over the ranks: by rows (column_linear, after Megatron's
// name, which is that of the transposed matrix; and column_linears, several on one input) or by
// columns (row_linear).
#include "linear/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>

#include "base/empty.h"
#include "base/workspace.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

int64_t at_least_one(int64_t size) { return std::max<int64_t>(size, 1); }
c10::SymInt at_least_one(const c10::SymInt& size) { return size.max(1); }

// The strides of a tensor whose rows, of its last dimension, are `row_stride` elements apart.
template <typename Int>
std::vector<Int> strides_of_rows(const std::vector<Int>& shape, Int row_stride) {
  std::vector<Int> strides(shape.size(), 1);
  for (size_t dim = shape.size() - 1; dim-- > 0;) {
    strides[dim] = row_stride;
    row_stride = row_stride * at_least_one(shape[dim]);
  }
  return strides;
}

// input [..., K] times weight [F, K], plus bias [F] -> [..., F], in rows of `row_stride` elements.
at::Tensor columns(const at::Tensor& input, const at::Tensor& weight,
                   const std::optional<at::Tensor>& bias, int64_t row_stride) {
  const int64_t features = weight.size(0);
  const at::Tensor rows = as_matrix(input);
  at::Tensor output = at::empty_strided({rows.size(0), features}, {row_stride, 1}, input.options());
  fill_gaps(output);
  if (features > 0) {  // else there is nothing to launch
    bias ? at::addmm_out(output, *bias, rows, weight.t()) : at::mm_out(output, rows, weight.t());
  }
  const std::vector<int64_t> shape = with_last(input.sizes(), features);
  return output.as_strided(shape, strides_of_rows(shape, row_stride));
}

at::Tensor columns_meta(const at::Tensor& input, const at::Tensor& weight,
                        const c10::SymInt& row_stride) {
  const auto shape = shape_with(input, -1, weight.sym_size(0));
  return at::empty_strided_symint(shape, strides_of_rows(shape, row_stride), input.options());
}

at::Tensor column_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, int64_t row_stride) {
  const char* op = "column_linear";
  check_linear(op, input, weight, bias);
  TORCH_CHECK_VALUE(row_stride >= weight.size(0), op, ": row_stride ", row_stride,
                    " is smaller than the ", weight.size(0), " features of a row");
  return columns(input, weight, bias, row_stride);
}

at::Tensor column_linear_meta(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>&, int64_t row_stride) {
  return columns_meta(input, weight, row_stride);
}

// The sum of grads[i] weights[i], in the order and with the rounding of autograd, whose engine
// takes separate layers from the last one to the first.
at::Tensor sum_of_products(at::TensorList grads, at::TensorList weights) {
  at::Tensor sum, room;
  for (size_t i = weights.size(); i-- > 0;) {
    if (weights[i].size(0) == 0 && (i > 0 || sum.defined())) continue;  // adds nothing
    if (!sum.defined()) {
      sum = at::mm(grads[i], weights[i]);
      continue;
    }
    if (!room.defined()) room = pooled_empty(sum.sizes(), sum.options());
    sum.add_(at::mm_out(room, grads[i], weights[i]));
  }
  return sum;
}

// -> what is `needed` of the gradients of the input that all weights read, summed over the group;
// of each weight; and of each bias.
variable_list column_gradients(const char* op, at::TensorList grad_outputs, const at::Tensor& input,
                               at::TensorList weights, at::ArrayRef<bool> needed,
                               const Group& group) {
  const size_t count = weights.size();
  std::vector<at::Tensor> grads;
  for (size_t i = 0; i < count; ++i) {
    check_grad_output(op, grad_outputs[i], input, weights[i]);
    grads.push_back(as_matrix(grad_outputs[i]));
  }
  variable_list gradients(needed.size());
  for (at::Tensor& gradient : gradients) gradient = at::empty({0}, input.options());
  std::function<void()> wait = [] {};
  if (needed[0]) {
    gradients[0] = sum_of_products(grads, weights);
    // numel(input) elements, every rank; the GEMMs of the weights' gradients run meanwhile.
    wait = start_all_reduce_sum(op, gradients[0], group);
  }
  try {
    const at::Tensor rows = as_matrix(input);
    for (size_t i = 0; i < count; ++i) {
      if (needed[1 + i]) gradients[1 + i] = at::mm(grads[i].t(), rows);
      if (needed[1 + count + i]) gradients[1 + count + i] = grads[i].sum(0);
    }
  } catch (...) {  // such as out of memory: finish the sum, or the group could not be used again
    wait();
    throw;
  }
  wait();
  if (needed[0]) gradients[0] = gradients[0].view(input.sizes());
  return gradients;
}

Tensors<3> column_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                         const at::Tensor& weight, std::array<bool, 3> needed,
                                         const Group& group) {
  return from_list<Tensors<3>>(
      column_gradients("column_linear_backward", grad_output, input, weight, needed, group));
}

Tensors<3> column_linear_backward_meta(const at::Tensor&, const at::Tensor& input,
                                       const at::Tensor& weight, std::array<bool, 3> needed) {
  return {empty_like_if(needed[0], input), empty_like_if(needed[1], weight),
          empty_if(needed[2], weight.sym_sizes().slice(0, 1), weight.options())};
}

Tensors<3> column_linears_kernel(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& second, const at::Tensor& third,
                                 const std::optional<at::Tensor>& bias,
                                 const std::optional<at::Tensor>& second_bias,
                                 const std::optional<at::Tensor>& third_bias) {
  const char* op = "column_linears";
  check_linear(op, input, weight, bias);
  check_linear(op, input, second, second_bias, "second");
  check_linear(op, input, third, third_bias, "third");
  return {columns(input, weight, bias, weight.size(0)),
          columns(input, second, second_bias, second.size(0)),
          columns(input, third, third_bias, third.size(0))};
}

Tensors<3> column_linears_meta(const at::Tensor& input, const at::Tensor& weight,
                               const at::Tensor& second, const at::Tensor& third) {
  return {columns_meta(input, weight, weight.sym_size(0)),
          columns_meta(input, second, second.sym_size(0)),
          columns_meta(input, third, third.sym_size(0))};
}

Tensors<7> column_linears_backward_kernel(const at::Tensor& grad_output,
                                          const at::Tensor& grad_second,
                                          const at::Tensor& grad_third, const at::Tensor& input,
                                          const at::Tensor& weight, const at::Tensor& second,
                                          const at::Tensor& third, std::array<bool, 7> needed,
                                          const Group& group) {
  return from_list<Tensors<7>>(column_gradients("column_linears_backward",
                                                {grad_output, grad_second, grad_third}, input,
                                                {weight, second, third}, needed, group));
}

Tensors<7> column_linears_backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                        const at::Tensor& input, const at::Tensor& weight,
                                        const at::Tensor& second, const at::Tensor& third,
                                        std::array<bool, 7> needed) {
  const auto of_bias = [&](bool is_needed, const at::Tensor& of_weight) {
    return empty_if(is_needed, of_weight.sym_sizes().slice(0, 1), of_weight.options());
  };
  return {empty_like_if(needed[0], input),  empty_like_if(needed[1], weight),
          empty_like_if(needed[2], second), empty_like_if(needed[3], third),
          of_bias(needed[4], weight),       of_bias(needed[5], second),
          of_bias(needed[6], third)};
}

at::Tensor row_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const Group& group) {
  check_linear("row_linear", input, weight, bias);
  at::Tensor output = at::mm(as_matrix(input), weight.t());
  all_reduce_sum("row_linear", output, group);  // numel(output), every rank
  if (bias) output.add_(*bias);
  return output.view(with_last(input.sizes(), weight.size(0)));
}

struct ColumnLinear : Gradient<ColumnLinear, column_linear, Saved<0, 1>> {
  using InputFor = Saved<1>;

  static variable_list rule(const ForwardCall<column_linear>& forward, const variable_list& grads) {
    const auto [input, weight, bias, row_stride, group] = forward.arguments();
    return forward.gradients(
        column_linear_backward(grads[0], input, weight, forward.needed<3>(), group));
  }
};

struct ColumnLinears : Gradient<ColumnLinears, column_linears, Saved<0, 1, 2, 3>> {
  using InputFor = Saved<1, 2, 3>;

  // Weights and biases of three layers follow the input: each has the output of its layer.
  static constexpr int output_of(size_t argument) {
    return argument == 0 ? -1 : static_cast<int>(argument - 1) % 3;
  }

  static variable_list rule(const ForwardCall<column_linears>& forward,
                            const variable_list& grads) {
    const auto [input, weight, second, third, bias, second_bias, third_bias, group] =
        forward.arguments();
    return forward.gradients(column_linears_backward(grads[0], grads[1], grads[2], input, weight,
                                                     second, third, forward.needed<7>(), group));
  }
};

// The output is replicated and so is its gradient: the local product is this rank's own shard of
// the input's gradient, which is what column_linear_backward computes for a rank alone.
struct RowLinear : Gradient<RowLinear, row_linear, Saved<0, 1>> {
  using InputFor = Saved<1>;

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
  implement<column_linears>(library)
      .kernel<column_linears_kernel>()
      .meta<column_linears_meta>()
      .gradient<ColumnLinears>()
      .autocast<0, 1, 2, 3, 4, 5, 6>();
  implement<column_linears_backward>(library)
      .kernel<column_linears_backward_kernel>()
      .meta<column_linears_backward_meta>();
  implement<row_linear>(library)
      .kernel<row_linear_kernel>()
      .meta<row_linear_meta>()
      .gradient<RowLinear>()
      .autocast<0, 1, 2>();
}

}  // namespace parallel_ext
