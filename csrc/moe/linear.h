// What the linear layers of experts share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "check.h"

namespace parallel_ext {

inline void check_moe_linear(const char* op, const at::Tensor& rows, const at::Tensor& weight,
                             int64_t num_counts) {
  check_floating(op, "rows", rows);
  check_same_dtype(op, "weight", weight, "rows", rows);
  check_dim(op, "rows", rows, 2);
  check_dim(op, "weight", weight, 3);
  TORCH_CHECK_VALUE(rows.size(1) == weight.size(2), op, ": rows of shape ", rows.sizes(),
                    " do not fit weights of shape ", weight.sizes(),
                    "; their last dimensions must be equal");
  TORCH_CHECK_VALUE(num_counts == weight.size(0), op, ": ", num_counts,
                    " counts are not one for each of the ", weight.size(0), " experts");
}

// The counts of rows add up to them.
inline void check_counts(const char* op, const at::Tensor& rows, at::IntArrayRef counts) {
  const int64_t total = sum_of_counts(op, "counts", counts);
  TORCH_CHECK_VALUE(total == rows.size(0), op, ": the counts ", counts, " add up to ", total,
                    ", but there are ", rows.size(0), " rows");
}

inline void check_moe_linear(const char* op, const at::Tensor& rows, const at::Tensor& weight,
                             at::IntArrayRef counts) {
  check_moe_linear(op, rows, weight, static_cast<int64_t>(counts.size()));
  check_counts(op, rows, counts);
}

// Calls use(expert, first row, number of rows) for every expert, also for those without rows. The
// products write every element of their slice of the output; one without inner size writes zeros.
template <typename Use>
void for_experts(at::IntArrayRef counts, const Use& use) {
  int64_t first = 0;
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    use(static_cast<int64_t>(expert), first, counts[expert]);
    first += counts[expert];
  }
}

// out = scale * a b; does not read `out`.
inline void scaled_product_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                               double scale) {
  if (scale == 1) {
    at::mm_out(out, a, b);
  } else {  // beta = 0: the uninitialised memory, which may hold NaN, is not read
    at::addmm_out(out, out, a, b, /*beta=*/0, /*alpha=*/scale);
  }
}

}  // namespace parallel_ext
