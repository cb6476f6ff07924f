// What the CUDA kernels share: grids, launches, and rows of numbers in the widest pieces that a
// thread can load. Only .cu files include this.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/grid_thread.h"
#include "base/number.h"

namespace parallel_ext {

inline constexpr int kBlockThreads = 256;
// So many blocks are to fit on a multiprocessor at least, for __launch_bounds__. Left free, CUDA's
// assembler makes room for more: it keeps fewer values in registers, and the others in memory.
inline constexpr int kLeastBlocks = 3;

__device__ __forceinline__ GridThread this_thread() {
  return {int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
          int64_t{blockIdx.y} * blockDim.y + threadIdx.y, int64_t{gridDim.x} * blockDim.x,
          int64_t{gridDim.y} * blockDim.y};
}

inline constexpr unsigned kAllLanes = 0xffffffffu;  // of a warp, for shuffles

struct GridShape {
  dim3 blocks, threads;
};

// The number of threads in a block that serve one row, which has work for `per_row` threads.
inline int64_t row_threads(int64_t per_row) {
  int64_t wide = 16;
  while (wide < per_row && wide < kBlockThreads) wide *= 2;
  return wide;
}

// A grid for rows with work for `per_row` threads each; a block serves several short rows.
inline GridShape grid_of_rows(int64_t rows, int64_t per_row) {
  const int64_t wide = row_threads(per_row), high = kBlockThreads / wide;
  const auto blocks = [](int64_t threads, int64_t of_block) {
    const int64_t most = 0xffff;  // what CUDA allows for the y dimension
    return static_cast<unsigned>(std::min(most, (threads + of_block - 1) / of_block));
  };
  return {dim3(blocks(per_row, wide), blocks(rows, high)),
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high))};
}

// A block for each piece of work; a block serves several where CUDA allows fewer blocks.
inline GridShape grid_of_blocks(int64_t pieces) {
  return {dim3(static_cast<unsigned>(std::min<int64_t>(pieces, 0x7fffffff))), dim3(kBlockThreads)};
}

// A block for each row, whose threads share its work; for several short rows, one per threadIdx.y.
inline GridShape grid_of_whole_rows(int64_t rows, int64_t per_row) {
  const int64_t wide = row_threads(per_row), high = kBlockThreads / wide;
  return {grid_of_blocks((rows + high - 1) / high).blocks,
          dim3(static_cast<unsigned>(wide), static_cast<unsigned>(high))};
}

inline constexpr int64_t kWidest = 16;  // bytes that a thread can load or store at once

// Adjacent numbers of a row that a thread loads and stores at once.
template <typename scalar_t, int size>
struct alignas(size * sizeof(scalar_t)) Pack {
  scalar_t value[size];
};

// Calls use(row, column) for the work of this thread.
template <typename Use>
__device__ __forceinline__ void for_work(int64_t rows, int64_t columns, const Use& use) {
  const GridThread thread = this_thread();
  for (int64_t row = thread.y; row < rows; row += thread.num_y) {
    for (int64_t column = thread.x; column < columns; column += thread.num_x) use(row, column);
  }
}

// Calls use(row) in a grid of whole rows. All threads of a block call it equally often, as
// __syncthreads needs; a row may be `rows` or more.
template <typename Use>
__device__ __forceinline__ void for_whole_rows(int64_t rows, const Use& use) {
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < rows; first += step) {
    use(first + threadIdx.y);
  }
}

template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), const GridShape& grid, int device, Args... args) {
  const c10::cuda::CUDAGuard on_device(static_cast<c10::DeviceIndex>(device));
  kernel<<<grid.blocks, grid.threads, 0, c10::cuda::getCurrentCUDAStream()>>>(args...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

inline uint64_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// The widest pieces, in bytes, that rows consist of: `bits` are their addresses and length, or-ed.
inline int64_t widest_piece(uint64_t bits) {
  int64_t bytes = kWidest;
  while (bits % bytes != 0) bytes /= 2;
  return bytes;
}

// Calls use(size) with the size of the packs that rows of numbers consist of: the widest, or one.
template <typename scalar_t, typename Use>
void with_size(uint64_t bits, const Use& use) {
  if (widest_piece(bits) == kWidest) {
    use(std::integral_constant<int, kWidest / sizeof(scalar_t)>());
  } else {
    use(std::integral_constant<int, 1>());
  }
}

// Calls use(piece) with a value of the widest type that rows consist of: an unsigned integer or a
// pack of them.
template <typename Use>
void with_piece(uint64_t bits, const Use& use) {
  switch (widest_piece(bits)) {
    case 16:
      return use(Pack<uint64_t, 2>());
    case 8:
      return use(uint64_t());
    case 4:
      return use(uint32_t());
    case 2:
      return use(uint16_t());
    default:
      return use(uint8_t());
  }
}

template <int size, typename scalar_t>
PARALLEL_EXT_INLINE const Pack<scalar_t, size>* packs(const scalar_t* data) {
  return reinterpret_cast<const Pack<scalar_t, size>*>(data);
}
template <int size, typename scalar_t>
PARALLEL_EXT_INLINE Pack<scalar_t, size>* packs(scalar_t* data) {
  return reinterpret_cast<Pack<scalar_t, size>*>(data);
}

// Rounds the numbers of a pack and stores them at once.
template <typename scalar_t, int size>
__device__ __forceinline__ void store_pack(const wide_of<scalar_t> (&numbers)[size],
                                           Pack<scalar_t, size>* out) {
  Pack<scalar_t, size> pack;
  PARALLEL_EXT_UNROLL
  for (int j = 0; j < size; ++j) store(numbers[j], pack.value + j);
  *out = pack;
}

}  // namespace parallel_ext
