// The one rule by which everything is split into parts. Plain integers, no torch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace parallel_ext {

// Boundaries b[0] = 0 <= ... <= b[parts] = n: part r is [b[r], b[r + 1]). The parts are contiguous,
// in order and balanced over ceil(n / multiple_of) units, of which only the last may be short; the
// first parts hold one unit more, and a part is empty only when there are fewer units than parts.
// Throws std::invalid_argument for n < 0, parts < 1 or multiple_of < 1.
std::vector<int64_t> split(int64_t n, int64_t parts, int64_t multiple_of);

// Throws std::overflow_error where the sum does not fit; arguments are refused by name before that
// (check.h).
template <typename Numbers>
int64_t sum_of(const Numbers& numbers) {
  int64_t sum = 0;
  for (const int64_t number : numbers) {
    if (__builtin_add_overflow(sum, number, &sum)) {
      throw std::overflow_error("a sum of numbers does not fit into 64 bits");
    }
  }
  return sum;
}

// Where the parts of these sizes start that follow each other, and where the last one stops.
// Arguments are refused before as for sum_of.
template <typename Sizes>
std::vector<int64_t> starts_of(const Sizes& sizes) {
  std::vector<int64_t> starts{0};
  for (const int64_t size : sizes) starts.push_back(starts.back() + size);
  return starts;
}

}  // namespace parallel_ext
