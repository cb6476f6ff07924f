// The activation between the two products of an expert, times the weight of the row. Weighted here,
// neither the outputs of the experts nor the unweighted activation need be kept for backward.
#include "moe/gated_silu.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>

#include "base/kernel_choice.h"
#include "base/workspace.h"
#include "check.h"
#include "gradient.h"
#include "moe/ops.h"
#include "moe/rows_cuda.h"

namespace parallel_ext {
namespace {

constexpr int64_t kRowsPerTask = 16;

void check_gated_silu(const char* op, const at::Tensor& gate_up, const at::Tensor& weights) {
  check_floating(op, "gate_up", gate_up);
  check_dim(op, "gate_up", gate_up, 2);
  TORCH_CHECK_VALUE(gate_up.size(1) % 2 == 0, op, ": gate_up of shape ", gate_up.sizes(),
                    " has no two halves");
  TORCH_CHECK_VALUE(weights.dim() == 1 && weights.size(0) == gate_up.size(0), op,
                    ": weights of shape ", weights.sizes(),
                    " are not one for each row of gate_up, ", "which has the shape ",
                    gate_up.sizes());
  check_wide_dtype(op, "weights", weights, "gate_up", gate_up);
}

// One function per dtype: target_clones does not work with templates.
#define PARALLEL_EXT_GATED_LOOPS(scalar_t, wide_t)                                                 \
  PARALLEL_EXT_MULTIVERSION void gate_row(const scalar_t* gate, const scalar_t* up, wide_t weight, \
                                          int64_t size, scalar_t* out) {                           \
    for (int64_t i = 0; i < size; ++i) {                                                           \
      store(gated_silu(widen(gate[i]), widen(up[i]), weight), out + i);                            \
    }                                                                                              \
  }                                                                                                \
  /* also the gradient of the weight, in 16 parts whose order is fixed */                          \
  PARALLEL_EXT_MULTIVERSION wide_t gate_row_backward(                                              \
      const scalar_t* grad, const scalar_t* gate, const scalar_t* up, wide_t weight, int64_t size, \
      scalar_t* grad_gate, scalar_t* grad_up) {                                                    \
    constexpr int64_t kLanes = 16;                                                                 \
    wide_t lane[kLanes] = {};                                                                      \
    for (int64_t start = 0; start < size; start += kLanes) {                                       \
      const int64_t width = std::min(kLanes, size - start);                                        \
      for (int64_t j = 0; j < width; ++j) {                                                        \
        const int64_t i = start + j;                                                               \
        const auto gradients =                                                                     \
            gated_silu_gradients(widen(grad[i]), widen(gate[i]), widen(up[i]), weight);            \
        lane[j] += gradients.weight;                                                               \
        store(gradients.up, grad_up + i);                                                          \
        store(gradients.gate, grad_gate + i);                                                      \
      }                                                                                            \
    }                                                                                              \
    wide_t sum = 0;                                                                                \
    for (int64_t j = 0; j < kLanes; ++j) sum += lane[j];                                           \
    return sum;                                                                                    \
  }

PARALLEL_EXT_GATED_LOOPS(float, float)
PARALLEL_EXT_GATED_LOOPS(c10::BFloat16, float)
PARALLEL_EXT_GATED_LOOPS(c10::Half, float)
PARALLEL_EXT_GATED_LOOPS(double, double)

// The loops of the CPU, or the CUDA kernels.
at::Tensor moe_gated_silu_own(const at::Tensor& gate_up_in, const at::Tensor& weights_in) {
  const at::Tensor gate_up = gate_up_in.contiguous(), weights = weights_in.contiguous();
  const int64_t rows = gate_up.size(0), inner = gate_up.size(1) / 2;
  at::Tensor output = pooled_empty({rows, inner}, gate_up.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, gate_up.scalar_type(), "moe_gated_silu", [&] {
        const auto* in = gate_up.const_data_ptr<scalar_t>();
        const auto* weight = weights.const_data_ptr<wide_of<scalar_t>>();
        auto* out = output.mutable_data_ptr<scalar_t>();
        if constexpr (kWithCudaKernels) {
          if (gate_up.is_cuda()) {
            return gate_rows_on_cuda(rows, inner, in, weight, out, gate_up.get_device());
          }
        }
        at::parallel_for(0, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            const auto* gate = in + row * 2 * inner;
            gate_row(gate, gate + inner, weight[row], inner, out + row * inner);
          }
        });
      });
  return output;
}

Tensors<2> moe_gated_silu_backward_own(const at::Tensor& grad_in, const at::Tensor& gate_up_in,
                                       const at::Tensor& weights_in) {
  const at::Tensor grad_output = grad_in.contiguous();
  const at::Tensor gate_up = gate_up_in.contiguous(), weights = weights_in.contiguous();
  const int64_t rows = gate_up.size(0), inner = gate_up.size(1) / 2;
  at::Tensor grad_gate_up = pooled_empty(gate_up.sizes(), gate_up.options());
  at::Tensor grad_weights = at::empty({rows}, weights.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, gate_up.scalar_type(), "moe_gated_silu_backward", [&] {
        using wide_t = wide_of<scalar_t>;
        const auto* grad = grad_output.const_data_ptr<scalar_t>();
        const auto* in = gate_up.const_data_ptr<scalar_t>();
        const auto* weight = weights.const_data_ptr<wide_t>();
        auto* out = grad_gate_up.mutable_data_ptr<scalar_t>();
        auto* dot = grad_weights.mutable_data_ptr<wide_t>();
        if constexpr (kWithCudaKernels) {
          if (gate_up.is_cuda()) {
            return gate_rows_backward_on_cuda(rows, inner, grad, in, weight, out, dot,
                                              gate_up.get_device());
          }
        }
        at::parallel_for(0, rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            const int64_t at = row * 2 * inner;
            dot[row] = gate_row_backward(grad + row * inner, in + at, in + at + inner, weight[row],
                                         inner, out + at, out + at + inner);
          }
        });
      });
  return {grad_gate_up, grad_weights};
}

at::Tensor moe_gated_silu_aten(const at::Tensor& gate_up, const at::Tensor& weights) {
  const auto halves = gate_up.to(wide_type(gate_up)).chunk(2, 1);
  return (halves[0] * at::sigmoid(halves[0]) * halves[1] * weights.unsqueeze(1))
      .to(gate_up.scalar_type())
      .contiguous();
}

Tensors<2> moe_gated_silu_backward_aten(const at::Tensor& grad_output, const at::Tensor& gate_up,
                                        const at::Tensor& weights) {
  const auto wide = wide_type(gate_up);
  const auto halves = gate_up.to(wide).chunk(2, 1);
  const at::Tensor grad = grad_output.to(wide), &gate = halves[0], &up = halves[1];
  const at::Tensor s = at::sigmoid(gate), silu = gate * s;
  const at::Tensor weighted = grad * weights.unsqueeze(1);
  const at::Tensor both = at::cat({weighted * up * (s + silu * (1 - s)), weighted * silu}, 1);
  return {both.to(gate_up.scalar_type()).contiguous(), (grad * silu * up).sum(1)};
}

at::Tensor moe_gated_silu_kernel(const at::Tensor& gate_up, const at::Tensor& weights) {
  check_gated_silu("moe_gated_silu", gate_up, weights);
  return (use_own_kernel(gate_up) ? moe_gated_silu_own : moe_gated_silu_aten)(gate_up, weights);
}

Tensors<2> moe_gated_silu_backward_kernel(const at::Tensor& grad_output, const at::Tensor& gate_up,
                                          const at::Tensor& weights) {
  const char* op = "moe_gated_silu_backward";
  check_gated_silu(op, gate_up, weights);
  check_same_dtype(op, "grad_output", grad_output, "gate_up", gate_up);
  check_shape(op, "grad_output", grad_output, {gate_up.size(0), gate_up.size(1) / 2});
  return (use_own_kernel(gate_up) ? moe_gated_silu_backward_own : moe_gated_silu_backward_aten)(
      grad_output, gate_up, weights);
}

at::Tensor moe_gated_silu_meta(const at::Tensor& gate_up, const at::Tensor&) {
  return at::empty_symint({gate_up.sym_size(0), gate_up.sym_size(1) / 2}, gate_up.options());
}

Tensors<2> moe_gated_silu_backward_meta(const at::Tensor&, const at::Tensor& gate_up,
                                        const at::Tensor& weights) {
  return {at::empty_symint(gate_up.sym_sizes(), gate_up.options()),
          at::empty_symint(weights.sym_sizes(), weights.options())};
}

struct MoeGatedSilu : Gradient<MoeGatedSilu, moe_gated_silu, Saved<0, 1>> {
  static variable_list rule(const ForwardCall<moe_gated_silu>& forward,
                            const variable_list& grads) {
    const auto [gate_up, weights] = forward.arguments();
    return forward.gradients(moe_gated_silu_backward(grads[0], gate_up, weights));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<moe_gated_silu>(library)
      .kernel<moe_gated_silu_kernel>()
      .meta<moe_gated_silu_meta>()
      .gradient<MoeGatedSilu>();
  implement<moe_gated_silu_backward>(library)
      .kernel<moe_gated_silu_backward_kernel>()
      .meta<moe_gated_silu_backward_meta>();
}

}  // namespace parallel_ext
