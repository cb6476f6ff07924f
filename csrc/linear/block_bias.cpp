// A bias, and the weight of a norm of heads, whose gradients have the same bits on any number of
// ranks: sums over all tokens in an order that depends on their number alone, and over the tree of
// the blocks where several ranks hold a part.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>

#include "base/empty.h"
#include "base/product.h"
#include "base/tree.h"
#include "check.h"
#include "comm/tree_reduce.h"
#include "gradient.h"
#include "linear/block_linear.h"
#include "linear/linear.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

at::Tensor block_bias_kernel(const at::Tensor& input, const at::Tensor& bias,
                             at::IntArrayRef bounds, int64_t copies, int64_t num_blocks,
                             const Group& group) {
  const char* op = "block_bias";
  check_copies(op, copies, num_blocks);
  check_floating(op, "input", input);
  check_same_dtype(op, "input", input, "bias", bias);
  check_dim(op, "bias", bias, 1);
  std::vector<at::Tensor> of_blocks;
  const Blocks blocks = blocks_of(op, bounds, bias.size(0), copies);
  check_own_blocks(op, static_cast<int64_t>(blocks.size()), num_blocks, group);
  for (const Range block : blocks) of_blocks.push_back(bias.narrow(0, block.start, block.size));
  const int64_t width = width_of(blocks);
  TORCH_CHECK_VALUE(input.dim() >= 1 && input.size(-1) == width, op, ": input of shape ",
                    input.sizes(), " must have ", width, " features, those of its blocks");
  return (input + at::cat(of_blocks)).contiguous();
}

at::Tensor block_bias_backward_kernel(const at::Tensor& grad_output, const at::Tensor& bias,
                                      at::IntArrayRef bounds, int64_t copies, int64_t num_blocks,
                                      const Group& group) {
  const char* op = "block_bias_backward";
  check_copies(op, copies, num_blocks);
  check_same_dtype(op, "grad_output", grad_output, "bias", bias);
  check_dim(op, "bias", bias, 1);
  const Blocks blocks = blocks_of(op, bounds, bias.size(0), copies);
  const at::Tensor rows = as_matrix(grad_output);
  TORCH_CHECK_VALUE(rows.size(1) == width_of(blocks), op, ": grad_output of shape ",
                    grad_output.sizes(), " must have ", width_of(blocks),
                    " features, those of its blocks");
  const auto num_own = static_cast<int64_t>(blocks.size());
  check_own_blocks(op, num_own, num_blocks, group);
  if (copies == 1) return column_sums(rows, bias.scalar_type());
  const at::Tensor sums = column_sums(rows, wide_type(bias)).view({num_own, -1, 1});
  return shared_grad(op, sums, copies, num_blocks, group).flatten().to(bias.scalar_type());
}

at::Tensor block_bias_backward_meta(const at::Tensor&, const at::Tensor& bias) {
  return at::empty_like(bias);
}

struct BlockBias : Gradient<BlockBias, block_bias, Saved<1>> {
  static variable_list rule(const ForwardCall<block_bias>& forward, const variable_list& grads) {
    const auto [input, bias, blocks, copies, num_blocks, group] = forward.arguments();
    at::Tensor grad_bias;
    if (forward.needed<2>()[1]) {
      grad_bias = block_bias_backward(grads[0], bias, blocks, copies, num_blocks, group);
    }
    return forward.gradients(Tensors<2>(grads[0], grad_bias));
  }
};

Blocks check_scale(const char* op, const at::Tensor& input, const at::Tensor& weight,
                   at::IntArrayRef bounds, int64_t num_blocks, const Group& group) {
  check_floating(op, "input", input);
  check_same_dtype(op, "input", input, "weight", weight);
  check_dim(op, "weight", weight, 1);
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.size(-1) == weight.size(0), op, ": input of shape ",
                    input.sizes(), " is not of heads of ", weight.size(0), " features");
  Blocks blocks = blocks_of(op, bounds, input.size(-2));
  check_own_blocks(op, static_cast<int64_t>(blocks.size()), num_blocks, group);
  return blocks;
}

at::Tensor block_scale_kernel(const at::Tensor& input, const at::Tensor& weight,
                              at::IntArrayRef bounds, int64_t num_blocks, const Group& group) {
  check_scale("block_scale", input, weight, bounds, num_blocks, group);
  return (input * weight).contiguous();
}

Tensors<2> block_scale_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                       const at::Tensor& weight, at::IntArrayRef bounds,
                                       int64_t num_blocks, std::array<bool, 2> needed,
                                       const Group& group) {
  const char* op = "block_scale_backward";
  const Blocks blocks = check_scale(op, input, weight, bounds, num_blocks, group);
  check_shape(op, "grad_output", grad_output, input.sizes());
  at::Tensor grad_input = at::empty({0}, input.options());
  at::Tensor grad_weight = at::empty({0}, weight.options());
  if (needed[0]) grad_input = (grad_output * weight).contiguous();
  if (needed[1]) {
    const at::Tensor products = grad_output.to(wide_type(grad_output)) * input;
    std::vector<at::Tensor> of_blocks;
    for (const Range block : blocks) {
      const at::Tensor heads = products.narrow(-2, block.start, block.size);
      const at::Tensor rows = heads.reshape({-1, weight.size(0)});
      of_blocks.push_back(column_sums(rows, rows.scalar_type()));
    }
    grad_weight = tree_reduce(op, at::stack(of_blocks), num_blocks, weight.scalar_type(), group);
  }
  return {grad_input, grad_weight};
}

Tensors<2> block_scale_backward_meta(const at::Tensor&, const at::Tensor& input,
                                     const at::Tensor& weight, at::IntArrayRef, int64_t,
                                     std::array<bool, 2> needed) {
  return {empty_like_if(needed[0], input), empty_like_if(needed[1], weight)};
}

struct BlockScale : Gradient<BlockScale, block_scale, Saved<0, 1>> {
  using InputFor = Saved<1>;

  static variable_list rule(const ForwardCall<block_scale>& forward, const variable_list& grads) {
    const auto [input, weight, blocks, num_blocks, group] = forward.arguments();
    return forward.gradients(block_scale_backward(grads[0], input, weight, blocks, num_blocks,
                                                  forward.needed<2>(), group));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<block_bias>(library)
      .kernel<block_bias_kernel>()
      .meta<same_shape_meta>()
      .gradient<BlockBias>()
      .autocast<0, 1>();
  implement<block_bias_backward>(library)
      .kernel<block_bias_backward_kernel>()
      .meta<block_bias_backward_meta>();
  implement<block_scale>(library)
      .kernel<block_scale_kernel>()
      .meta<same_shape_meta>()
      .gradient<BlockScale>();
  implement<block_scale_backward>(library)
      .kernel<block_scale_backward_kernel>()
      .meta<block_scale_backward_meta>();
}

}  // namespace parallel_ext
