// Linear layers whose bits do not depend on how many ranks share them. The sharded dimension lies
// in blocks that no layout changes; whatever is summed over it is one product a block, added over
// the tree of all blocks (base/tree.h).
#include "linear/block_linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "base/empty.h"
#include "base/fixed_product.h"
#include "base/layout.h"
#include "base/product.h"
#include "base/tree.h"
#include "base/workspace.h"
#include "check.h"
#include "comm/tree_reduce.h"
#include "gradient.h"
#include "linear/linear.h"
#include "linear/ops.h"

namespace parallel_ext {

bool can_merge_blocks(const Blocks& blocks, int64_t other_size, at::ScalarType dtype) {
  if (dtype == at::kDouble) return false;  // its kernels depend on the sizes
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].size < kLeastOfProduct) return false;
    if (i > 0 && blocks[i].start != blocks[i - 1].start + blocks[i - 1].size) return false;
  }
  return !blocks.empty() && other_size >= kLeastOfProduct;
}

std::vector<int64_t> sizes_of(const Blocks& blocks) {
  std::vector<int64_t> sizes;
  for (const Range block : blocks) sizes.push_back(block.size);
  return sizes;
}

int64_t width_of(const Blocks& blocks) {
  int64_t width = 0;
  for (const Range block : blocks) width += block.size;
  return width;
}

Blocks blocks_of(const char* op, at::IntArrayRef bounds, int64_t size, int64_t copies) {
  TORCH_CHECK_VALUE(bounds.size() % 2 == 0, op, ": blocks ", bounds,
                    " are not pairs of start and stop");
  Blocks blocks;
  int64_t covered = 0;
  for (size_t i = 0; i < bounds.size(); i += 2) {
    const int64_t start = bounds[i], stop = bounds[i + 1];
    const bool is_copy = copies > 1 && i > 0 && start == bounds[i - 2] && stop == covered;
    TORCH_CHECK_VALUE((start == covered && start <= stop) || is_copy, op, ": the block [", start,
                      ", ", stop, ") does not follow one that ends at ", covered);
    TORCH_CHECK_VALUE(copies == 1 || blocks.empty() || stop - start == blocks[0].size, op,
                      ": blocks ", bounds, " with copies must be of one size");
    blocks.push_back({start, stop - start});
    covered = stop;
  }
  TORCH_CHECK_VALUE(covered == size, op, ": blocks ", bounds, " do not cover [0, ", size, ")");
  return blocks;
}

void check_copies(const char* op, int64_t copies, int64_t num_blocks) {
  TORCH_CHECK_VALUE(copies >= 1 && num_blocks % copies == 0, op,
                    ": copies must divide the number of blocks ", num_blocks, ", got ", copies);
}

at::Tensor shared_grad(const char* op, const at::Tensor& of_blocks, int64_t copies,
                       int64_t num_blocks, const Group& group) {
  const auto [bounds, rank] = check_own_blocks(op, of_blocks.size(0), num_blocks, group);
  int64_t first = bounds[rank], last = bounds[rank + 1];
  const bool apart =
      std::any_of(bounds.begin(), bounds.end(), [&](int64_t bound) { return bound % copies != 0; });
  std::vector<at::Tensor> parts = of_blocks.unbind(0);
  if (apart) {  // some rows are held by several ranks
    parts = of_all_blocks(op, of_blocks, num_blocks, group);
    first -= first % copies;
    last = std::min(num_blocks, (last + copies - 1) / copies * copies);
    parts = std::vector<at::Tensor>(parts.begin() + first, parts.begin() + last);
  }
  const int64_t rows = of_blocks.size(1);
  at::Tensor grad =
      at::empty({(last - first) / copies * rows, of_blocks.size(2)}, of_blocks.options());
  for (int64_t shared = 0; shared < (last - first) / copies; ++shared) {
    const auto begin = parts.begin() + shared * copies;
    grad.narrow(0, shared * rows, rows)
        .copy_(tree_sum(std::vector<at::Tensor>(begin, begin + copies), grad.scalar_type()));
  }
  return grad;
}

namespace {

// out [N, width of the blocks] = left [N, K] times the blocks' columns of right [K, F].
void column_products(at::Tensor out, const at::Tensor& left, const at::Tensor& right,
                     const Blocks& blocks) {
  if (can_merge_blocks(blocks, left.size(0), left.scalar_type())) {
    const at::Tensor own = right.narrow(1, blocks[0].start, out.size(1));
    return fixed_product_of_blocks(out, left, own, sizes_of(blocks), /*dim=*/1);
  }
  int64_t at = 0;
  for (const Range block : blocks) {
    fixed_product(out.narrow(1, at, block.size), left, right.narrow(1, block.start, block.size));
    at += block.size;
  }
}

// -> [T, width of the blocks]: rows [T, K] times the blocks' rows of the weight [F, K].
at::Tensor column_product(const at::Tensor& rows, const at::Tensor& weight, const Blocks& blocks) {
  at::Tensor out = at::empty({rows.size(0), width_of(blocks)}, rows.options());
  if (out.size(1) > 0) column_products(out, rows, weight.t(), blocks);
  return out;
}

// The gradient of the rows of a weight: grad^T rows, a product a block where the blocks are small.
at::Tensor grad_of_rows(const at::Tensor& grad, const at::Tensor& rows, const Blocks& blocks) {
  at::Tensor out = at::empty({width_of(blocks), rows.size(1)}, rows.options());
  if (out.size(0) == 0) return out;
  if (can_merge_blocks(blocks, rows.size(1), rows.scalar_type())) {
    fixed_product_of_blocks(out, grad.t(), rows, sizes_of(blocks), /*dim=*/0);
    return out;
  }
  int64_t at = 0;
  for (const Range block : blocks) {
    fixed_product(out.narrow(0, at, block.size), grad.narrow(1, at, block.size).t(), rows);
    at += block.size;
  }
  return out;
}

struct ColumnCall {
  static constexpr const char* kOp = "block_linears";
  static constexpr const char* kNames[] = {"weight", "second", "third"};

  std::array<at::Tensor, 3> weights;
  std::array<Blocks, 3> blocks;

  ColumnCall(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& second,
             const at::Tensor& third, at::IntArrayRef bounds, int64_t copies, int64_t num_blocks,
             const Group& group)
      : weights{weight, second, third} {
    check_copies(kOp, copies, num_blocks);
    TORCH_CHECK_VALUE(bounds.size() % weights.size() == 0, kOp, ": blocks ", bounds,
                      " are not equally many for each of ", weights.size(), " weights");
    const size_t each = bounds.size() / weights.size();
    for (size_t i = 0; i < weights.size(); ++i) {
      check_linear(kOp, input, weights[i], {}, kNames[i]);
      blocks[i] =
          blocks_of(kOp, bounds.slice(i * each, each), weights[i].size(0), i == 0 ? 1 : copies);
    }
    check_own_blocks(kOp, static_cast<int64_t>(blocks[0].size()), num_blocks, group);
  }
};

Tensors<3> block_linears_kernel(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& second, const at::Tensor& third,
                                at::IntArrayRef blocks, int64_t copies, int64_t num_blocks,
                                const Group& group) {
  const ColumnCall call(input, weight, second, third, blocks, copies, num_blocks, group);
  const at::Tensor rows = as_matrix(input);
  const auto output = [&](size_t i) {
    at::Tensor out = column_product(rows, call.weights[i], call.blocks[i]);
    return out.view(with_last(input.sizes(), out.size(1)));
  };
  const Tensors<3> outputs{output(0), output(1), output(2)};
  choose_blas_for_one_thread(true);  // attention may follow
  return outputs;
}

Tensors<3> block_linears_meta(const at::Tensor& input, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, at::IntArrayRef blocks) {
  const size_t each = blocks.size() / 3;
  const auto output = [&](size_t i) {
    int64_t width = 0;  // of blocks that the kernel checks
    for (size_t j = 0; j < each; ++j) width += (j % 2 == 0 ? -1 : 1) * blocks[i * each + j];
    return empty_with(input, -1, width);
  };
  return {output(0), output(1), output(2)};
}

Tensors<4> block_linears_backward_kernel(const at::Tensor& grad, const at::Tensor& grad_second,
                                         const at::Tensor& grad_third, const at::Tensor& input,
                                         const at::Tensor& weight, const at::Tensor& second,
                                         const at::Tensor& third, at::IntArrayRef bounds,
                                         int64_t copies, int64_t num_blocks,
                                         std::array<bool, 4> needed, const Group& group) {
  const char* op = "block_linears_backward";
  choose_blas_for_one_thread(false);
  const ColumnCall call(input, weight, second, third, bounds, copies, num_blocks, group);
  const auto num_own = static_cast<int64_t>(call.blocks[0].size());
  const at::Tensor rows = as_matrix(input);
  std::array<at::Tensor, 3> grads;
  const std::array<at::Tensor, 3> given{grad, grad_second, grad_third};
  for (size_t i = 0; i < grads.size(); ++i) {
    check_same_dtype(op, "grad_output", given[i], "input", input);
    check_shape(op, "grad_output", given[i], with_last(input.sizes(), width_of(call.blocks[i])));
    grads[i] = as_matrix(given[i]).contiguous();
  }
  const auto nothing = [&] { return at::empty({0}, input.options()); };
  at::Tensor grad_input = nothing();
  if (needed[0]) {
    const at::Tensor parts = pooled_empty({num_own, rows.size(0), rows.size(1)}, rows.options());
    for (size_t i = 0; i < grads.size(); ++i) {
      std::vector<Product> products;
      int64_t at = 0;
      for (int64_t number = 0; number < num_own; ++number) {
        const Range block = call.blocks[i][number];
        if (i == 0 || block.size > 0) {
          products.push_back({parts[number], grads[i].narrow(1, at, block.size),
                              call.weights[i].narrow(0, block.start, block.size), i > 0});
        }
        at += block.size;
      }
      fixed_products(products);
    }
    grad_input = tree_reduce(op, parts, num_blocks, input.scalar_type(), group).view(input.sizes());
  }
  const auto grad_weight = [&](size_t i) {
    if (!needed[i + 1]) return nothing();
    if (i == 0 || copies == 1 || width_of(call.blocks[i]) == 0) {
      return grad_of_rows(grads[i], rows, call.blocks[i]);
    }
    const int64_t size = call.blocks[i][0].size;
    const at::Tensor of_blocks = pooled_empty({num_own, size, rows.size(1)}, rows.options());
    for (int64_t number = 0; number < num_own; ++number) {
      fixed_product(of_blocks[number], grads[i].narrow(1, number * size, size).t(), rows);
    }
    return shared_grad(op, of_blocks, copies, num_blocks, group);
  };
  const at::Tensor first = grad_weight(0), of_second = grad_weight(1);  // in one order on all ranks
  return {grad_input, first, of_second, grad_weight(2)};
}

Tensors<4> block_linears_backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                       const at::Tensor& input, const at::Tensor& weight,
                                       const at::Tensor& second, const at::Tensor& third,
                                       at::IntArrayRef, int64_t, int64_t,
                                       std::array<bool, 4> needed) {
  return {empty_like_if(needed[0], input), empty_like_if(needed[1], weight),
          empty_like_if(needed[2], second), empty_like_if(needed[3], third)};
}

struct BlockLinears : Gradient<BlockLinears, block_linears, Saved<0, 1, 2, 3>> {
  using InputFor = Saved<1, 2, 3>;

  static constexpr int output_of(size_t argument) { return static_cast<int>(argument) - 1; }

  static variable_list rule(const ForwardCall<block_linears>& forward, const variable_list& grads) {
    const auto [input, weight, second, third, blocks, copies, num_blocks, group] =
        forward.arguments();
    return forward.gradients(block_linears_backward(grads[0], grads[1], grads[2], input, weight,
                                                    second, third, blocks, copies, num_blocks,
                                                    forward.needed<4>(), group));
  }
};

at::Tensor block_row_linear_kernel(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias, at::IntArrayRef bounds,
                                   int64_t num_blocks, const Group& group) {
  const char* op = "block_row_linear";
  choose_blas_for_one_thread(false);
  check_linear(op, input, weight, bias);
  const Blocks blocks = blocks_of(op, bounds, weight.size(1));
  const at::Tensor rows = as_matrix(input);
  const at::Tensor parts = pooled_empty(
      {static_cast<int64_t>(blocks.size()), rows.size(0), weight.size(0)}, input.options());
  std::vector<Product> products;
  for (const Range block : blocks) {
    products.push_back({parts[static_cast<int64_t>(products.size())],
                        rows.narrow(1, block.start, block.size),
                        weight.narrow(1, block.start, block.size).t()});
  }
  fixed_products(products);
  at::Tensor output = tree_reduce(op, parts, num_blocks, input.scalar_type(), group);
  if (bias) output.add_(*bias);
  return output.view(with_last(input.sizes(), weight.size(0)));
}

// Local: the output is replicated, and so is its gradient.
Tensors<3> block_row_linear_backward_kernel(const at::Tensor& grad_output, const at::Tensor& input,
                                            const at::Tensor& weight, at::IntArrayRef bounds,
                                            std::array<bool, 3> needed) {
  const char* op = "block_row_linear_backward";
  check_grad_output(op, grad_output, input, weight);
  const Blocks blocks = blocks_of(op, bounds, weight.size(1));
  const at::Tensor grad = as_matrix(grad_output).contiguous(), rows = as_matrix(input);
  const auto nothing = [&] { return at::empty({0}, input.options()); };
  at::Tensor grad_input = nothing(), grad_weight = nothing();
  if (needed[0]) {
    grad_input = column_product(grad, weight.t(), blocks).view(input.sizes());
  }
  if (needed[1]) {
    grad_weight = at::empty(weight.sizes(), weight.options());
    column_products(grad_weight, grad.t(), rows, blocks);
  }
  choose_blas_for_one_thread(true);  // attention's backward may follow
  return {grad_input, grad_weight, needed[2] ? column_sums(grad, grad.scalar_type()) : nothing()};
}

Tensors<3> block_row_linear_backward_meta(const at::Tensor&, const at::Tensor& input,
                                          const at::Tensor& weight, at::IntArrayRef,
                                          std::array<bool, 3> needed) {
  return {empty_like_if(needed[0], input), empty_like_if(needed[1], weight),
          empty_if(needed[2], weight.sym_sizes().slice(0, 1), weight.options())};
}

struct BlockRowLinear : Gradient<BlockRowLinear, block_row_linear, Saved<0, 1>> {
  using InputFor = Saved<1>;

  static variable_list rule(const ForwardCall<block_row_linear>& forward,
                            const variable_list& grads) {
    const auto [input, weight, bias, blocks, num_blocks, group] = forward.arguments();
    return forward.gradients(
        block_row_linear_backward(grads[0], input, weight, blocks, forward.needed<3>()));
  }
};

void check_heads(const char* op, const char* name, const at::Tensor& tensor, int64_t head_dim,
                 int64_t times, bool repeated) {
  check_floating(op, name, tensor);
  int64_t unit = head_dim, repeats = 0;
  const bool fits = head_dim >= 1 && times >= 1 && tensor.dim() >= 1 &&
                    !__builtin_mul_overflow(std::max(head_dim, tensor.size(-1)), times, &repeats);
  if (fits && repeated) unit *= times;
  TORCH_CHECK_VALUE(fits && tensor.size(-1) % unit == 0, op, ": ", name, " of shape ",
                    tensor.sizes(), " is not of heads of ", head_dim,
                    ", each of which can be repeated ", times, " times");
}

// Each head `times` times, one behind the other: [..., heads * head_dim] -> [..., heads * times *
// head_dim].
at::Tensor repeat_heads_kernel(const at::Tensor& input, int64_t head_dim, int64_t times) {
  check_heads("repeat_heads", "input", input, head_dim, times, /*repeated=*/false);
  const at::Tensor rows = as_matrix(input).contiguous();
  const int64_t width = rows.size(1);
  return rows.view({rows.size(0), width / head_dim, 1, head_dim})
      .expand({-1, -1, times, -1})
      .clone(at::MemoryFormat::Contiguous)  // never the input itself
      .view(with_last(input.sizes(), width * times));
}

at::Tensor repeat_heads_meta(const at::Tensor& input, int64_t, int64_t times) {
  return empty_with(input, -1, input.sym_size(-1) * times);
}

at::Tensor repeat_heads_backward_kernel(const at::Tensor& grad_output, int64_t head_dim,
                                        int64_t times) {
  check_heads("repeat_heads_backward", "grad_output", grad_output, head_dim, times,
              /*repeated=*/true);
  if (times == 1) return grad_output.clone(at::MemoryFormat::Contiguous);
  const int64_t heads = grad_output.numel() / (head_dim * times);
  const auto repeats = grad_output.contiguous().view({heads, times, head_dim}).unbind(1);
  std::vector<at::Tensor> addends;
  for (const auto& each : repeats) addends.push_back(each.contiguous());
  return tree_sum(addends, grad_output.scalar_type())
      .view(with_last(grad_output.sizes(), grad_output.size(-1) / times));
}

at::Tensor repeat_heads_backward_meta(const at::Tensor& grad_output, int64_t, int64_t times) {
  TORCH_CHECK_VALUE(times >= 1, "repeat_heads_backward: times must be at least 1, got ", times);
  return empty_with(grad_output, -1, grad_output.sym_size(-1) / times);
}

struct RepeatHeads : Gradient<RepeatHeads, repeat_heads, Saved<>> {
  static variable_list rule(const ForwardCall<repeat_heads>& forward, const variable_list& grads) {
    const auto [input, head_dim, times] = forward.arguments();
    return forward.gradients(repeat_heads_backward(grads[0], head_dim, times));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<block_linears>(library)
      .kernel<block_linears_kernel>()
      .meta<block_linears_meta>()
      .gradient<BlockLinears>()
      .autocast<0, 1, 2, 3>();
  implement<block_linears_backward>(library)
      .kernel<block_linears_backward_kernel>()
      .meta<block_linears_backward_meta>();
  implement<block_row_linear>(library)
      .kernel<block_row_linear_kernel>()
      .meta<row_linear_meta>()
      .gradient<BlockRowLinear>()
      .autocast<0, 1, 2>();
  implement<block_row_linear_backward>(library)
      .kernel<block_row_linear_backward_kernel>()
      .meta<block_row_linear_backward_meta>();
  implement<repeat_heads>(library)
      .kernel<repeat_heads_kernel>()
      .meta<repeat_heads_meta>()
      .gradient<RepeatHeads>();
  implement<repeat_heads_backward>(library)
      .kernel<repeat_heads_backward_kernel>()
      .meta<repeat_heads_backward_meta>();
}

}  // namespace parallel_ext
