// The tests run this file on the CPU too, with one thread for each thread of a block.
#include <algorithm>

#include "base/cuda_grid.h"
#include "vocab/linear_cross_entropy_cuda.h"
#include "vocab/shard_rows.h"

namespace parallel_ext {
namespace {

constexpr int64_t kBlocksOfScale = 2048;  // fill a GPU, and are soon gone where the factor is 1

template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads)
    scale_kernel(scalar_t* __restrict__ numbers, int64_t count,
                 const wide_of<scalar_t>* __restrict__ factor_in) {
  const wide_of<scalar_t> factor = *factor_in;
  if (factor == 1) return;
  const GridThread thread = this_thread();
  const int64_t whole = count / size;
  for (int64_t i = thread.x; i < whole; i += thread.num_x) {
    Pack<scalar_t, size> pack = packs<size>(numbers)[i];
    PARALLEL_EXT_UNROLL
    for (int j = 0; j < size; ++j) store(widen(pack.value[j]) * factor, pack.value + j);
    packs<size>(numbers)[i] = pack;
  }
  for (int64_t i = whole * size + thread.x; i < count; i += thread.num_x) {
    store(widen(numbers[i]) * factor, numbers + i);
  }
}

// Calls use(j, number) for the numbers from `data` on, which are loaded as wide as can be.
template <int size, typename number_t, typename Use>
__device__ __forceinline__ void for_loaded(const number_t* data, const Use& use) {
  constexpr int kAtOnce = std::min<int>(size, kWidest / sizeof(number_t));
  PARALLEL_EXT_UNROLL
  for (int first = 0; first < size; first += kAtOnce) {
    const Pack<number_t, kAtOnce> pack = *packs<kAtOnce>(data + first);
    PARALLEL_EXT_UNROLL
    for (int j = 0; j < kAtOnce; ++j) use(first + j, widen(pack.value[j]));
  }
}

template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads)
    frozen_gradient_kernel(const FrozenHeadOnCuda<scalar_t> head, scalar_t* __restrict__ grad) {
  using wide_t = wide_of<scalar_t>;
  for_work(head.num_tokens, head.hidden_size / size, [&](int64_t token, int64_t pack) {
    const auto factor = [&](int64_t row) { return head.factors[row * head.num_tokens + token]; };
    const wide_t probability = factor(GradientRows::kProbability),
                 of_column = factor(GradientRows::kColumn), of_label = factor(GradientRows::kLabel);
    const int64_t column = pack * size, at = token * head.hidden_size + column;
    wide_t value[size] = {};
    if (probability != 0 || of_column != 0 || of_label != 0) {
      for_loaded<size>(head.expected_rows + at,
                       [&](int j, wide_t number) { value[j] = number * probability; });
      if (head.column_row != nullptr) {
        for_loaded<size>(head.column_row + column,
                         [&](int j, wide_t number) { value[j] -= of_column * number; });
      }
      // Not column_of, with which ptxas spills a register for sm_80.
      const int64_t row = head.labels[token] - head.vocab_start;
      if (0 <= row && row < head.num_rows) {
        for_loaded<size>(head.head + row * head.hidden_size + column, [&](int j, wide_t number) {
          value[j] += number * ((probability - of_label) * head.scale);
        });
      }
    }
    store_pack<scalar_t, size>(value, packs<size>(grad + at));
  });
}

}  // namespace

template <typename scalar_t>
void scale_on_cuda(scalar_t* numbers, int64_t count, const wide_of<scalar_t>* factor, int device) {
  if (count == 0) return;  // CUDA refuses an empty grid
  with_size<scalar_t>(address(numbers), [&](auto size) {
    const int64_t of_block = kBlockThreads * size;
    launch(scale_kernel<scalar_t, size>,
           grid_of_blocks(std::min(kBlocksOfScale, (count + of_block - 1) / of_block)), device,
           numbers, count, factor);
  });
}

template <typename scalar_t>
void frozen_gradient_on_cuda(const FrozenHeadOnCuda<scalar_t>& head, scalar_t* grad, int device) {
  if (head.num_tokens == 0 || head.hidden_size == 0) return;
  const uint64_t bits = address(head.expected_rows) | address(head.head) |
                        address(head.column_row) | address(grad) |
                        head.hidden_size * sizeof(scalar_t);
  with_size<scalar_t>(bits, [&](auto size) {
    launch(frozen_gradient_kernel<scalar_t, size>,
           grid_of_rows(head.num_tokens, head.hidden_size / size), device, head, grad);
  });
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                        \
  template void scale_on_cuda(scalar_t*, int64_t, const wide_of<scalar_t>*, int); \
  template void frozen_gradient_on_cuda(const FrozenHeadOnCuda<scalar_t>&, scalar_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
