// What the linear layers share, with and without a low-rank adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/empty.h"
#include "check.h"

namespace parallel_ext {

// [..., K] -> [T, K]; a vector is one row. Works for sizes of zero, where reshape(-1, K) does not.
inline at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.flatten(0, -2);
}

// [..., K] -> [..., last].
inline std::vector<int64_t> with_last(at::IntArrayRef shape, int64_t last) {
  std::vector<int64_t> changed = shape.vec();
  changed.back() = last;
  return changed;
}

// Writes zeros between the rows of a matrix that we have allocated, where its row stride is larger
// than its row length. On CPUs with AMX, oneDNN's bf16 GEMMs multiply the memory between the rows
// by zero, and a NaN there stays NaN (github.com/uxlfoundation/oneDNN/issues/5717).
inline void fill_gaps(const at::Tensor& matrix) {
  if (matrix.numel() == 0) return;   // its storage may be empty whatever its strides are
  constexpr int64_t kFurthest = 64;  // elements; the GEMMs round the length up to 32
  const int64_t gap = std::min(matrix.stride(0) - matrix.size(1), kFurthest);
  if (!matrix.is_cpu() || matrix.element_size() > 2 || gap <= 0 || matrix.size(0) < 2) return;
  matrix
      .as_strided({matrix.size(0) - 1, gap}, matrix.strides(),
                  matrix.storage_offset() + matrix.size(1))
      .zero_();
}

// Of ops whose output has all features of the weight [F, K].
inline at::Tensor row_linear_meta(const at::Tensor& input, const at::Tensor& weight) {
  return empty_with(input, -1, weight.sym_size(0));
}

// `name` is what errors call the weight.
inline void check_linear(const char* op, const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, const char* name = "weight") {
  check_floating(op, "input", input);
  check_same_dtype(op, name, weight, "input", input);
  check_dim(op, name, weight, 2);
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.size(-1) == weight.size(1), op, ": input of shape ",
                    input.sizes(), " does not fit the local ", name, " of shape ", weight.sizes(),
                    "; the last dimension must be ", weight.size(1));
  if (bias) {
    check_same_dtype(op, "bias", *bias, name, weight);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == weight.size(0), op, ": bias of shape ",
                      bias->sizes(), " does not fit the local ", name, " of shape ",
                      weight.sizes());
  }
}

// The check of a backward, which has the input and the weight of its forward.
inline void check_grad_output(const char* op, const at::Tensor& grad_output,
                              const at::Tensor& input, const at::Tensor& weight) {
  check_linear(op, input, weight, {});
  check_same_dtype(op, "grad_output", grad_output, "input", input);
  check_shape(op, "grad_output", grad_output, with_last(input.sizes(), weight.size(0)));
}

// An adapter works in the dtype of the base layer, to which the result is rounded anyway; but in
// fp32 for fp16, which cannot hold small gradients and large sums.
inline c10::ScalarType dtype_of_adapter(const at::Tensor& input) {
  return input.scalar_type() == at::kHalf ? at::kFloat : input.scalar_type();
}

// out = a b + scale * c d + bias; does not read `out`. The small product comes first, to which a
// GEMM adds the large one in its accumulators: so large numbers are rounded once, and pass through
// memory once.
inline void sum_of_products_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                                const at::Tensor& c, const at::Tensor& d, double scale,
                                const std::optional<at::Tensor>& bias = {}) {
  const at::Tensor& start = bias ? *bias : out;  // beta = 0: uninitialised memory is not read
  const double beta = bias ? 1 : 0;
  if (a.scalar_type() == c.scalar_type()) {
    at::addmm_out(out, start, c, d, beta, scale);
    out.addmm_(a, b);
  } else {  // fp16, whose adapter is in fp32
    at::addmm_out(out, start, a, b, beta);
    out.add_(at::mm(c, d), scale);
  }
}

}  // namespace parallel_ext
