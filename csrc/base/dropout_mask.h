// The random bits that decide each element of a dropout mask, and the elements that each CUDA
// thread serves. CPU loops and CUDA kernels share this, so that they draw the same mask. Nothing
// here needs a GPU, so that the tests can run the threads one after the other on a CPU.
#pragma once

#include <cstdint>

#include "base/grid_thread.h"
#include "base/number.h"
#include "base/philox.h"

namespace parallel_ext {

// The 16 random bits of feature f of token t are half s mod 2 of word s / 2 of the Philox block
// with the counter (f / 128 * 16 + f mod 16, t, step, 0), where s = f / 16 mod 8: so 16 blocks,
// which a vector register computes side by side, serve 128 features in a row.
inline constexpr int64_t kMaskLanes = 16;
inline constexpr int64_t kMaskHalves = 8;
inline constexpr int64_t kMaskBlock = kMaskLanes * kMaskHalves;

struct MaskStream {
  uint32_t key0, key1, step, threshold;
};

// The random bits of features 128 * block + 16 * s + lane of a token, s in [0, 8).
PARALLEL_EXT_INLINE Philox draw_lane(const MaskStream& stream, uint32_t token, uint32_t block,
                                     uint32_t lane) {
  const uint32_t first = block * static_cast<uint32_t>(kMaskLanes) + lane;
  return philox({{first, token, stream.step, 0}}, stream.key0, stream.key1);
}

// Whether feature 128 * block + 16 * s + lane is kept, from word s / 2 of that draw and s mod 2.
PARALLEL_EXT_INLINE bool is_kept(const MaskStream& stream, uint32_t word, int half) {
  return ((word >> (16 * half)) & 0xffffu) >= stream.threshold;
}

// A part [rows, size] of the mask, which begins at a token and a feature.
struct MaskPart {
  MaskStream stream;
  uint32_t token;
  int64_t feature, rows, size;

  // A thread draws one lane of one block; adjacent threads read adjacent elements.
  PARALLEL_EXT_INLINE int64_t threads_per_row() const {
    return (feature % kMaskBlock + size + kMaskBlock - 1) / kMaskBlock * kMaskLanes;
  }
};

// Calls use(i, kept) for the elements that the thread serves, where i counts row by row.
template <typename Use>
PARALLEL_EXT_INLINE void for_elements(const MaskPart& part, const GridThread& thread,
                                      const Use& use) {
  const int64_t threads = part.threads_per_row(), inside = part.feature % kMaskBlock;
  for (int64_t row = thread.y; row < part.rows; row += thread.num_y) {
    for (int64_t x = thread.x; x < threads; x += thread.num_x) {
      const int64_t block = x / kMaskLanes, lane = x % kMaskLanes;
      const Philox bits = draw_lane(part.stream, part.token + static_cast<uint32_t>(row),
                                    static_cast<uint32_t>(part.feature / kMaskBlock + block),
                                    static_cast<uint32_t>(lane));
      PARALLEL_EXT_UNROLL
      for (int s = 0; s < kMaskHalves; ++s) {
        const int64_t column = block * kMaskBlock + s * kMaskLanes + lane - inside;
        if (0 <= column && column < part.size) {
          use(row * part.size + column, is_kept(part.stream, bits.word[s / 2], s % 2));
        }
      }
    }
  }
}

// The work of one thread of the kernels in linear/dropout_cuda.h.

template <typename scalar_t>
PARALLEL_EXT_INLINE void drop_in_thread(const MaskPart& part, const GridThread& thread,
                                        const scalar_t* __restrict__ input,
                                        scalar_t* __restrict__ output) {
  for_elements(part, thread, [&](int64_t i, bool kept) {
    const scalar_t value = input[i];
    output[i] = kept ? value : scalar_t(0);
  });
}

template <typename scalar_t>
PARALLEL_EXT_INLINE void drop_and_add_in_thread(const MaskPart& part, const GridThread& thread,
                                                const scalar_t* __restrict__ input,
                                                scalar_t* __restrict__ output,
                                                const scalar_t* __restrict__ addend, double factor,
                                                scalar_t* __restrict__ target) {
  using wide_t = wide_of<scalar_t>;
  const auto wide_factor = static_cast<wide_t>(factor);
  for_elements(part, thread, [&](int64_t i, bool kept) {
    const scalar_t value = input[i];
    output[i] = kept ? value : scalar_t(0);
    if (kept) store(widen(target[i]) + wide_factor * widen(addend[i]), target + i);
  });
}

}  // namespace parallel_ext
