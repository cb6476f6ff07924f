#include "base/layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace parallel_ext {

std::vector<int64_t> split(int64_t n, int64_t parts, int64_t multiple_of) {
  if (n < 0 || parts < 1 || multiple_of < 1) {
    throw std::invalid_argument(
        "split: expected n >= 0, parts >= 1 and multiple_of >= 1, got n=" + std::to_string(n) +
        ", parts=" + std::to_string(parts) + ", multiple_of=" + std::to_string(multiple_of));
  }
  const int64_t units = n / multiple_of + (n % multiple_of != 0);
  const int64_t per_part = units / parts, with_one_more = units % parts;
  std::vector<int64_t> boundaries(parts + 1);
  for (int64_t part = 0; part <= parts; ++part) {
    const int64_t unit = part * per_part + std::min(part, with_one_more);
    boundaries[part] = unit == units ? n : unit * multiple_of;
  }
  return boundaries;
}

}  // namespace parallel_ext
