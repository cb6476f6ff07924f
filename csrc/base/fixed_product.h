// A product of matrices whose bits depend neither on the number of threads nor on where in memory
// the matrices lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace parallel_ext {

// Rows and columns of a product, below which BLAS takes other kernels.
constexpr int64_t kLeastOfProduct = 16;

// out = a b, or out += a b if `add`; one dtype. Every thread computes rows of its own: BLAS alone
// would split what is summed over, where a product is small.
void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add = false);

// out = a b, where `out` consists along `dim`, 0 or 1, of blocks of `sizes`: with the bits of one
// product a block. It is one product of all, once the first of its shape has shown that this has
// the same bits.
void fixed_product_of_blocks(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
                             const std::vector<int64_t>& sizes, int64_t dim);

}  // namespace parallel_ext
