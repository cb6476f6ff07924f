// Products of matrices, computed in parts and added in their own dtype or in a wider one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace parallel_ext {

struct Range {
  int64_t start, size;
};

// The fewest ranges of at most `largest` that cover `total`, of nearly equal size.
std::vector<Range> ranges_of(int64_t total, int64_t largest);

// sum += a b, or sum = a b if `first`. A product of a narrower dtype than the sum is rounded once
// before it is added.
void add_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool first);

// sum += a^T b, or sum = a^T b if `first`, with the same rounding.
void add_transposed_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool first);

}  // namespace parallel_ext
