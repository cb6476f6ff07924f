#include "base/sum_rows.h"

#include <algorithm>

#include "base/kernel_choice.h"
#include "base/number.h"

namespace parallel_ext {

// One function per dtype: target_clones does not work with templates. A block of the sum stays in
// the cache.
#define PARALLEL_EXT_SUM_ROWS(scalar_t, wide_t)                                       \
  PARALLEL_EXT_MULTIVERSION void sum_rows(const scalar_t* const* rows, int64_t count, \
                                          int64_t size, scalar_t* out) {              \
    constexpr int64_t kBlock = 512;                                                   \
    wide_t total[kBlock]{};                                                           \
    for (int64_t start = 0; start < size; start += kBlock) {                          \
      const int64_t width = std::min(kBlock, size - start);                           \
      if (count > 0) {                                                                \
        for (int64_t i = 0; i < width; ++i) total[i] = widen(rows[0][start + i]);     \
      }                                                                               \
      for (int64_t row = 1; row < count; ++row) {                                     \
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

using parallel_ext::sum_rows;  // beside this one, of integers

template <typename integer_t>
void sum_rows(const integer_t* const* rows, int64_t count, int64_t size, integer_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    integer_t total = rows[0][i];
    for (int64_t row = 1; row < count; ++row) total += rows[row][i];
    out[i] = total;
  }
}

template <typename scalar_t>
void sum_as(const std::vector<const void*>& parts, int64_t begin, int64_t end, void* out) {
  std::vector<const scalar_t*> rows;
  for (const void* part : parts) rows.push_back(static_cast<const scalar_t*>(part) + begin);
  sum_rows(rows.data(), static_cast<int64_t>(rows.size()), end - begin,
           static_cast<scalar_t*>(out) + begin);
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
