#include "base/sum_rows.h"

#include <algorithm>

#include "base/kernel_choice.h"
#include "base/number.h"

namespace parallel_ext {

// One function per dtype: target_clones does not work with templates.
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

namespace {

// acc = parts[0] + parts[1] + ... in this order, a block at a time so that acc stays in the cache.
template <typename scalar_t>
PARALLEL_EXT_INLINE void add_up(const scalar_t* const* parts, int64_t size, int64_t begin,
                                int64_t end, scalar_t* out) {
  constexpr int64_t kBlock = 1024;
  float acc[kBlock];
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t count = std::min(kBlock, end - start);
    for (int64_t i = 0; i < count; ++i) acc[i] = to_float(parts[0][start + i]);
    for (int64_t rank = 1; rank < size; ++rank) {
      const scalar_t* part = parts[rank] + start;
      for (int64_t i = 0; i < count; ++i) acc[i] += to_float(part[i]);
    }
    for (int64_t i = 0; i < count; ++i) store(acc[i], out + start + i);
  }
}

#define PARALLEL_EXT_SUM(scalar_t)                                                              \
  PARALLEL_EXT_MULTIVERSION void sum(const scalar_t* const* parts, int64_t size, int64_t begin, \
                                     int64_t end, scalar_t* out) {                              \
    add_up(parts, size, begin, end, out);                                                       \
  }

PARALLEL_EXT_SUM(float)
PARALLEL_EXT_SUM(c10::BFloat16)
PARALLEL_EXT_SUM(c10::Half)

template <typename scalar_t>  // of fp64 and integers, which need no wider type
void sum(const scalar_t* const* parts, int64_t size, int64_t begin, int64_t end, scalar_t* out) {
  for (int64_t i = begin; i < end; ++i) {
    scalar_t acc = parts[0][i];
    for (int64_t rank = 1; rank < size; ++rank) acc += parts[rank][i];
    out[i] = acc;
  }
}

template <typename scalar_t>
void sum_as(const std::vector<const void*>& parts, int64_t begin, int64_t end, void* out) {
  std::vector<const scalar_t*> typed;
  for (const void* part : parts) typed.push_back(static_cast<const scalar_t*>(part));
  sum(typed.data(), static_cast<int64_t>(parts.size()), begin, end, static_cast<scalar_t*>(out));
}

}  // namespace

bool can_sum_in_rank_order(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 ||
         dtype == c10::kHalf || dtype == c10::kInt || dtype == c10::kByte;
}

void sum_in_rank_order(c10::ScalarType dtype, const std::vector<const void*>& parts, int64_t begin,
                       int64_t end, void* out) {
  if (dtype == c10::kFloat) sum_as<float>(parts, begin, end, out);
  if (dtype == c10::kDouble) sum_as<double>(parts, begin, end, out);
  if (dtype == c10::kBFloat16) sum_as<c10::BFloat16>(parts, begin, end, out);
  if (dtype == c10::kHalf) sum_as<c10::Half>(parts, begin, end, out);
  if (dtype == c10::kInt) sum_as<int32_t>(parts, begin, end, out);
  if (dtype == c10::kByte) sum_as<uint8_t>(parts, begin, end, out);
}

}  // namespace parallel_ext
