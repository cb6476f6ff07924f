// A product of matrices whose bits depend neither on the number of threads nor on where in memory
// the matrices lie.
#pragma once

#include <ATen/core/Tensor.h>

namespace parallel_ext {

// Rows and columns of a product, below which BLAS takes other kernels.
constexpr int64_t kLeastOfProduct = 16;

// out = a b, or out += a b if `add`; one dtype. Every thread computes rows of its own: BLAS alone
// would split what is summed over, where a product is small.
void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add = false);

}  // namespace parallel_ext
