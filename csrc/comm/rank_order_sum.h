// The sum of the same tensor of several ranks, in one order on every rank.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace parallel_ext {

bool can_sum_in_rank_order(c10::ScalarType dtype);

// out[i] = parts[0][i] + parts[1][i] + ... for i in [begin, end), in this order, 16-bit types in
// fp32 and rounded once. No torch operator, so that it may run on shared memory.
void sum_in_rank_order(c10::ScalarType dtype, const std::vector<const void*>& parts, int64_t begin,
                       int64_t end, void* out);

}  // namespace parallel_ext
