// Rows of any dtype as bytes, in which they travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace parallel_ext {

// A view where `tensor` is contiguous, which one of a single number is with any stride.
inline at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.contiguous().as_strided({tensor.numel()}, {1}).view(at::kByte);
}

inline int64_t row_bytes(const at::Tensor& rows) { return rows.size(1) * rows.element_size(); }

}  // namespace parallel_ext
