// What the linear layers with a low-rank adapter share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

namespace parallel_ext {

// The factors enter the products in the dtype of the base, in which the result is rounded anyway;
// but fp16 has no room for small gradients and large sums, so there the adapter works in fp32.
inline c10::ScalarType dtype_of_adapter(const at::Tensor& input) {
  return input.scalar_type() == at::kHalf ? at::kFloat : input.scalar_type();
}

// sum += scale * a b
inline void add_scaled_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b,
                               double scale) {
  if (sum.scalar_type() == a.scalar_type()) {
    sum.addmm_(a, b, 1, scale);
  } else {
    sum.add_(at::mm(a, b), scale);
  }
}

}  // namespace parallel_ext
