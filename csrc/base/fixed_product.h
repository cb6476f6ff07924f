// A product of matrices with the same bits for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

namespace parallel_ext {

// out = a b, or out += a b if `add`; one dtype. Every thread computes rows of its own: BLAS alone
// would split what is summed over, where a product is small.
void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add = false);

}  // namespace parallel_ext
