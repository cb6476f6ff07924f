// The output head and its loss with bits that do not depend on how many ranks share the vocabulary:
// statistics and products of blocks of ids, whose borders no layout changes. All gradients are
// computed in the forward, but for the factor that arrives in the backward.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/fixed_product.h"
#include "base/layout.h"
#include "base/workspace.h"
#include "check.h"
#include "comm/tree_reduce.h"
#include "linear/block_linear.h"
#include "linear/linear.h"
#include "ops.h"
#include "vocab/linear_cross_entropy.h"

namespace parallel_ext {
namespace {

constexpr const char* kOp = "block_linear_cross_entropy";

void check_call(const at::Tensor& input, const at::Tensor& head_weight, const at::Tensor& labels,
                const VocabLoss& loss) {
  check_dim(kOp, "input", input, 2);
  check_linear(kOp, input, head_weight, {}, "head_weight");
  TORCH_CHECK_TYPE(input.scalar_type() != at::kHalf, kOp,
                   ": gradients before the loss scale do not fit fp16; use bf16");
  TORCH_CHECK_VALUE(loss.reduction != "none", kOp, ": reduction must be 'sum' or 'mean'");
  check_vocab_loss(kOp, loss, "the rows of head_weight", head_weight.size(0), input.size(0), labels,
                   /*want_argmax=*/false);
}

// The statistics of every block of the vocabulary [num_blocks, rows.count, T], in order, given
// those of this rank's.
at::Tensor stats_of_all(const std::vector<at::Tensor>& own, int64_t num_blocks,
                        const at::Tensor& like_stats, const Group& group) {
  const std::vector<int64_t> bounds = split(num_blocks, group.size, 1);
  int64_t most = 0;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    most = std::max(most, bounds[peer + 1] - bounds[peer]);
  }
  at::Tensor message =
      at::zeros({most, like_stats.size(0), like_stats.size(1)}, like_stats.options());
  message.narrow(0, 0, static_cast<int64_t>(own.size())).copy_(at::stack(own));
  const at::Tensor all = all_gather(kOp, message, group);
  std::vector<at::Tensor> in_order;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    in_order.push_back(all[peer].narrow(0, 0, bounds[peer + 1] - bounds[peer]));
  }
  return at::cat(in_order);
}

Tensors<3> forward_kernel(const at::Tensor& input, const at::Tensor& head_weight,
                          const at::Tensor& labels_in, at::IntArrayRef bounds, int64_t num_blocks,
                          std::array<bool, 2> needed, const Group& group, const VocabLoss& loss) {
  check_call(input, head_weight, labels_in, loss);
  const auto blocks = blocks_of(kOp, bounds, head_weight.size(0));
  const auto num_own = static_cast<int64_t>(blocks.size());
  const at::Tensor labels = labels_in.contiguous();
  const StatsRows rows(loss.label_smoothing > 0, false, false);
  const Tokens tokens = tokens_of(loss, labels);
  const auto wide = wide_type(input);
  const auto tiles = ranges_of(input.size(0), tokens_of_tile(input));
  const bool by_one = can_merge_blocks(blocks, input.size(1), input.scalar_type()) &&
                      (tiles.empty() || tiles.back().size >= kLeastOfProduct);
  const auto options = input.options().dtype(type_ahead(input));
  at::Tensor grad_input = at::empty({0}, options), grad_head = at::empty({0}, options);
  if (needed[0]) grad_input = at::zeros(input.sizes(), options);
  if (needed[1]) grad_head = at::zeros(head_weight.sizes(), options);
  std::vector<at::Tensor> all_stats;
  for (const Range tile : tiles) {
    const at::Tensor tile_rows = input.narrow(0, tile.start, tile.size);
    const at::Tensor tile_labels = labels.narrow(0, tile.start, tile.size);
    at::Tensor logits = pooled_empty({tile.size, head_weight.size(0)}, input.options());
    if (by_one) {
      fixed_product_of_blocks(logits, tile_rows, head_weight.t(), sizes_of(blocks), /*dim=*/1);
    }
    std::vector<VocabShard> shards;
    std::vector<at::Tensor> stats;
    for (const Range block : blocks) {
      const at::Tensor own_logits = logits.narrow(1, block.start, block.size);
      if (!by_one) {
        fixed_product(own_logits, tile_rows, head_weight.narrow(0, block.start, block.size).t());
      }
      shards.push_back(loss.shard(own_logits, tile_labels, loss.vocab_start + block.start));
      stats.push_back(vocab_shard_stats(shards.back(), rows));
    }
    all_stats.push_back(stats_of_all(stats, num_blocks, stats.front(), group));
    if (!needed[0] && !needed[1]) continue;
    const at::Tensor normalizer =
        normalizer_of(merge(all_stats.back(), rows), /*with_entropy=*/false, wide);
    const at::Tensor factors = factors_of(loss, {at::ones({}, normalizer.options()), {}, {}},
                                          tokens.narrow(tile.start, tile.size), normalizer);
    for (const VocabShard& shard : shards) {
      at::Tensor in_place = shard.logits;
      vocab_shard_gradient(shard, normalizer, factors, in_place);
    }
    if (needed[0]) {
      const at::Tensor parts = pooled_empty({num_own, tile.size, input.size(1)}, input.options());
      for (int64_t number = 0; number < num_own; ++number) {
        fixed_product(parts[number], shards[number].logits,
                      head_weight.narrow(0, blocks[number].start, blocks[number].size));
      }
      grad_input.narrow(0, tile.start, tile.size)
          .copy_(tree_reduce(kOp, parts, num_blocks, grad_input.scalar_type(), group));
    }
    if (needed[1]) {
      // In full tiles, whose sums are wide, the gradient of a tile is rounded before it is added.
      const auto add = [&](at::Tensor sum, const at::Tensor& grad_logits,
                           const std::vector<int64_t>& sizes) {
        const at::Tensor of_tile = tile.start == 0 && sum.scalar_type() == input.scalar_type()
                                       ? sum
                                       : pooled_empty(sum.sizes(), input.options());
        fixed_product_of_blocks(of_tile, grad_logits.t(), tile_rows, sizes, /*dim=*/0);
        if (!of_tile.is_same(sum)) sum.add_(of_tile);
      };
      if (by_one) add(grad_head, logits, sizes_of(blocks));
      for (size_t i = 0; !by_one && i < blocks.size(); ++i) {
        const auto [start, size] = blocks[i];
        add(grad_head.narrow(0, start, size), shards[i].logits, {size});
      }
    }
  }
  const at::Tensor total_stats =
      all_stats.empty() ? at::zeros({num_blocks, rows.count, 0}, input.options().dtype(wide))
                        : at::cat(all_stats, 2);
  const LossOutputs outputs =
      outputs_of(loss, tokens, merge(total_stats, rows), {false, false, false}, wide);
  return {outputs.loss, grad_input, grad_head};
}

Tensors<3> forward_meta(const at::Tensor& input, const at::Tensor& head_weight, const at::Tensor&,
                        at::IntArrayRef, int64_t, std::array<bool, 2> needed) {
  const auto options = input.options().dtype(type_ahead(input));
  return {at::empty({}, input.options().dtype(wide_type(input))),
          empty_if(needed[0], input.sym_sizes(), options),
          empty_if(needed[1], head_weight.sym_sizes(), options)};
}

at::Tensor loss_without_gradient(const at::Tensor& input, const at::Tensor& head_weight,
                                 const at::Tensor& labels, at::IntArrayRef blocks,
                                 int64_t num_blocks, const Group& group, const VocabLoss& loss) {
  return std::get<0>(block_linear_cross_entropy_forward(input, head_weight, labels, blocks,
                                                        num_blocks, {false, false}, group, loss));
}

class BlockCrossEntropy : public torch::autograd::Function<BlockCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& head_weight, const at::Tensor& labels,
                            at::IntArrayRef blocks, int64_t num_blocks, const Group& group,
                            const VocabLoss& loss, std::array<bool, 2> needed) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [total, grad_input, grad_head] = block_linear_cross_entropy_forward(
        input, head_weight, labels, blocks, num_blocks, needed, group, loss);
    // Not saved variables: the backward scales them in place and returns them.
    ctx->saved_data["gradients"] = std::vector<at::Tensor>{grad_input, grad_head};
    ctx->saved_data["dtype"] = static_cast<int64_t>(input.scalar_type());
    ctx->saved_data["none"] = labels.eq(loss.ignore_index).all();
    return total;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), kOp,
                                ": second derivatives are not implemented; call backward without "
                                "create_graph=True");
    auto& data = ctx->saved_data;
    const auto ahead = data.find("gradients");
    TORCH_CHECK_NOT_IMPLEMENTED(ahead != data.end(), kOp,
                                ": a second backward of one loss is not implemented; compute the "
                                "loss again");
    auto gradients = ahead->second.toTensorVector();
    data.erase(ahead);
    const auto dtype = static_cast<at::ScalarType>(data["dtype"].toInt());
    // A caller that divides a sum by the number of valid tokens divides by zero without any.
    const at::Tensor factor = grad_outputs[0].masked_fill(data["none"].toTensor(), 0);
    variable_list grads(8);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (ctx->needs_input_grad(i)) grads[i] = gradients[i].mul_(factor).to(dtype);
    }
    return grads;
  }
};

at::Tensor loss_autograd(const at::Tensor& input, const at::Tensor& head_weight,
                         const at::Tensor& labels, at::IntArrayRef blocks, int64_t num_blocks,
                         const Group& group, const VocabLoss& loss) {
  const bool grad = at::GradMode::is_enabled();
  return BlockCrossEntropy::apply(
      input, head_weight, labels, blocks, num_blocks, group, loss,
      std::array<bool, 2>{grad && input.requires_grad(), grad && head_weight.requires_grad()});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<block_linear_cross_entropy>(library)
      .kernel<loss_without_gradient>()
      .meta<loss_without_gradient>()
      .on<loss_autograd>(c10::DispatchKey::Autograd)
      .autocast<0, 1>();
  implement<block_linear_cross_entropy_forward>(library)
      .kernel<forward_kernel>()
      .meta<forward_meta>();
}

}  // namespace parallel_ext
