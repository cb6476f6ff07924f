// The one rule by which anything is cut into parts. Plain integers, no torch.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace parallel_ext {

// Boundaries b[0] = 0 <= ... <= b[parts] = n: part r is [b[r], b[r + 1]). The parts are contiguous,
// in order and balanced over ceil(n / multiple_of) units, of which only the last may be short; the
// first parts hold one unit more, and a part is empty only when there are fewer units than parts.
// Throws std::invalid_argument for n < 0, parts < 1 or multiple_of < 1.
std::vector<int64_t> split(int64_t n, int64_t parts, int64_t multiple_of);

template <typename Numbers>
int64_t sum_of(const Numbers& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

}  // namespace parallel_ext
