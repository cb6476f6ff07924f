#include "base/sum_rows.h"

#include <algorithm>

#include "base/kernel_choice.h"
#include "base/number.h"

namespace parallel_ext {

// One function per dtype, since target_clones does not go with templates.
#define PARALLEL_EXT_SUM_ROWS(scalar_t, wide_t)                                       \
  PARALLEL_EXT_MULTIVERSION void sum_rows(const scalar_t* const* rows, int64_t count, \
                                          int64_t size, scalar_t* out) {              \
    constexpr int64_t kBlock = 256;                                                   \
    wide_t total[kBlock];                                                             \
    for (int64_t start = 0; start < size; start += kBlock) {                          \
      const int64_t width = std::min(kBlock, size - start);                           \
      for (int64_t i = 0; i < width; ++i) total[i] = 0;                               \
      for (int64_t row = 0; row < count; ++row) {                                     \
        for (int64_t i = 0; i < width; ++i) total[i] += widen(rows[row][start + i]);  \
      }                                                                               \
      for (int64_t i = 0; i < width; ++i) store(total[i], out + start + i);           \
    }                                                                                 \
  }

PARALLEL_EXT_SUM_ROWS(float, float)
PARALLEL_EXT_SUM_ROWS(c10::BFloat16, float)
PARALLEL_EXT_SUM_ROWS(c10::Half, float)
PARALLEL_EXT_SUM_ROWS(double, double)

}  // namespace parallel_ext
