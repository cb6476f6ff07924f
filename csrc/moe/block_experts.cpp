// The linear layers of experts with bits that do not depend on how many ranks hold them: one
// product for the rows of each expert and leaf (base/fixed_product.h).
#include <ATen/ops/empty.h>

#include "base/empty.h"
#include "base/fixed_product.h"
#include "base/workspace.h"
#include "check.h"
#include "gradient.h"
#include "moe/linear.h"
#include "moe/ops.h"

namespace parallel_ext {
namespace {

void check_block_experts(const char* op, const at::Tensor& rows, const at::Tensor& weight,
                         at::IntArrayRef counts) {
  check_dim(op, "weight", weight, 4);
  TORCH_CHECK_VALUE(weight.size(0) > 0, op, ": there are no leaves in weight of shape ",
                    weight.sizes());
  check_moe_linear(op, rows, weight.select(0, 0), weight.size(1));
  TORCH_CHECK_VALUE(static_cast<int64_t>(counts.size()) == weight.size(0) * weight.size(1), op,
                    ": ", counts.size(), " counts are not one for each of ", weight.size(1),
                    " experts and ", weight.size(0), " leaves");
  check_counts(op, rows, counts);
}

// Calls add(of_weight, of_rows, products) for every expert and leaf, to add the products that it
// needs: the first two take its part of a tensor. Then computes all of them.
template <typename Add>
void compute_for_all(const at::Tensor& weight, at::IntArrayRef counts, const Add& add) {
  std::vector<Product> products;
  for_experts(counts, [&](int64_t number, int64_t first, int64_t count) {
    const int64_t leaf = number % weight.size(0), expert = number / weight.size(0);
    const auto of_weight = [&](const at::Tensor& each) { return each.select(0, leaf)[expert]; };
    const auto of_rows = [&](const at::Tensor& each) { return each.narrow(0, first, count); };
    add(of_weight, of_rows, products);
  });
  products_of_any_size(products);
}

at::Tensor block_experts_kernel(const at::Tensor& rows, const at::Tensor& weight,
                                at::IntArrayRef counts) {
  check_block_experts("block_experts", rows, weight, counts);
  const at::Tensor output = pooled_empty({rows.size(0), weight.size(2)}, rows.options());
  compute_for_all(weight, counts, [&](auto of_weight, auto of_rows, auto& products) {
    products.push_back({of_rows(output), of_rows(rows), of_weight(weight).t()});
  });
  choose_blas_for_one_thread(true);  // attention may follow
  return output;
}

Tensors<2> block_experts_backward_kernel(const at::Tensor& grad_output, const at::Tensor& rows,
                                         const at::Tensor& weight, at::IntArrayRef counts,
                                         std::array<bool, 2> needed) {
  const char* op = "block_experts_backward";
  choose_blas_for_one_thread(false);
  check_block_experts(op, rows, weight, counts);
  check_same_dtype(op, "grad_output", grad_output, "rows", rows);
  check_shape(op, "grad_output", grad_output, {rows.size(0), weight.size(2)});
  const at::Tensor grad = grad_output.contiguous();
  const at::Tensor nothing = at::empty({0}, rows.options());
  const at::Tensor grad_rows = needed[0] ? pooled_empty(rows.sizes(), rows.options()) : nothing;
  const at::Tensor grad_weight = needed[1] ? at::empty(weight.sizes(), weight.options()) : nothing;
  compute_for_all(weight, counts, [&](auto of_weight, auto of_rows, auto& products) {
    if (needed[0]) products.push_back({of_rows(grad_rows), of_rows(grad), of_weight(weight)});
    if (needed[1]) products.push_back({of_weight(grad_weight), of_rows(grad).t(), of_rows(rows)});
  });
  return {grad_rows, grad_weight};
}

at::Tensor block_experts_meta(const at::Tensor& rows, const at::Tensor& weight) {
  return at::empty_symint({rows.sym_size(0), weight.sym_size(2)}, rows.options());
}

Tensors<2> block_experts_backward_meta(const at::Tensor&, const at::Tensor& rows,
                                       const at::Tensor& weight, at::IntArrayRef,
                                       std::array<bool, 2> needed) {
  return {empty_like_if(needed[0], rows), empty_like_if(needed[1], weight)};
}

struct BlockExperts : Gradient<BlockExperts, block_experts, Saved<0, 1>> {
  using InputFor = Saved<1>;

  static variable_list rule(const ForwardCall<block_experts>& forward, const variable_list& grads) {
    const auto [rows, weight, counts] = forward.arguments();
    return forward.gradients(
        block_experts_backward(grads[0], rows, weight, counts, forward.needed<2>()));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<block_experts>(library)
      .kernel<block_experts_kernel>()
      .meta<block_experts_meta>()
      .gradient<BlockExperts>()
      .autocast<0, 1>();
  implement<block_experts_backward>(library)
      .kernel<block_experts_backward_kernel>()
      .meta<block_experts_backward_meta>();
}

}  // namespace parallel_ext
