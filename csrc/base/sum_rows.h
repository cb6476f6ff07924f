// Sums of rows in a fixed order, on the CPU: the same bits for any number of threads and on every
// rank.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <vector>

namespace parallel_ext {

// out[i] = the sum of rows[k][i] over k < count, in fp32 or wider and in the order of k, cast once.
// The rows may lie anywhere.
void sum_rows(const float* const* rows, int64_t count, int64_t size, float* out);
void sum_rows(const double* const* rows, int64_t count, int64_t size, double* out);
void sum_rows(const c10::BFloat16* const* rows, int64_t count, int64_t size, c10::BFloat16* out);
void sum_rows(const c10::Half* const* rows, int64_t count, int64_t size, c10::Half* out);

// Whether sum_in_rank_order knows the dtype.
bool can_sum_in_rank_order(c10::ScalarType dtype);

// Sums one tensor of each rank, also of integers: out[i] = parts[0][i] + parts[1][i] + ... for i in
// [begin, end). `out` may be one of them. No torch operator, so that it may run on shared memory.
void sum_in_rank_order(c10::ScalarType dtype, const std::vector<const void*>& parts, int64_t begin,
                       int64_t end, void* out);

}  // namespace parallel_ext
