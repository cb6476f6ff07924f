// Products of matrices, a part at a time, added up in their own dtype or in a wider one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace parallel_ext {

struct Range {
  int64_t start, size;
};

// As few ranges of at most `largest` as will do, of about one size.
std::vector<Range> ranges_of(int64_t total, int64_t largest);

// sum += a b, or = where it is the first. A product narrower than its sum is rounded once before it
// is added.
void add_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool first);

// sum += a^T b, likewise.
void add_transposed_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool first);

}  // namespace parallel_ext
