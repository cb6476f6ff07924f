// silu whose result for an element depends on that element alone: torch's has other bits in the
// last numbers of a tensor, which its loop of vectors does not reach.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>

#include <algorithm>

#include "base/kernel_choice.h"
#include "base/workspace.h"
#include "check.h"
#include "moe/gated_silu.h"
#include "ops.h"

namespace parallel_ext {
namespace {

constexpr int64_t kLanes = 16, kPerTask = 1 << 14;

// One function per dtype: target_clones does not work with templates. The last lanes go through the
// same instructions as all others.
#define PARALLEL_EXT_SILU_LOOPS(scalar_t, wide_t)                                        \
  PARALLEL_EXT_MULTIVERSION void silu(const scalar_t* in, int64_t size, scalar_t* out) { \
    for (int64_t start = 0; start < size; start += kLanes) {                             \
      const int64_t width = std::min(kLanes, size - start);                              \
      wide_t x[kLanes] = {}, y[kLanes];                                                  \
      for (int64_t j = 0; j < width; ++j) x[j] = widen(in[start + j]);                   \
      for (int64_t j = 0; j < kLanes; ++j) y[j] = x[j] * sigmoid(x[j]);                  \
      for (int64_t j = 0; j < width; ++j) store(y[j], out + start + j);                  \
    }                                                                                    \
  }                                                                                      \
  PARALLEL_EXT_MULTIVERSION void silu_backward(const scalar_t* grad, const scalar_t* in, \
                                               int64_t size, scalar_t* out) {            \
    for (int64_t start = 0; start < size; start += kLanes) {                             \
      const int64_t width = std::min(kLanes, size - start);                              \
      wide_t x[kLanes] = {}, g[kLanes] = {}, y[kLanes];                                  \
      for (int64_t j = 0; j < width; ++j) x[j] = widen(in[start + j]);                   \
      for (int64_t j = 0; j < width; ++j) g[j] = widen(grad[start + j]);                 \
      for (int64_t j = 0; j < kLanes; ++j) {                                             \
        const wide_t s = sigmoid(x[j]);                                                  \
        y[j] = g[j] * (s + x[j] * s * (1 - s));                                          \
      }                                                                                  \
      for (int64_t j = 0; j < width; ++j) store(y[j], out + start + j);                  \
    }                                                                                    \
  }

PARALLEL_EXT_SILU_LOOPS(float, float)
PARALLEL_EXT_SILU_LOOPS(c10::BFloat16, float)
PARALLEL_EXT_SILU_LOOPS(c10::Half, float)
PARALLEL_EXT_SILU_LOOPS(double, double)

template <typename Loop>
void in_tasks(int64_t numel, const Loop& loop) {
  at::parallel_for(0, numel, kPerTask,
                   [&](int64_t begin, int64_t end) { loop(begin, end - begin); });
}

at::Tensor fixed_silu_kernel(const at::Tensor& input_in) {
  check_floating("fixed_silu", "input", input_in);
  if (!use_cpu_loops(input_in)) {
    const at::Tensor wide = input_in.to(wide_type(input_in));
    return (wide * at::sigmoid(wide)).to(input_in.scalar_type());
  }
  const at::Tensor input = input_in.contiguous();
  at::Tensor output = pooled_empty(input.sizes(), input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, input.scalar_type(), "fixed_silu", [&] {
    const auto* in = input.const_data_ptr<scalar_t>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    in_tasks(input.numel(),
             [&](int64_t begin, int64_t size) { silu(in + begin, size, out + begin); });
  });
  return output;
}

at::Tensor fixed_silu_backward_kernel(const at::Tensor& grad_in, const at::Tensor& input_in) {
  const char* op = "fixed_silu_backward";
  check_same_dtype(op, "grad_output", grad_in, "input", input_in);
  check_shape(op, "grad_output", grad_in, input_in.sizes());
  if (!use_cpu_loops(input_in)) {
    const auto wide = wide_type(input_in);
    const at::Tensor x = input_in.to(wide), s = at::sigmoid(x);
    return (grad_in.to(wide) * (s + x * s * (1 - s))).to(input_in.scalar_type());
  }
  const at::Tensor grad = grad_in.contiguous(), input = input_in.contiguous();
  at::Tensor output = pooled_empty(input.sizes(), input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, input.scalar_type(),
                                  "fixed_silu_backward", [&] {
                                    const auto* g = grad.const_data_ptr<scalar_t>();
                                    const auto* in = input.const_data_ptr<scalar_t>();
                                    auto* out = output.mutable_data_ptr<scalar_t>();
                                    in_tasks(input.numel(), [&](int64_t begin, int64_t size) {
                                      silu_backward(g + begin, in + begin, size, out + begin);
                                    });
                                  });
  return output;
}

at::Tensor fixed_silu_meta(const at::Tensor& input) {
  return at::empty_like(input, at::MemoryFormat::Contiguous);
}

struct FixedSilu : Gradient<FixedSilu, fixed_silu, Saved<0>> {
  static variable_list rule(const ForwardCall<fixed_silu>& forward, const variable_list& grads) {
    const auto [input] = forward.arguments();
    return forward.gradients(fixed_silu_backward(grads[0], input));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<fixed_silu>(library)
      .kernel<fixed_silu_kernel>()
      .meta<fixed_silu_meta>()
      .gradient<FixedSilu>();
  implement<fixed_silu_backward>(library)
      .kernel<fixed_silu_backward_kernel>()
      .meta<fixed_silu_meta>();
}

}  // namespace parallel_ext
