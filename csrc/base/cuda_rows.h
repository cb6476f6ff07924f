// What the CUDA kernels over rows of numbers have in common. Only .cu files include this.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <type_traits>

#include "base/cuda_grid.h"
#include "base/number.h"

namespace parallel_ext {

inline constexpr int64_t kWidest = 16;  // bytes that a thread can load or store at once

// Neighbours in a row that a thread loads and stores at once.
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

template <typename... Parameters, typename... Args>
void launch(void (*kernel)(Parameters...), const GridShape& grid, int device, Args... args) {
  const c10::cuda::CUDAGuard on_device(static_cast<c10::DeviceIndex>(device));
  kernel<<<grid.blocks, grid.threads, 0, c10::cuda::getCurrentCUDAStream()>>>(args...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

inline uint64_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// The most bytes that rows can be cut into: `bits` are their addresses and their length, or-ed.
inline int64_t widest_piece(uint64_t bits) {
  int64_t bytes = kWidest;
  while (bits % bytes != 0) bytes /= 2;
  return bytes;
}

// Calls use(size), the size of packs that rows of numbers can be cut into: the widest, or one.
template <typename scalar_t, typename Use>
void with_size(uint64_t bits, const Use& use) {
  if (widest_piece(bits) == kWidest) {
    use(std::integral_constant<int, kWidest / sizeof(scalar_t)>());
  } else {
    use(std::integral_constant<int, 1>());
  }
}

// Calls use(piece), an unsigned integer or a pack of them: the widest that rows can be cut into.
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

}  // namespace parallel_ext
