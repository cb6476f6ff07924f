// The linear layers of experts, each applied to the rows of its expert.
#include "moe/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <cmath>
#include <optional>
#include <vector>

#include "base/empty.h"
#include "base/workspace.h"
#include "check.h"
#include "gradient.h"
#include "moe/grouped.h"
#include "moe/ops.h"

namespace parallel_ext {
namespace {

at::Tensor moe_linear_kernel(const at::Tensor& rows, const at::Tensor& weight,
                             at::IntArrayRef counts) {
  check_moe_linear("moe_linear", rows, weight, counts);
  if (use_grouped_products(rows, weight)) {
    return grouped_rows(rows, weight, ends_of(counts, rows));
  }
  at::Tensor output = pooled_empty({rows.size(0), weight.size(1)}, rows.options());
  for_experts(counts, [&](int64_t expert, int64_t first, int64_t count) {
    at::Tensor out = output.narrow(0, first, count);
    at::mm_out(out, rows.narrow(0, first, count), weight.select(0, expert).t());
  });
  return output;
}

// Multiplying by it rounds nothing, so that it may come after the product was rounded.
bool is_power_of_two(double scale) {
  int exponent = 0;
  return std::frexp(scale, &exponent) == 0.5;
}

// The gradients by grouped products, where these serve; `Counts` lie on the host or on the device.
template <typename Counts>
std::optional<Tensors<2>> grouped_gradients(const at::Tensor& grad_output, const at::Tensor& rows,
                                            const at::Tensor& weight, const Counts& counts,
                                            std::array<bool, 2> needed, double weight_grad_scale) {
  const at::Tensor grad = grad_output.contiguous();
  if (!use_grouped_products(grad, weight)) return {};
  if (needed[1] && !(use_grouped_products(rows, weight) && is_power_of_two(weight_grad_scale))) {
    return {};
  }
  const at::Tensor ends = ends_of(counts, rows);
  at::Tensor grad_rows = at::empty({0}, rows.options()), grad_weight = at::empty_like(grad_rows);
  if (needed[0]) grad_rows = grouped_rows(grad, weight.transpose(1, 2), ends);
  if (needed[1]) {
    grad_weight = grouped_weights(grad, rows, ends, counts);
    if (weight_grad_scale != 1) grad_weight.mul_(weight_grad_scale);
  }
  return Tensors<2>(grad_rows, grad_weight);
}

Tensors<2> moe_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& rows,
                                      const at::Tensor& weight, at::IntArrayRef counts,
                                      std::array<bool, 2> needed, double weight_grad_scale) {
  const char* op = "moe_linear_backward";
  check_moe_linear(op, rows, weight, counts);
  check_same_dtype(op, "grad_output", grad_output, "rows", rows);
  check_shape(op, "grad_output", grad_output, {rows.size(0), weight.size(1)});
  const auto grouped =
      grouped_gradients(grad_output, rows, weight, counts, needed, weight_grad_scale);
  if (grouped) return *grouped;
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

at::Tensor moe_linear_meta(const at::Tensor& rows, const at::Tensor& weight) {
  return at::empty_symint({rows.sym_size(0), weight.sym_size(1)}, rows.options());
}

template <typename Counts>
Tensors<2> moe_linear_backward_meta(const at::Tensor&, const at::Tensor& rows,
                                    const at::Tensor& weight, Counts, std::array<bool, 2> needed) {
  return {empty_like_if(needed[0], rows), empty_like_if(needed[1], weight)};
}

struct MoeLinear : Gradient<MoeLinear, moe_linear, Saved<0, 1>> {
  using InputFor = Saved<1>;

  static variable_list rule(const ForwardCall<moe_linear>& forward, const variable_list& grads) {
    const auto [rows, weight, counts, weight_grad_scale] = forward.arguments();
    return forward.gradients(moe_linear_backward(grads[0], rows, weight, counts,
                                                 forward.needed<2>(), weight_grad_scale));
  }
};

void check_on_device(const char* op, const at::Tensor& rows, const at::Tensor& weight,
                     const at::Tensor& counts) {
  check_int64(op, "counts", counts);
  check_dim(op, "counts", counts, 1);
  check_moe_linear(op, rows, weight, counts.size(0));
}

// Waits for the device.
std::vector<int64_t> on_host(const at::Tensor& counts) {
  const at::Tensor here = counts.cpu().contiguous();
  const int64_t* count = here.const_data_ptr<int64_t>();
  return {count, count + here.numel()};
}

at::Tensor moe_linear_on_device_kernel(const at::Tensor& rows, const at::Tensor& weight,
                                       const at::Tensor& counts) {
  check_on_device("moe_linear", rows, weight, counts);
  if (use_grouped_products(rows, weight)) {
    return grouped_rows(rows, weight, ends_of(counts, rows));
  }
  return moe_linear_kernel(rows, weight, on_host(counts));
}

Tensors<2> moe_linear_on_device_backward_kernel(const at::Tensor& grad_output,
                                                const at::Tensor& rows, const at::Tensor& weight,
                                                const at::Tensor& counts,
                                                std::array<bool, 2> needed,
                                                double weight_grad_scale) {
  const char* op = "moe_linear_backward";
  check_on_device(op, rows, weight, counts);
  check_same_dtype(op, "grad_output", grad_output, "rows", rows);
  check_shape(op, "grad_output", grad_output, {rows.size(0), weight.size(1)});
  const auto grouped =
      grouped_gradients(grad_output, rows, weight, counts, needed, weight_grad_scale);
  if (grouped) return *grouped;
  return moe_linear_backward_kernel(grad_output, rows, weight, on_host(counts), needed,
                                    weight_grad_scale);
}

struct MoeLinearOnDevice : Gradient<MoeLinearOnDevice, moe_linear_on_device, Saved<0, 1, 2>> {
  using InputFor = Saved<1>;

  static variable_list rule(const ForwardCall<moe_linear_on_device>& forward,
                            const variable_list& grads) {
    const auto [rows, weight, counts, weight_grad_scale] = forward.arguments();
    return forward.gradients(moe_linear_on_device_backward(grads[0], rows, weight, counts,
                                                           forward.needed<2>(), weight_grad_scale));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<moe_linear>(library)
      .kernel<moe_linear_kernel>()
      .meta<moe_linear_meta>()
      .gradient<MoeLinear>()
      .autocast<0, 1>();
  implement<moe_linear_backward>(library)
      .kernel<moe_linear_backward_kernel>()
      .meta<moe_linear_backward_meta<at::IntArrayRef>>();
  implement<moe_linear_on_device>(library)
      .kernel<moe_linear_on_device_kernel>()
      .meta<moe_linear_meta>()
      .gradient<MoeLinearOnDevice>()
      .autocast<0, 1>();
  implement<moe_linear_on_device_backward>(library)
      .kernel<moe_linear_on_device_backward_kernel>()
      .meta<moe_linear_backward_meta<const at::Tensor&>>();
}

}  // namespace parallel_ext
