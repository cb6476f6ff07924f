// silu(gate) * up * weight for one element, and its derivatives: for CPU and CUDA.
#pragma once

#include "base/exp.h"
#include "base/number.h"

namespace parallel_ext {

// 1 / (1 + exp(-x)), without overflow.
template <typename wide_t>
PARALLEL_EXT_INLINE wide_t sigmoid(wide_t x) {
  const wide_t small = exp_below_88(x < 0 ? x : -x);
  return (x < 0 ? small : wide_t(1)) / (1 + small);
}

template <typename wide_t>
PARALLEL_EXT_INLINE wide_t gated_silu(wide_t gate, wide_t up, wide_t weight) {
  return gate * sigmoid(gate) * up * weight;
}

template <typename wide_t>
struct GatedSiluGradients {
  wide_t gate, up, weight;
};

template <typename wide_t>
PARALLEL_EXT_INLINE GatedSiluGradients<wide_t> gated_silu_gradients(wide_t grad, wide_t gate,
                                                                    wide_t up, wide_t weight) {
  const wide_t s = sigmoid(gate), silu = gate * s;
  return {grad * weight * up * (s + silu * (1 - s)), grad * weight * silu, grad * silu * up};
}

}  // namespace parallel_ext
