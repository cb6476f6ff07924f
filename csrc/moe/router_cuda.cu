// The tests run this file on the CPU too, with one thread for each thread of a block.
#include <c10/macros/Macros.h>

#include <limits>

#include "base/cuda_grid.h"
#include "base/exp.h"
#include "moe/router_cuda.h"

namespace parallel_ext {
namespace {

// A warp serves a token. A lane reads every 32nd logit, again whenever it needs a probability: the
// row stays in the cache, and no number of experts or choices needs more registers.
constexpr int kWarp = 32;

template <typename number_t>
__device__ __forceinline__ number_t from_lane(number_t value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

template <typename scalar_t>
struct Softmax {
  using wide_t = wide_of<scalar_t>;
  const scalar_t* row;
  wide_t max, scale;

  __device__ __forceinline__ wide_t operator()(int64_t expert) const {
    return exp_below_88(widen(row[expert]) - max) * scale;
  }
};

// NaN, and inf - inf, reach the total and so all probabilities.
template <typename scalar_t>
__device__ __forceinline__ Softmax<scalar_t> softmax_of(const scalar_t* row, int64_t num_experts) {
  using wide_t = wide_of<scalar_t>;
  const int lane = static_cast<int>(threadIdx.x);
  wide_t max = -std::numeric_limits<wide_t>::infinity(), total = 0;
  for (int64_t expert = lane; expert < num_experts; expert += kWarp) {
    const wide_t own = widen(row[expert]);
    max = own > max ? own : max;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const wide_t other = from_lane(max, mask);
    max = other > max ? other : max;
  }
  for (int64_t expert = lane; expert < num_experts; expert += kWarp) {
    total += exp_below_88(widen(row[expert]) - max);
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) total += from_lane(total, mask);
  return {row, max, 1 / total};
}

// A choice of a token: of equal probabilities the lower id comes first.
template <typename wide_t>
struct Choice {
  wide_t probability;
  int64_t id;

  __device__ __forceinline__ bool before(const Choice& other) const {
    return probability > other.probability || (probability == other.probability && id < other.id);
  }
};

// The first of the choices behind `last`.
template <typename scalar_t>
__device__ __forceinline__ Choice<wide_of<scalar_t>> next_choice(
    const Softmax<scalar_t>& softmax, int64_t num_experts, const Choice<wide_of<scalar_t>>& last) {
  using Own = Choice<wide_of<scalar_t>>;
  Own best{-1, num_experts};
  for (int64_t expert = threadIdx.x; expert < num_experts; expert += kWarp) {
    const auto probability = softmax(expert);
    const Own own{probability == probability ? probability : 0, expert};  // NaN: as all others
    if (last.before(own) && own.before(best)) best = own;
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const Own other{from_lane(best.probability, mask), from_lane(best.id, mask)};
    if (other.before(best)) best = other;
  }
  return best;
}

__device__ __forceinline__ bool is_expert(int64_t id, const RouterSizes& sizes) {
  return 0 <= id && id < sizes.num_experts;
}

template <typename Use>
__device__ __forceinline__ void for_tokens(const RouterSizes& sizes, const Use& use) {
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; token < sizes.tokens;
       token += step) {
    use(token);
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kBlockThreads)
    router_kernel(const RouterSizes sizes, const scalar_t* __restrict__ logits,
                  const int64_t* __restrict__ given, wide_of<scalar_t>* __restrict__ weights,
                  int64_t* __restrict__ ids) {
  using wide_t = wide_of<scalar_t>;
  for_tokens(sizes, [&](int64_t token) {
    const auto softmax = softmax_of(logits + token * sizes.num_experts, sizes.num_experts);
    Choice<wide_t> last{std::numeric_limits<wide_t>::infinity(), -1};
    wide_t total = 0;
    for (int64_t i = 0; i < sizes.top_k; ++i) {
      const int64_t at = token * sizes.top_k + i;
      last = given != nullptr ? Choice<wide_t>{0, given[at]}
                              : next_choice(softmax, sizes.num_experts, last);
      CUDA_KERNEL_ASSERT_MSG(is_expert(last.id, sizes), "moe_router: an id is of no expert");
      const wide_t probability = softmax(last.id);
      total += probability;
      if (i % kWarp != threadIdx.x) continue;
      ids[at] = last.id;
      weights[at] = probability;
    }
    if (!sizes.normalized) return;
    const wide_t scale = 1 / total;
    for (int64_t i = threadIdx.x; i < sizes.top_k; i += kWarp) {  // those that this lane wrote
      weights[token * sizes.top_k + i] *= scale;
    }
  });
}

// With the chosen probabilities p, their sum s (1 where the weights are not normalized) and the
// gradients g of the weights p / s: the gradient of p is d = (g - sum(g p) / s) / s, or g; that of
// a logit is its probability times the difference of its own d and sum(d p).
template <typename scalar_t>
__global__ void __launch_bounds__(kBlockThreads)
    router_backward_kernel(const RouterSizes sizes,
                           const wide_of<scalar_t>* __restrict__ grad_weights,
                           const scalar_t* __restrict__ logits, const int64_t* __restrict__ ids,
                           scalar_t* __restrict__ grad_logits) {
  using wide_t = wide_of<scalar_t>;
  for_tokens(sizes, [&](int64_t token) {
    const auto softmax = softmax_of(logits + token * sizes.num_experts, sizes.num_experts);
    const int64_t* const id = ids + token * sizes.top_k;
    const wide_t* const grad = grad_weights + token * sizes.top_k;
    wide_t total = 0, dot = 0;
    for (int64_t i = 0; i < sizes.top_k; ++i) {
      CUDA_KERNEL_ASSERT_MSG(is_expert(id[i], sizes), "moe_router: an id is of no expert");
      const wide_t probability = softmax(id[i]);
      total += probability;
      dot += grad[i] * probability;
    }
    const wide_t scale = sizes.normalized ? 1 / total : 1;
    const wide_t mean = sizes.normalized ? dot * scale : 0;
    const wide_t shared = (dot - mean * total) * scale;
    for (int64_t expert = threadIdx.x; expert < sizes.num_experts; expert += kWarp) {
      wide_t own = 0;
      for (int64_t i = 0; i < sizes.top_k; ++i) {
        own += id[i] == expert ? (grad[i] - mean) * scale : 0;
      }
      store(softmax(expert) * (own - shared), grad_logits + token * sizes.num_experts + expert);
    }
  });
}

GridShape grid_of_tokens(int64_t tokens) {
  constexpr int kTokens = kBlockThreads / kWarp;
  return {grid_of_blocks((tokens + kTokens - 1) / kTokens).blocks, dim3(kWarp, kTokens)};
}

}  // namespace

template <typename scalar_t>
void router_on_cuda(const RouterSizes& sizes, const scalar_t* logits, const int64_t* given,
                    wide_of<scalar_t>* weights, int64_t* ids, int device) {
  if (sizes.tokens == 0) return;  // CUDA refuses an empty grid
  launch(router_kernel<scalar_t>, grid_of_tokens(sizes.tokens), device, sizes, logits, given,
         weights, ids);
}

template <typename scalar_t>
void router_backward_on_cuda(const RouterSizes& sizes, const wide_of<scalar_t>* grad_weights,
                             const scalar_t* logits, const int64_t* ids, scalar_t* grad_logits,
                             int device) {
  if (sizes.tokens == 0) return;
  launch(router_backward_kernel<scalar_t>, grid_of_tokens(sizes.tokens), device, sizes,
         grad_weights, logits, ids, grad_logits);
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                            \
  template void router_on_cuda(const RouterSizes&, const scalar_t*, const int64_t*,   \
                               wide_of<scalar_t>*, int64_t*, int);                    \
  template void router_backward_on_cuda(const RouterSizes&, const wide_of<scalar_t>*, \
                                        const scalar_t*, const int64_t*, scalar_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
