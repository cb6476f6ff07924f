// A product of matrices whose bits depend neither on the number of threads nor on where in memory
// the matrices lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace parallel_ext {

// Rows and columns of a product, below which BLAS takes other kernels.
constexpr int64_t kLeastOfProduct = 16;

// out = a b, or out += a b if `add`; one dtype.
struct Product {
  at::Tensor out, a, b;
  bool add = false;
};

// It is computed in pieces, each by one call of BLAS in one thread: BLAS takes its kernels by the
// sizes and by the number of threads.
void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add = false);

// Products of which none reads what another writes, side by side.
void fixed_products(const std::vector<Product>& products);

// fixed_products of sizes that hardly come again, so that nothing is found out about them.
void products_of_any_size(const std::vector<Product>& products);

// out = a b, where `out` consists along `dim`, 0 or 1, of blocks of `sizes`: with the bits of one
// product a block. It is one product of all, once the first of its shape has shown that this has
// the same bits.
void fixed_product_of_blocks(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
                             const std::vector<int64_t>& sizes, int64_t dim);

// Lets MKL take its kernels as if there were one thread, for what torch computes between two
// layers: in a parallel region, as that of attention, it uses one but chooses by how many there may
// be.
void choose_blas_for_one_thread(bool on);

}  // namespace parallel_ext
