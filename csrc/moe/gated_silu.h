// silu(gate) * up * weight for one element, and its derivatives: for CPU and CUDA.
#pragma once

#include "base/exp.h"
#include "base/number.h"

namespace parallel_ext {

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
