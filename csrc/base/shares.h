// How many of something each rank of a group has.
#pragma once

#include <cstdint>

#include "check.h"

namespace parallel_ext {

// The sum of `sizes`, one for each rank of the group, of which `rank` is this one.
inline int64_t check_sizes(const char* op, at::IntArrayRef sizes, int64_t rank,
                           int64_t group_size) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == group_size, op, ": ", sizes.size(),
                    " sizes were given for a group of ", group_size, " ranks");
  TORCH_CHECK_VALUE(0 <= rank && rank < group_size, op, ": rank ", rank, " is not in [0, ",
                    group_size, ")");
  return sum_of_counts(op, "sizes", sizes);
}

}  // namespace parallel_ext
