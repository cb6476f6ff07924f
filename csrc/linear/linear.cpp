// Linear layers whose weight is cut over the ranks: by rows (column_linear, after Megatron's name
// for the cut of the transposed matrix) or by columns (row_linear).
#include "linear/linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "check.h"
#include "comm/comm.h"
#include "dispatch.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor column_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias, int64_t row_stride, int64_t,
                                const std::string&) {
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
                              const std::optional<at::Tensor>&, int64_t row_stride, int64_t,
                              const std::string&) {
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

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_linear_backward_kernel(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    std::array<bool, 3> needed, int64_t group_size, const std::string& group_name) {
  check_grad_output("column_linear_backward", grad_output, input, weight);
  const at::Tensor grad_rows = as_matrix(grad_output);
  at::Tensor grad_input = at::empty({0}, input.options()), grad_weight = at::empty_like(grad_input),
             grad_bias = at::empty_like(grad_input);
  std::function<void()> wait = [] {};
  if (needed[0]) {
    grad_input = at::mm(grad_rows, weight);
    // numel(input) elements, every rank; the GEMM of the weight's gradient runs meanwhile.
    wait = start_all_reduce_sum("column_linear_backward", grad_input, group_size, group_name);
  }
  try {
    if (needed[1]) grad_weight = at::mm(grad_rows.t(), as_matrix(input));
    if (needed[2]) grad_bias = grad_rows.sum(0);
  } catch (...) {  // out of memory: the sum must end, or the group could never be used again
    wait();
    throw;
  }
  wait();
  if (needed[0]) grad_input = grad_input.view(input.sizes());
  return {grad_input, grad_weight, grad_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_linear_backward_meta(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    std::array<bool, 3> needed, int64_t, const std::string&) {
  const at::Tensor none = at::empty({0}, input.options());
  return {
      needed[0] ? at::empty_symint(input.sym_sizes(), input.options()) : none,
      needed[1] ? at::empty_symint(weight.sym_sizes(), weight.options()) : at::empty_like(none),
      needed[2] ? at::empty_symint({weight.sym_size(0)}, weight.options()) : at::empty_like(none)};
}

at::Tensor row_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, int64_t group_size,
                             const std::string& group_name) {
  check_linear("row_linear", input, weight, bias);
  at::Tensor output = at::mm(as_matrix(input), weight.t());
  all_reduce_sum("row_linear", output, group_size, group_name);  // numel(output), every rank
  if (bias) output.add_(*bias);
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = weight.size(0);
  return output.view(shape);
}

at::Tensor row_linear_meta(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>&, int64_t, const std::string&) {
  auto shape = input.sym_sizes().vec();
  shape.back() = weight.sym_size(0);
  return at::empty_symint(shape, input.options());
}

// Autograd. Only what a gradient needs is saved: the input for the weight, the weight for the
// input.

class ColumnLinear : public torch::autograd::Function<ColumnLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, int64_t row_stride,
                            int64_t group_size, const std::string& group_name) {
    ctx->save_for_backward({input, weight});
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["bias"] = bias.has_value();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return column_linear(input, weight, bias, row_stride, group_size, group_name);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const bool bias = ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2);
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1), bias};
    auto [grad_input, grad_weight, grad_bias] = column_linear_backward(
        grad_outputs[0], saved[0], saved[1], needed, ctx->saved_data["group_size"].toInt(),
        ctx->saved_data["group_name"].toStringRef());
    return {needed[0] ? grad_input : Variable(),
            needed[1] ? grad_weight : Variable(),
            needed[2] ? grad_bias : Variable(),
            Variable(),
            Variable(),
            Variable()};
  }
};

class RowLinear : public torch::autograd::Function<RowLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, int64_t group_size,
                            const std::string& group_name) {
    ctx->save_for_backward({input, weight});
    ctx->saved_data["bias"] = bias.has_value();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return row_linear(input, weight, bias, group_size, group_name);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const bool bias = ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2);
    // The output is replicated and so is its gradient: the local product is this rank's own share
    // of the column gradient, which is what a group of one computes.
    const std::array<bool, 3> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1), bias};
    auto [grad_input, grad_weight, grad_bias] =
        column_linear_backward(grad_outputs[0], saved[0], saved[1], needed, 1, "");
    return {needed[0] ? grad_input : Variable(), needed[1] ? grad_weight : Variable(),
            needed[2] ? grad_bias : Variable(), Variable(), Variable()};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_linear_backward_autograd(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    std::array<bool, 3> needed, int64_t group_size, const std::string& group_name) {
  refuse_second_derivative("column_linear and row_linear", {grad_output, input, weight});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return column_linear_backward(grad_output, input, weight, needed, group_size, group_name);
}

at::Tensor column_linear_autograd(const at::Tensor& input, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, int64_t row_stride,
                                  int64_t group_size, const std::string& group_name) {
  return ColumnLinear::apply(input, weight, bias, row_stride, group_size, group_name);
}

at::Tensor row_linear_autograd(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, int64_t group_size,
                               const std::string& group_name) {
  return RowLinear::apply(input, weight, bias, group_size, group_name);
}

// Autocast: as torch.nn.functional.linear, which runs in the lower precision.

template <c10::DeviceType device>
at::Tensor column_linear_autocast(const at::Tensor& input, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, int64_t row_stride,
                                  int64_t group_size, const std::string& group_name) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return column_linear(at::autocast::cached_cast(dtype, input, device),
                       at::autocast::cached_cast(dtype, weight, device),
                       at::autocast::cached_cast(dtype, bias, device), row_stride, group_size,
                       group_name);
}

template <c10::DeviceType device>
at::Tensor row_linear_autocast(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, int64_t group_size,
                               const std::string& group_name) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return row_linear(at::autocast::cached_cast(dtype, input, device),
                    at::autocast::cached_cast(dtype, weight, device),
                    at::autocast::cached_cast(dtype, bias, device), group_size, group_name);
}

}  // namespace

at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, int64_t row_stride,
                         int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(column_linear)>("parallel_ext::column_linear");
  return op.call(input, weight, bias, row_stride, group_size, group_name);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> column_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    std::array<bool, 3> needed, int64_t group_size, const std::string& group_name) {
  static auto op =
      op_handle<decltype(column_linear_backward)>("parallel_ext::column_linear_backward");
  return op.call(grad_output, input, weight, needed, group_size, group_name);
}

at::Tensor row_linear(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, int64_t group_size,
                      const std::string& group_name) {
  static auto op = op_handle<decltype(row_linear)>("parallel_ext::row_linear");
  return op.call(input, weight, bias, group_size, group_name);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("column_linear", column_linear_kernel);
  m.impl("column_linear_backward", column_linear_backward_kernel);
  m.impl("row_linear", row_linear_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("column_linear", column_linear_meta);
  m.impl("column_linear_backward", column_linear_backward_meta);
  m.impl("row_linear", row_linear_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("column_linear", column_linear_autograd);
  m.impl("column_linear_backward", column_linear_backward_autograd);
  m.impl("row_linear", row_linear_autograd);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCPU, m) {
  m.impl("column_linear", column_linear_autocast<c10::DeviceType::CPU>);
  m.impl("row_linear", row_linear_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCUDA, m) {
  m.impl("column_linear", column_linear_autocast<c10::DeviceType::CUDA>);
  m.impl("row_linear", row_linear_autocast<c10::DeviceType::CUDA>);
}

}  // namespace parallel_ext
