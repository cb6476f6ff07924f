// Loops over memory that is larger than the caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/number.h"

namespace parallel_ext {

// Numbers between two prefetches, and how many numbers ahead of its use memory is prefetched. The
// processor's own prefetcher starts too late and stops at the end of each page.
inline constexpr int64_t kPrefetchChunk = 256, kPrefetchAhead = 1024;

template <typename scalar_t>
PARALLEL_EXT_INLINE void prefetch(const scalar_t* numbers, int64_t size) {
  constexpr int64_t kLine = 64 / sizeof(scalar_t);
  for (int64_t i = 0; i < size; i += kLine) __builtin_prefetch(numbers + kPrefetchAhead + i);
}

// Calls function(i) for each i below `size`; the function reads numbers[i].
template <typename scalar_t, typename Function>
PARALLEL_EXT_INLINE void for_each_ahead(const scalar_t* numbers, int64_t size,
                                        const Function& function) {
  for (int64_t start = 0; start < size; start += kPrefetchChunk) {
    const int64_t stop = std::min(start + kPrefetchChunk, size);
    prefetch(numbers + start, stop - start);
    for (int64_t i = start; i < stop; ++i) function(i);
  }
}

}  // namespace parallel_ext
