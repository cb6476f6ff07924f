// The grids that the CUDA kernels run in. Only .cu files include this.
#pragma once

#include <algorithm>

#include "base/grid_thread.h"

namespace parallel_ext {

inline constexpr int kBlockThreads = 256;

__device__ __forceinline__ GridThread this_thread() {
  return {int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
          int64_t{blockIdx.y} * blockDim.y + threadIdx.y, int64_t{gridDim.x} * blockDim.x,
          int64_t{gridDim.y} * blockDim.y};
}

struct GridShape {
  dim3 blocks, threads;
};

// Threads for a row that has work for `per_row` of them.
inline int64_t row_threads(int64_t per_row) {
  int64_t wide = 16;
  while (wide < per_row && wide < kBlockThreads) wide *= 2;
  return wide;
}

// For rows that `per_row` threads serve; where rows are short, a block serves several.
inline GridShape grid_of_rows(int64_t rows, int64_t per_row) {
  const int64_t wide = row_threads(per_row), high = kBlockThreads / wide;
  const auto blocks = [](int64_t threads, int64_t of_block) {
    const int64_t most = 0xffff;  // what CUDA allows for the y dimension
    return static_cast<unsigned>(std::min(most, (threads + of_block - 1) / of_block));
  };
  return {dim3(blocks(per_row, wide), blocks(rows, high)),
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high))};
}

// A block for each piece of work, in turns where they are more than CUDA allows.
inline GridShape grid_of_blocks(int64_t pieces) {
  return {dim3(static_cast<unsigned>(std::min<int64_t>(pieces, 0x7fffffff))), dim3(kBlockThreads)};
}

// A block for each row, which its threads share; where rows are short, for as many as threadIdx.y.
inline GridShape grid_of_whole_rows(int64_t rows, int64_t per_row) {
  const int64_t wide = row_threads(per_row), high = kBlockThreads / wide;
  return {grid_of_blocks((rows + high - 1) / high).blocks,
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high))};
}

}  // namespace parallel_ext
