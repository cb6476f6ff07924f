// A linear layer and its low-rank adapter in one:
// output = input weight^T + scale (dropout(input) A^T) B^T.
#include <ATen/autocast_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "check.h"
#include "comm/comm.h"
#include "dispatch.h"
#include "linear/dropout.h"
#include "linear/linear.h"
#include "linear/lora.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

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

constexpr int64_t kTileBytes = 1 << 20;  // dropped inputs are made in stretches that stay in cache

// Calls use(first_row, input, dropped) for stretches of the rows, with a buffer for their dropped
// form. Devices without a cache to stay in get one stretch.
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

// lora_a dropout(rows)^T without the dropout's scale: [r, T]. What is small lies in rows of T
// elements: CPU products with the long side inside take about half of the time.
at::Tensor low_of(const at::Tensor& rows, const at::Tensor& lora_a, const Dropout& dropout) {
  if (dropout.p == 0) return at::mm(lora_a, rows.t());
  at::Tensor low = at::empty({lora_a.size(0), rows.size(0)}, rows.options());
  for_tiles(rows, [&](int64_t first, const at::Tensor& input, const at::Tensor& dropped) {
    drop(dropout, first, input, dropped);
    low.narrow(1, first, input.size(0)).copy_(at::mm(lora_a, dropped.t()));
  });
  return low;
}

// An input whose rows a loop can walk; without dropout a matrix product takes any strides.
at::Tensor rows_of(const at::Tensor& input, const Dropout& dropout) {
  return dropout.p == 0 ? as_matrix(input) : as_matrix(input).contiguous();
}

std::tuple<at::Tensor, at::Tensor> lora_linear_forward_kernel(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
    const at::Tensor& lora_b, const std::optional<at::Tensor>& bias, double scale, double dropout_p,
    at::IntArrayRef dropout_counter, int64_t group_size, const std::string& group_name) {
  const char* op = "lora_linear";
  check_lora_linear(op, input, weight, lora_a, lora_b, bias);
  const auto dropout = Dropout::parse(op, dropout_p, dropout_counter, as_matrix(input).size(0));
  const at::Tensor rows = rows_of(input, dropout);
  const auto dtype = dtype_of_adapter(input);
  at::Tensor low = low_of(rows.to(dtype), lora_a.to(dtype), dropout);
  at::Tensor output =
      bias && group_size == 1 ? at::addmm(*bias, rows, weight.t()) : at::mm(rows, weight.t());
  add_scaled_product(output, low.t(), lora_b.to(dtype).t(), scale * dropout.scale());
  if (group_size > 1) {
    all_reduce_sum(op, output, group_size, group_name);  // numel(output), every rank
    if (bias) output.add_(*bias);
  }
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = weight.size(0);
  return {output.view(shape), low};
}

std::tuple<at::Tensor, at::Tensor> lora_linear_forward_meta(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a, const at::Tensor&,
    const std::optional<at::Tensor>&, double, double, at::IntArrayRef, int64_t,
    const std::string&) {
  auto shape = input.sym_sizes().vec();
  c10::SymInt num_tokens = 1;
  for (size_t dim = 0; dim + 1 < shape.size(); ++dim) num_tokens = num_tokens * shape[dim];
  shape.back() = weight.sym_size(0);
  return {at::empty_symint(shape, input.options()),
          at::empty_symint({lora_a.sym_size(0), num_tokens},
                           input.options().dtype(dtype_of_adapter(input)))};
}

using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Adds scale * mask * (grad_low^T lora_a) to grad_input, if that is given, and returns
// grad_low dropout(rows), both for the mask of the forward, which is drawn again.
at::Tensor through_dropout(const at::Tensor& rows, const at::Tensor& grad_low,
                           const at::Tensor& lora_a, const Dropout& dropout, double scale,
                           const at::Tensor& grad_input) {
  // One 16-bit sum over all stretches would round once for each.
  const auto wide = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor grad_a = at::zeros(lora_a.sizes(), lora_a.options().dtype(wide));
  for_tiles(rows, [&](int64_t first, const at::Tensor& input, const at::Tensor& dropped) {
    const at::Tensor grads = grad_low.narrow(1, first, input.size(0));
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

FiveTensors lora_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                        const at::Tensor& weight, const at::Tensor& lora_a,
                                        const at::Tensor& lora_b, const at::Tensor& low,
                                        double scale, double dropout_p,
                                        at::IntArrayRef dropout_counter,
                                        std::array<bool, 5> needed) {
  const char* op = "lora_linear_backward";
  check_lora_linear(op, input, weight, lora_a, lora_b, {});
  check_grad_output(op, grad_output, input, weight);
  const int64_t num_tokens = as_matrix(input).size(0);
  check_shape(op, "low", low, {lora_a.size(0), num_tokens});
  const auto dropout = Dropout::parse(op, dropout_p, dropout_counter, num_tokens);
  const at::Tensor grad_rows = as_matrix(grad_output), rows = rows_of(input, dropout);
  const auto nothing = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
  at::Tensor grad_input = nothing(input), grad_weight = nothing(weight),
             grad_bias = nothing(weight);
  at::Tensor grad_a = nothing(lora_a), grad_b = nothing(lora_b);
  const auto dtype = dtype_of_adapter(input);
  const at::Tensor wide_rows = rows.to(dtype), wide_grads = grad_rows.to(dtype);
  scale *= dropout.scale();
  if (needed[0]) grad_input = at::mm(grad_rows, weight).to(dtype);
  if (needed[0] || needed[2]) {
    const at::Tensor factor_a = lora_a.to(dtype);
    // [r, T], without the scale
    const at::Tensor grad_low = at::mm(lora_b.to(dtype).t(), wide_grads.t());
    if (dropout.p > 0) {
      grad_a = through_dropout(wide_rows, grad_low, factor_a, dropout, scale,
                               needed[0] ? grad_input : at::Tensor());
    } else {
      if (needed[0]) grad_input.addmm_(grad_low.t(), factor_a, 1, scale);
      if (needed[2]) grad_a = at::mm(grad_low, wide_rows);
    }
  }
  if (needed[0]) grad_input = grad_input.to(input.scalar_type()).view(input.sizes());
  if (needed[1]) grad_weight = at::mm(grad_rows.t(), rows);
  if (needed[4]) grad_bias = grad_rows.sum(0);
  grad_a = needed[2] ? grad_a.to(lora_a.scalar_type()).mul_(scale) : nothing(lora_a);
  if (needed[3]) {
    grad_b = at::empty(lora_b.sizes(), lora_b.options());
    grad_b.copy_(at::mm(low, wide_grads).t()).mul_(scale);
  }
  return {grad_input, grad_weight, grad_a, grad_b, grad_bias};
}

FiveTensors lora_linear_backward_meta(const at::Tensor&, const at::Tensor& input,
                                      const at::Tensor& weight, const at::Tensor& lora_a,
                                      const at::Tensor& lora_b, const at::Tensor&, double, double,
                                      at::IntArrayRef, std::array<bool, 5> needed) {
  const auto grad_of = [&](const at::Tensor& tensor, bool wanted) {
    return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                  : at::empty({0}, tensor.options());
  };
  const at::Tensor grad_bias =
      at::empty_symint({needed[4] ? weight.sym_size(0) : c10::SymInt(0)}, weight.options());
  return {grad_of(input, needed[0]), grad_of(weight, needed[1]), grad_of(lora_a, needed[2]),
          grad_of(lora_b, needed[3]), grad_bias};
}

// Autograd. The input is saved once, and [r, T] of its product with lora_a.

class LoraLinear : public torch::autograd::Function<LoraLinear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& lora_a, const at::Tensor& lora_b,
                            const std::optional<at::Tensor>& bias, double scale, double dropout,
                            at::IntArrayRef dropout_counter, int64_t group_size,
                            const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [output, low] = lora_linear_forward(input, weight, lora_a, lora_b, bias, scale, dropout,
                                             dropout_counter, group_size, group_name);
    ctx->save_for_backward({input, weight, lora_a, lora_b, low});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["dropout"] = dropout;
    ctx->saved_data["dropout_counter"] = dropout_counter.vec();
    ctx->saved_data["bias"] = bias.has_value();
    return output;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    std::array<bool, 5> needed{};
    for (size_t i = 0; i < 4; ++i) needed[i] = ctx->needs_input_grad(i);
    needed[4] = ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(4);
    auto [grad_input, grad_weight, grad_a, grad_b, grad_bias] = lora_linear_backward(
        grad_outputs[0], saved[0], saved[1], saved[2], saved[3], saved[4],
        ctx->saved_data["scale"].toDouble(), ctx->saved_data["dropout"].toDouble(),
        ctx->saved_data["dropout_counter"].toIntVector(), needed);
    return {needed[0] ? grad_input : Variable(),
            needed[1] ? grad_weight : Variable(),
            needed[2] ? grad_a : Variable(),
            needed[3] ? grad_b : Variable(),
            needed[4] ? grad_bias : Variable(),
            Variable(),
            Variable(),
            Variable(),
            Variable(),
            Variable()};
  }
};

at::Tensor lora_linear_autograd(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& lora_a, const at::Tensor& lora_b,
                                const std::optional<at::Tensor>& bias, double scale, double dropout,
                                at::IntArrayRef dropout_counter, int64_t group_size,
                                const std::string& group_name) {
  return LoraLinear::apply(input, weight, lora_a, lora_b, bias, scale, dropout, dropout_counter,
                           group_size, group_name);
}

FiveTensors lora_linear_backward_autograd(const at::Tensor& grad_output, const at::Tensor& input,
                                          const at::Tensor& weight, const at::Tensor& lora_a,
                                          const at::Tensor& lora_b, const at::Tensor& low,
                                          double scale, double dropout,
                                          at::IntArrayRef dropout_counter,
                                          std::array<bool, 5> needed) {
  refuse_second_derivative("lora_linear", {grad_output, input, weight, lora_a, lora_b});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return lora_linear_backward(grad_output, input, weight, lora_a, lora_b, low, scale, dropout,
                              dropout_counter, needed);
}

at::Tensor lora_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& lora_a, const at::Tensor& lora_b,
                              const std::optional<at::Tensor>& bias, double scale, double dropout,
                              at::IntArrayRef dropout_counter, int64_t group_size,
                              const std::string& group_name) {
  return std::get<0>(lora_linear_forward(input, weight, lora_a, lora_b, bias, scale, dropout,
                                         dropout_counter, group_size, group_name));
}

// Autocast: base and input as torch.nn.functional.linear; the factors follow in the kernel.

template <c10::DeviceType device>
at::Tensor lora_linear_autocast(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& lora_a, const at::Tensor& lora_b,
                                const std::optional<at::Tensor>& bias, double scale, double dropout,
                                at::IntArrayRef dropout_counter, int64_t group_size,
                                const std::string& group_name) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return lora_linear(at::autocast::cached_cast(dtype, input, device),
                     at::autocast::cached_cast(dtype, weight, device), lora_a, lora_b,
                     at::autocast::cached_cast(dtype, bias, device), scale, dropout,
                     dropout_counter, group_size, group_name);
}

}  // namespace

at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
                       const at::Tensor& lora_b, const std::optional<at::Tensor>& bias,
                       double scale, double dropout, at::IntArrayRef dropout_counter,
                       int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(lora_linear)>("parallel_ext::lora_linear");
  return op.call(input, weight, lora_a, lora_b, bias, scale, dropout, dropout_counter, group_size,
                 group_name);
}

std::tuple<at::Tensor, at::Tensor> lora_linear_forward(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
    const at::Tensor& lora_b, const std::optional<at::Tensor>& bias, double scale, double dropout,
    at::IntArrayRef dropout_counter, int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(lora_linear_forward)>("parallel_ext::lora_linear_forward");
  return op.call(input, weight, lora_a, lora_b, bias, scale, dropout, dropout_counter, group_size,
                 group_name);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> lora_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& lora_a, const at::Tensor& lora_b, const at::Tensor& low, double scale,
    double dropout, at::IntArrayRef dropout_counter, std::array<bool, 5> needed) {
  static auto op = op_handle<decltype(lora_linear_backward)>("parallel_ext::lora_linear_backward");
  return op.call(grad_output, input, weight, lora_a, lora_b, low, scale, dropout, dropout_counter,
                 needed);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("lora_linear", lora_linear_kernel);
  m.impl("lora_linear_forward", lora_linear_forward_kernel);
  m.impl("lora_linear_backward", lora_linear_backward_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("lora_linear_forward", lora_linear_forward_meta);
  m.impl("lora_linear_backward", lora_linear_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("lora_linear", lora_linear_autograd);
  m.impl("lora_linear_backward", lora_linear_backward_autograd);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCPU, m) {
  m.impl("lora_linear", lora_linear_autocast<c10::DeviceType::CPU>);
}

TORCH_LIBRARY_IMPL(parallel_ext, AutocastCUDA, m) {
  m.impl("lora_linear", lora_linear_autocast<c10::DeviceType::CUDA>);
}

}  // namespace parallel_ext
