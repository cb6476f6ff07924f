// CUDA kernels of a mixture's router. They exist in builds with PARALLEL_EXT_WITH_CUDA; scalar_t is
// float, double, c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>

#include "base/number.h"

namespace parallel_ext {

struct RouterSizes {
  int64_t tokens, num_experts, top_k;
  bool normalized;
};

// All pointers are to contiguous memory of the device; outputs overlap nothing else. The kernels
// run on the current stream of the device. They use no atomics: same inputs, same bits.

// moe_router: logits [tokens, num_experts] -> weights and ids [tokens, top_k]; the ids are `given`
// [tokens, top_k] where that is not null.
template <typename scalar_t>
void router_on_cuda(const RouterSizes& sizes, const scalar_t* logits, const int64_t* given,
                    wide_of<scalar_t>* weights, int64_t* ids, int device);

// grad_weights [tokens, top_k], logits, ids -> grad_logits [tokens, num_experts].
template <typename scalar_t>
void router_backward_on_cuda(const RouterSizes& sizes, const wide_of<scalar_t>* grad_weights,
                             const scalar_t* logits, const int64_t* ids, scalar_t* grad_logits,
                             int device);

}  // namespace parallel_ext
