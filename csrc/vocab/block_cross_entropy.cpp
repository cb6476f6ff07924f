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

#include "base/empty.h"
#include "base/fixed_product.h"
#include "base/kernel_choice.h"
#include "base/layout.h"
#include "base/workspace.h"
#include "check.h"
#include "comm/tree_reduce.h"
#include "linear/block_linear.h"
#include "linear/linear.h"
#include "vocab/linear_cross_entropy.h"
#include "vocab/loss_autograd.h"
#include "vocab/ops.h"

namespace parallel_ext {
namespace {

constexpr const char* kBlockLoss = "block_linear_cross_entropy";

void check_call(const at::Tensor& input, const at::Tensor& head_weight,
                const at::Tensor& lora_a_out, const at::Tensor& lora_b, const at::Tensor& labels,
                const VocabLoss& loss) {
  check_dim(kBlockLoss, "input", input, 2);
  check_linear(kBlockLoss, input, head_weight, {}, "head_weight");
  check_same_dtype(kBlockLoss, "lora_a_out", lora_a_out, "input", input);
  check_linear(kBlockLoss, lora_a_out, lora_b, {}, "lora_b");
  check_shape(kBlockLoss, "lora_a_out", lora_a_out, {input.size(0), lora_b.size(1)});
  check_shape(kBlockLoss, "lora_b", lora_b, {head_weight.size(0), lora_a_out.size(1)});
  TORCH_CHECK_TYPE(input.scalar_type() != at::kHalf, kBlockLoss,
                   ": gradients before the loss scale do not fit fp16; use bf16");
  TORCH_CHECK_VALUE(loss.reduction != "none", kBlockLoss, ": reduction must be 'sum' or 'mean'");
  check_vocab_loss(kBlockLoss, loss, "the rows of head_weight", head_weight.size(0), input.size(0),
                   labels,
                   /*want_argmax=*/false);
}

// A matrix of the head's rows and what it is multiplied by, with their gradients where needed.
struct Factors {
  at::Tensor input, weight;            // [T, K], [V of this rank, K]
  at::Tensor grad_input, grad_weight;  // [0] where they are not needed

  Factors(const at::Tensor& input, const at::Tensor& weight, bool needs_input, bool needs_weight,
          const at::TensorOptions& options)
      : input(input),
        weight(weight),
        grad_input(needs_input ? at::zeros(input.sizes(), options) : at::empty({0}, options)),
        grad_weight(needs_weight ? at::zeros(weight.sizes(), options) : at::empty({0}, options)),
        needs_input_(needs_input),
        needs_weight_(needs_weight) {}

  // Adds the gradients of a tile of tokens, whose gradients of logits are those of `shards`;
  // `whole` holds those of all of this rank's blocks if one product may make them.
  void add_gradients(const Range tile, const std::vector<Range>& blocks,
                     const std::vector<VocabShard>& shards, const at::Tensor* whole,
                     int64_t num_blocks, const Group& group) {
    const at::Tensor rows = input.narrow(0, tile.start, tile.size);
    if (needs_input_) {
      const auto num_own = static_cast<int64_t>(blocks.size());
      const at::Tensor parts = pooled_empty({num_own, tile.size, input.size(1)}, input.options());
      std::vector<Product> products;
      for (int64_t number = 0; number < num_own; ++number) {
        const auto [start, size] = blocks[number];
        products.push_back({parts[number], shards[number].logits, weight.narrow(0, start, size)});
      }
      fixed_products(products);
      grad_input.narrow(0, tile.start, tile.size)
          .copy_(tree_reduce(kBlockLoss, parts, num_blocks, grad_input.scalar_type(), group));
    }
    if (!needs_weight_) return;
    // In full tiles, whose sums are wide, the gradient of a tile is rounded before it is added.
    const auto add = [&](at::Tensor sum, const at::Tensor& grad_logits,
                         const std::vector<int64_t>& sizes) {
      const at::Tensor of_tile = tile.start == 0 && sum.scalar_type() == input.scalar_type()
                                     ? sum
                                     : pooled_empty(sum.sizes(), input.options());
      fixed_product_of_blocks(of_tile, grad_logits.t(), rows, sizes, /*dim=*/0);
      if (!of_tile.is_same(sum)) sum.add_(of_tile);
    };
    if (whole != nullptr) return add(grad_weight, *whole, sizes_of(blocks));
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto [start, size] = blocks[i];
      add(grad_weight.narrow(0, start, size), shards[i].logits, {size});
    }
  }

 private:
  bool needs_input_, needs_weight_;
};

Tensors<5> block_loss_forward(const at::Tensor& input, const at::Tensor& head_weight,
                              const at::Tensor& lora_a_out, const at::Tensor& lora_b,
                              const at::Tensor& labels_in, at::IntArrayRef bounds,
                              int64_t num_blocks, std::array<bool, 4> needed, const Group& group,
                              const VocabLoss& loss) {
  choose_blas_for_one_thread(false);
  check_call(input, head_weight, lora_a_out, lora_b, labels_in, loss);
  const auto blocks = blocks_of(kBlockLoss, bounds, head_weight.size(0));
  check_own_blocks(kBlockLoss, static_cast<int64_t>(blocks.size()), num_blocks, group);
  const at::Tensor labels = labels_in.contiguous();
  const StatsRows rows(loss.label_smoothing > 0, false, false);
  const Tokens tokens = tokens_of(loss, labels);
  const auto wide = wide_type(input);
  const auto tiles = ranges_of(input.size(0), tokens_of_tile(input));
  // A GPU's kernels add in an order that follows from where a block's logits lie.
  const bool apart = !use_cpu_loops(input);
  const bool by_one = !apart && can_merge_blocks(blocks, input.size(1), input.scalar_type()) &&
                      (tiles.empty() || tiles.back().size >= kLeastOfProduct);
  const bool has_adapter = lora_a_out.size(1) > 0;
  const auto options = input.options().dtype(type_ahead(input));
  Factors of_head(input, head_weight, needed[0], needed[1], options);
  Factors of_adapter(lora_a_out, lora_b, needed[2], needed[3], options);
  std::vector<at::Tensor> all_stats;
  for (const Range tile : tiles) {
    const at::Tensor tile_rows = input.narrow(0, tile.start, tile.size);
    const at::Tensor tile_labels = labels.narrow(0, tile.start, tile.size);
    const auto empty = [&](int64_t width) {
      return pooled_empty({tile.size, width}, input.options());
    };
    const at::Tensor logits = empty(apart ? 0 : head_weight.size(0));
    if (by_one) {
      fixed_product_of_blocks(logits, tile_rows, head_weight.t(), sizes_of(blocks), /*dim=*/1);
    }
    std::vector<VocabShard> shards;
    std::vector<at::Tensor> stats;
    for (const Range block : blocks) {
      const at::Tensor own_logits =
          apart ? empty(block.size) : logits.narrow(1, block.start, block.size);
      if (!by_one) {
        fixed_product(own_logits, tile_rows, head_weight.narrow(0, block.start, block.size).t());
      }
      if (has_adapter) {
        fixed_product(own_logits, lora_a_out.narrow(0, tile.start, tile.size),
                      lora_b.narrow(0, block.start, block.size).t(), /*add=*/true);
      }
      shards.push_back(loss.shard(own_logits, tile_labels, loss.vocab_start + block.start));
      stats.push_back(vocab_shard_stats(shards.back(), rows));
    }
    all_stats.push_back(at::stack(of_all_blocks(kBlockLoss, at::stack(stats), num_blocks, group)));
    if (std::none_of(needed.begin(), needed.end(), [](bool each) { return each; })) continue;
    const at::Tensor normalizer = normalizer_of(all_stats.back(), rows);
    const at::Tensor factors = factors_of(loss, {at::ones({}, normalizer.options()), {}, {}},
                                          tokens.narrow(tile.start, tile.size), normalizer);
    for (const VocabShard& shard : shards) {
      at::Tensor in_place = shard.logits;
      vocab_shard_gradient(shard, normalizer, factors, in_place);
    }
    of_head.add_gradients(tile, blocks, shards, by_one ? &logits : nullptr, num_blocks, group);
    if (has_adapter) of_adapter.add_gradients(tile, blocks, shards, nullptr, num_blocks, group);
  }
  const at::Tensor total_stats =
      all_stats.empty() ? at::zeros({num_blocks, rows.count, 0}, input.options().dtype(wide))
                        : at::cat(all_stats, 2);
  const LossOutputs outputs = outputs_of(loss, tokens, total_stats, rows, {false, false, false});
  return {outputs.loss, of_head.grad_input, of_head.grad_weight, of_adapter.grad_input,
          of_adapter.grad_weight};
}

Tensors<5> block_loss_forward_meta(const at::Tensor& input, const at::Tensor& head_weight,
                                   const at::Tensor& lora_a_out, const at::Tensor& lora_b,
                                   const at::Tensor&, at::IntArrayRef, int64_t,
                                   std::array<bool, 4> needed) {
  const auto options = input.options().dtype(type_ahead(input));
  const auto gradient = [&](size_t i, const at::Tensor& of) {
    return empty_if(needed[i], of.sym_sizes(), options);
  };
  return {at::empty({}, input.options().dtype(wide_type(input))), gradient(0, input),
          gradient(1, head_weight), gradient(2, lora_a_out), gradient(3, lora_b)};
}

at::Tensor block_loss_without_gradient(const at::Tensor& input, const at::Tensor& head_weight,
                                       const at::Tensor& lora_a_out, const at::Tensor& lora_b,
                                       const at::Tensor& labels, at::IntArrayRef blocks,
                                       int64_t num_blocks, const Group& group,
                                       const VocabLoss& loss) {
  return std::get<0>(block_linear_cross_entropy_forward(
      input, head_weight, lora_a_out, lora_b, labels, blocks, num_blocks, {}, group, loss));
}

class BlockCrossEntropy : public torch::autograd::Function<BlockCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& head_weight, const at::Tensor& lora_a_out,
                            const at::Tensor& lora_b, const at::Tensor& labels,
                            at::IntArrayRef blocks, int64_t num_blocks, const Group& group,
                            const VocabLoss& loss, std::array<bool, 4> needed) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [total, grad_input, grad_head, grad_low, grad_lora_b] =
        block_linear_cross_entropy_forward(input, head_weight, lora_a_out, lora_b, labels, blocks,
                                           num_blocks, needed, group, loss);
    // Not saved variables: the backward scales them in place and returns them.
    ctx->saved_data["gradients"] =
        std::vector<at::Tensor>{grad_input, grad_head, grad_low, grad_lora_b};
    ctx->saved_data["dtype"] = static_cast<int64_t>(input.scalar_type());
    ctx->saved_data["none"] = labels.eq(loss.ignore_index).all();
    ctx->set_materialize_grads(false);
    return total;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    refuse_create_graph(kBlockLoss);
    variable_list grads(10);
    if (!grad_outputs[0].defined()) return grads;
    auto& data = ctx->saved_data;
    const auto ahead = data.find("gradients");
    TORCH_CHECK_NOT_IMPLEMENTED(ahead != data.end(), kBlockLoss,
                                ": a second backward of one loss is not implemented; compute the "
                                "loss again");
    auto gradients = ahead->second.toTensorVector();
    data.erase(ahead);
    const auto dtype = static_cast<at::ScalarType>(data["dtype"].toInt());
    // A caller that divides a sum by the number of valid tokens divides by zero without any.
    const at::Tensor factor = grad_outputs[0].masked_fill(data["none"].toTensor(), 0);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (ctx->needs_input_grad(i)) grads[i] = gradients[i].mul_(factor).to(dtype);
    }
    return grads;
  }
};

at::Tensor block_loss_autograd(const at::Tensor& input, const at::Tensor& head_weight,
                               const at::Tensor& lora_a_out, const at::Tensor& lora_b,
                               const at::Tensor& labels, at::IntArrayRef blocks, int64_t num_blocks,
                               const Group& group, const VocabLoss& loss) {
  refuse_gradient_of_weight(kBlockLoss, loss);
  const auto needs = [grad = at::GradMode::is_enabled()](const at::Tensor& each) {
    return grad && each.requires_grad();
  };
  return BlockCrossEntropy::apply(
      input, head_weight, lora_a_out, lora_b, labels, blocks, num_blocks, group, loss,
      std::array<bool, 4>{needs(input), needs(head_weight), needs(lora_a_out), needs(lora_b)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<block_linear_cross_entropy>(library)
      .kernel<block_loss_without_gradient>()
      .meta<block_loss_without_gradient>()
      .on<block_loss_autograd>(c10::DispatchKey::Autograd)
      .autocast<0, 1, 2, 3>();
  implement<block_linear_cross_entropy_forward>(library)
      .kernel<block_loss_forward>()
      .meta<block_loss_forward_meta>();
}

}  // namespace parallel_ext
