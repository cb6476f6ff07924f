// A store as wide as a thread of CUDA can make it, for CPU and CUDA.
#pragma once

#include <cstddef>
#include <cstring>

#include "base/number.h"

namespace parallel_ext {

// Copies numbers of a thread to memory, 16 bytes at a time, where `to` is a multiple of 16 bytes.
// Assigned as another type, nvcc would store the numbers one by one.
template <size_t bytes>
PARALLEL_EXT_INLINE void store_wide(const void* from, void* to) {
  static_assert(bytes % 16 == 0);
#ifdef __CUDA_ARCH__
  uint4 words[bytes / sizeof(uint4)];
  std::memcpy(words, from, bytes);
  PARALLEL_EXT_UNROLL
  for (size_t i = 0; i < bytes / sizeof(uint4); ++i) __stwb(static_cast<uint4*>(to) + i, words[i]);
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace parallel_ext
