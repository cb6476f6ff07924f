// Outputs of a known shape whose numbers are still to be written, for kernels and for their Meta
// forms. The latter get what the kernel would refuse: they may read no dimension without a check.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <utility>
#include <vector>

namespace parallel_ext {

// An uninitialised tensor of that shape where it is needed, else one without elements.
inline at::Tensor empty_if(bool needed, c10::SymIntArrayRef shape,
                           const at::TensorOptions& options) {
  return needed ? at::empty_symint(shape, options) : at::empty({0}, options);
}
inline at::Tensor empty_like_if(bool needed, const at::Tensor& like) {
  return empty_if(needed, like.sym_sizes(), like.options());
}

// The shape of `like` with another size of one dimension, counted from the last one, -1.
inline std::vector<c10::SymInt> shape_with(const at::Tensor& like, int64_t dim, c10::SymInt size) {
  TORCH_CHECK_VALUE(like.dim() >= -dim, "a tensor of ", -dim,
                    " dimensions or more is needed, got one of ", like.dim());
  auto shape = like.sym_sizes().vec();
  shape[shape.size() + dim] = std::move(size);
  return shape;
}
inline at::Tensor empty_with(const at::Tensor& like, int64_t dim, c10::SymInt size) {
  return at::empty_symint(shape_with(like, dim, std::move(size)), like.options());
}

// Of an op whose output is contiguous whatever its first input is.
inline at::Tensor same_shape_meta(const at::Tensor& input) {
  return at::empty_like(input, at::MemoryFormat::Contiguous);
}

}  // namespace parallel_ext
