// Activations whose result for an element depends on that element alone: torch's have other bits in
// the last numbers of a tensor, which their loops of vectors do not reach.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>

#include <algorithm>
#include <type_traits>

#include "base/empty.h"
#include "base/exp.h"
#include "base/kernel_choice.h"
#include "base/workspace.h"
#include "check.h"
#include "gradient.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

constexpr int64_t kLanes = 256;  // gcc unrolls loops over a few, and makes no vectors of bf16
constexpr int64_t kPerTask = 1 << 14;

// Each activation is `value` of x and of s = sigmoid(inner(x)), and `slope` its derivative by x; of
// numbers and of tensors.
template <typename T>
using NumberOf = std::conditional_t<std::is_same_v<T, at::Tensor>, double, T>;

struct Sigmoid {
  static constexpr const char* kOp = "fixed_sigmoid";
  static constexpr const char* kBackward = "fixed_sigmoid_backward";

  template <typename T>
  static PARALLEL_EXT_INLINE T inner(T x) {
    return x;
  }
  template <typename T>
  static PARALLEL_EXT_INLINE T value(T, T s) {
    return s;
  }
  template <typename T>
  static PARALLEL_EXT_INLINE T slope(T, T s) {
    return s * (1 - s);
  }
};

struct Silu {
  static constexpr const char* kOp = "fixed_silu";
  static constexpr const char* kBackward = "fixed_silu_backward";

  template <typename T>
  static PARALLEL_EXT_INLINE T inner(T x) {
    return x;
  }
  template <typename T>
  static PARALLEL_EXT_INLINE T value(T x, T s) {
    return x * s;
  }
  template <typename T>
  static PARALLEL_EXT_INLINE T slope(T x, T s) {
    return s + x * s * (1 - s);
  }
};

// gelu by tanh, since (1 + tanh(z)) / 2 = sigmoid(2 z).
struct Gelu {
  static constexpr const char* kOp = "fixed_gelu";
  static constexpr const char* kBackward = "fixed_gelu_backward";
  static constexpr double kTwice = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = 0.044715;

  template <typename T>
  static PARALLEL_EXT_INLINE T inner(T x) {
    return NumberOf<T>(kTwice) * (x + NumberOf<T>(kCubic) * x * x * x);
  }
  template <typename T>
  static PARALLEL_EXT_INLINE T value(T x, T s) {
    return x * s;
  }
  template <typename T>
  static PARALLEL_EXT_INLINE T slope(T x, T s) {
    const T of_inner = NumberOf<T>(kTwice) * (1 + NumberOf<T>(3 * kCubic) * x * x);
    return s + x * s * (1 - s) * of_inner;
  }
};

// One function per dtype: target_clones does not work with templates. All blocks of lanes, the last
// one too, go through the same instructions: its numbers are brought to memory of a whole block.
#define PARALLEL_EXT_ACTIVATION_LOOPS(Kind, scalar_t, wide_t)                                  \
  PARALLEL_EXT_MULTIVERSION void forward_loop(Kind, const scalar_t* in, int64_t size,          \
                                              scalar_t* out) {                                 \
    scalar_t last_in[kLanes] = {}, last_out[kLanes];                                           \
    for (int64_t start = 0; start < size; start += kLanes) {                                   \
      const int64_t left = size - start;                                                       \
      if (left < kLanes) std::copy_n(in + start, left, last_in);                               \
      const scalar_t* from = left < kLanes ? last_in : in + start;                             \
      scalar_t* to = left < kLanes ? last_out : out + start;                                   \
      wide_t x[kLanes];                                                                        \
      for (int64_t j = 0; j < kLanes; ++j) x[j] = widen(from[j]);                              \
      for (int64_t j = 0; j < kLanes; ++j) {                                                   \
        x[j] = Kind::value(x[j], sigmoid(Kind::inner(x[j])));                                  \
      }                                                                                        \
      for (int64_t j = 0; j < kLanes; ++j) store(x[j], to + j);                                \
      if (left < kLanes) std::copy_n(last_out, left, out + start);                             \
    }                                                                                          \
  }                                                                                            \
  PARALLEL_EXT_MULTIVERSION void backward_loop(Kind, const scalar_t* grad, const scalar_t* in, \
                                               int64_t size, scalar_t* out) {                  \
    scalar_t last_grad[kLanes] = {}, last_in[kLanes] = {}, last_out[kLanes];                   \
    for (int64_t start = 0; start < size; start += kLanes) {                                   \
      const int64_t left = size - start;                                                       \
      if (left < kLanes) {                                                                     \
        std::copy_n(grad + start, left, last_grad);                                            \
        std::copy_n(in + start, left, last_in);                                                \
      }                                                                                        \
      const scalar_t* from = left < kLanes ? last_in : in + start;                             \
      const scalar_t* from_grad = left < kLanes ? last_grad : grad + start;                    \
      scalar_t* to = left < kLanes ? last_out : out + start;                                   \
      wide_t x[kLanes], y[kLanes];                                                             \
      for (int64_t j = 0; j < kLanes; ++j) x[j] = widen(from[j]);                              \
      for (int64_t j = 0; j < kLanes; ++j) y[j] = widen(from_grad[j]);                         \
      for (int64_t j = 0; j < kLanes; ++j) {                                                   \
        y[j] *= Kind::slope(x[j], sigmoid(Kind::inner(x[j])));                                 \
      }                                                                                        \
      for (int64_t j = 0; j < kLanes; ++j) store(y[j], to + j);                                \
      if (left < kLanes) std::copy_n(last_out, left, out + start);                             \
    }                                                                                          \
  }

PARALLEL_EXT_ACTIVATION_LOOPS(Sigmoid, float, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Sigmoid, c10::BFloat16, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Sigmoid, c10::Half, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Sigmoid, double, double)
PARALLEL_EXT_ACTIVATION_LOOPS(Silu, float, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Silu, c10::BFloat16, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Silu, c10::Half, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Silu, double, double)
PARALLEL_EXT_ACTIVATION_LOOPS(Gelu, float, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Gelu, c10::BFloat16, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Gelu, c10::Half, float)
PARALLEL_EXT_ACTIVATION_LOOPS(Gelu, double, double)

template <typename Loop>
void in_tasks(int64_t numel, const Loop& loop) {
  at::parallel_for(0, numel, kPerTask,
                   [&](int64_t begin, int64_t end) { loop(begin, end - begin); });
}

template <typename Kind>
at::Tensor activated(const at::Tensor& input_in) {
  check_floating(Kind::kOp, "input", input_in);
  if (!use_cpu_loops(input_in)) {
    const at::Tensor x = input_in.to(wide_type(input_in));
    return Kind::value(x, at::sigmoid(Kind::inner(x))).to(input_in.scalar_type()).contiguous();
  }
  const at::Tensor input = input_in.contiguous();
  at::Tensor output = pooled_empty(input.sizes(), input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, input.scalar_type(), Kind::kOp, [&] {
    const auto* in = input.const_data_ptr<scalar_t>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    in_tasks(input.numel(), [&](int64_t begin, int64_t size) {
      forward_loop(Kind(), in + begin, size, out + begin);
    });
  });
  return output;
}

template <typename Kind>
at::Tensor gradient(const at::Tensor& grad_in, const at::Tensor& input_in) {
  check_same_dtype(Kind::kBackward, "grad_output", grad_in, "input", input_in);
  check_shape(Kind::kBackward, "grad_output", grad_in, input_in.sizes());
  if (!use_cpu_loops(input_in)) {
    const auto wide = wide_type(input_in);
    const at::Tensor x = input_in.to(wide), s = at::sigmoid(Kind::inner(x));
    return (grad_in.to(wide) * Kind::slope(x, s)).to(input_in.scalar_type()).contiguous();
  }
  const at::Tensor grad = grad_in.contiguous(), input = input_in.contiguous();
  at::Tensor output = pooled_empty(input.sizes(), input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, input.scalar_type(), Kind::kBackward, [&] {
        const auto* g = grad.const_data_ptr<scalar_t>();
        const auto* in = input.const_data_ptr<scalar_t>();
        auto* out = output.mutable_data_ptr<scalar_t>();
        in_tasks(input.numel(), [&](int64_t begin, int64_t size) {
          backward_loop(Kind(), g + begin, in + begin, size, out + begin);
        });
      });
  return output;
}

struct FixedSigmoid : Gradient<FixedSigmoid, fixed_sigmoid, Saved<0>> {
  static variable_list rule(const ForwardCall<fixed_sigmoid>& forward, const variable_list& grads) {
    const auto [input] = forward.arguments();
    return forward.gradients(fixed_sigmoid_backward(grads[0], input));
  }
};

struct FixedSilu : Gradient<FixedSilu, fixed_silu, Saved<0>> {
  static variable_list rule(const ForwardCall<fixed_silu>& forward, const variable_list& grads) {
    const auto [input] = forward.arguments();
    return forward.gradients(fixed_silu_backward(grads[0], input));
  }
};

struct FixedGelu : Gradient<FixedGelu, fixed_gelu, Saved<0>> {
  static variable_list rule(const ForwardCall<fixed_gelu>& forward, const variable_list& grads) {
    const auto [input] = forward.arguments();
    return forward.gradients(fixed_gelu_backward(grads[0], input));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<fixed_sigmoid>(library)
      .kernel<activated<Sigmoid>>()
      .meta<same_shape_meta>()
      .gradient<FixedSigmoid>();
  implement<fixed_sigmoid_backward>(library).kernel<gradient<Sigmoid>>().meta<same_shape_meta>();
  implement<fixed_silu>(library)
      .kernel<activated<Silu>>()
      .meta<same_shape_meta>()
      .gradient<FixedSilu>();
  implement<fixed_silu_backward>(library).kernel<gradient<Silu>>().meta<same_shape_meta>();
  implement<fixed_gelu>(library)
      .kernel<activated<Gelu>>()
      .meta<same_shape_meta>()
      .gradient<FixedGelu>();
  implement<fixed_gelu_backward>(library).kernel<gradient<Gelu>>().meta<same_shape_meta>();
}

}  // namespace parallel_ext
