// The sum of rows that lie anywhere, on the CPU.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace parallel_ext {

// out[i] = the sum of rows[k][i] over k < count, in fp32 or wider and in their order, cast once.
void sum_rows(const float* const* rows, int64_t count, int64_t size, float* out);
void sum_rows(const double* const* rows, int64_t count, int64_t size, double* out);
void sum_rows(const c10::BFloat16* const* rows, int64_t count, int64_t size, c10::BFloat16* out);
void sum_rows(const c10::Half* const* rows, int64_t count, int64_t size, c10::Half* out);

}  // namespace parallel_ext
