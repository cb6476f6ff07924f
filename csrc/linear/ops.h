// The ops of this room, each declared once, as a function that calls it through the dispatcher.
//
// Shapes: T tokens, K features of the input, F of the output, H hidden. "Replicated" means equal on
// all ranks of the group, "sharded" that each rank holds its own range, "partial" that the sum over
// the ranks is the value. A rank alone (no group) communicates nothing. Gradients that are not
// `needed` are [0]. A Group stands for two arguments of the schema, its size and its name.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "comm/comm.h"
#include "op.h"

namespace parallel_ext {

// --- region.cpp: the borders of a parallel region ---

// partial [..., H] -> replicated [..., H]. Backward: identity.
PARALLEL_EXT_OP(reduce_from_region, at::Tensor(const at::Tensor& partial, const Group& group));

// replicated [..., H] -> replicated [..., H]. Backward: sums the ranks' partial gradients.
PARALLEL_EXT_OP(copy_to_region, at::Tensor(const at::Tensor& input, const Group& group));

// sharded [..., sizes[rank]] -> replicated [..., sum(sizes)]. Backward: this rank's slice.
PARALLEL_EXT_OP(gather_from_region, at::Tensor(const at::Tensor& shard, at::IntArrayRef sizes,
                                               int64_t rank, const Group& group));

// --- tokens.cpp: the borders of a region between which each rank has tokens of its own ---

// replicated [..., sum(sizes), H] -> this rank's tokens [..., sizes[rank], H]. Backward:
// gather_tokens, since every rank is to hold the gradient of all tokens.
PARALLEL_EXT_OP(take_tokens, at::Tensor(const at::Tensor& input, at::IntArrayRef sizes,
                                        int64_t rank, const Group& group));

// sharded [..., sizes[rank], H] -> replicated [..., sum(sizes), H]. Backward: sum_tokens where each
// rank's gradient is partial, else take_tokens.
PARALLEL_EXT_OP(gather_tokens, at::Tensor(const at::Tensor& shard, at::IntArrayRef sizes,
                                          int64_t rank, bool partial_gradient, const Group& group));

// partial [..., sum(sizes), H] -> the sums of this rank's tokens [..., sizes[rank], H]. Backward:
// gather_tokens.
PARALLEL_EXT_OP(sum_tokens, at::Tensor(const at::Tensor& partial, at::IntArrayRef sizes,
                                       int64_t rank, const Group& group));

// --- linear.cpp ---

// replicated input [..., K], weight rows [F, K] of this rank -> sharded [..., F], in rows of
// `row_stride` >= F elements. Backward: the input's gradient is summed over the group while the
// weight's is computed. Of a rank alone that sum is left to the caller (copy_to_region).
PARALLEL_EXT_OP(column_linear, at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, int64_t row_stride,
                                          const Group& group));

// -> gradients of input, weight, bias.
PARALLEL_EXT_OP(column_linear_backward,
                Tensors<3>(const at::Tensor& grad_output, const at::Tensor& input,
                           const at::Tensor& weight, std::array<bool, 3> needed,
                           const Group& group));

// replicated input [..., K], rows of this rank of up to three weights [F, K] (F = 0 for none) and
// their biases [F] -> sharded [..., F] of each. Backward: the products of all weights are added,
// from the last one to the first, and summed over the group while the weights' gradients are
// computed.
PARALLEL_EXT_OP(column_linears,
                Tensors<3>(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& second, const at::Tensor& third,
                           const std::optional<at::Tensor>& bias,
                           const std::optional<at::Tensor>& second_bias,
                           const std::optional<at::Tensor>& third_bias, const Group& group));

// -> gradients of input, the weights and the biases.
PARALLEL_EXT_OP(column_linears_backward,
                Tensors<7>(const at::Tensor& grad_output, const at::Tensor& grad_second,
                           const at::Tensor& grad_third, const at::Tensor& input,
                           const at::Tensor& weight, const at::Tensor& second,
                           const at::Tensor& third, std::array<bool, 7> needed,
                           const Group& group));

// sharded input [..., K], weight columns [F, K] of this rank -> replicated [..., F]: the partial
// products are summed over the group, then the replicated bias [F] is added once. Backward: local.
PARALLEL_EXT_OP(row_linear, at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias, const Group& group));

// --- block_linear.cpp: bits that do not depend on the layout. `blocks`: start and stop of
// each block of the sharded dimension in this rank's shard; the group holds `num_blocks` ---

// replicated input [..., K], rows of this rank of up to three weights [F, K] (F = 0 for none),
// which have equally many blocks -> sharded [..., width of its blocks] of each. Backward: the
// products of all three are added in each block, and the blocks over the tree (base/tree.h). Of the
// second and third, `copies` consecutive ones of all blocks hold the same rows.
PARALLEL_EXT_OP(block_linears, Tensors<3>(const at::Tensor& input, const at::Tensor& weight,
                                          const at::Tensor& second, const at::Tensor& third,
                                          at::IntArrayRef blocks, int64_t copies,
                                          int64_t num_blocks, const Group& group));

// -> gradients of input and the weights.
PARALLEL_EXT_OP(block_linears_backward,
                Tensors<4>(const at::Tensor& grad_output, const at::Tensor& grad_second,
                           const at::Tensor& grad_third, const at::Tensor& input,
                           const at::Tensor& weight, const at::Tensor& second,
                           const at::Tensor& third, at::IntArrayRef blocks, int64_t copies,
                           int64_t num_blocks, std::array<bool, 4> needed, const Group& group));

// sharded input [..., K], weight columns [F, K] of this rank -> replicated [..., F]: one product a
// block, summed over the tree; then the replicated bias [F] is added once. Backward: local.
PARALLEL_EXT_OP(block_row_linear,
                at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, at::IntArrayRef blocks,
                           int64_t num_blocks, const Group& group));

// -> gradients of input, weight, bias.
PARALLEL_EXT_OP(block_row_linear_backward,
                Tensors<3>(const at::Tensor& grad_output, const at::Tensor& input,
                           const at::Tensor& weight, at::IntArrayRef blocks,
                           std::array<bool, 3> needed));

// [..., heads * head_dim] -> [..., heads * times * head_dim]: each head `times` times, one behind
// the other. Backward: over the tree of the repeats.
PARALLEL_EXT_OP(repeat_heads, at::Tensor(const at::Tensor& input, int64_t head_dim, int64_t times));
PARALLEL_EXT_OP(repeat_heads_backward,
                at::Tensor(const at::Tensor& grad_output, int64_t head_dim, int64_t times));

// --- block_bias.cpp ---

// input [..., the width of the blocks] + bias [F] of this rank's rows, as of the weights of
// block_linears. Backward: summed over all tokens, then as the gradient of such a weight.
PARALLEL_EXT_OP(block_bias,
                at::Tensor(const at::Tensor& input, const at::Tensor& bias, at::IntArrayRef blocks,
                           int64_t copies, int64_t num_blocks, const Group& group));

// -> the gradient of the bias.
PARALLEL_EXT_OP(block_bias_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& bias,
                           at::IntArrayRef blocks, int64_t copies, int64_t num_blocks,
                           const Group& group));

// sharded input [..., heads, D] times the replicated weight [D]; `blocks` are ranges of this rank's
// heads. Backward: the weight's gradient is summed over all tokens and heads of a block, and the
// blocks over the tree.
PARALLEL_EXT_OP(block_scale,
                at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                           at::IntArrayRef blocks, int64_t num_blocks, const Group& group));

// -> gradients of input and weight.
PARALLEL_EXT_OP(block_scale_backward,
                Tensors<2>(const at::Tensor& grad_output, const at::Tensor& input,
                           const at::Tensor& weight, at::IntArrayRef blocks, int64_t num_blocks,
                           std::array<bool, 2> needed, const Group& group));

// --- fixed_activation.cpp: in fp32 or wider, rounded once; the bits of an element depend on
// nothing but that element ---

PARALLEL_EXT_OP(fixed_sigmoid, at::Tensor(const at::Tensor& input));
PARALLEL_EXT_OP(fixed_sigmoid_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& input));

// input * sigmoid(input).
PARALLEL_EXT_OP(fixed_silu, at::Tensor(const at::Tensor& input));
PARALLEL_EXT_OP(fixed_silu_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& input));

// gelu by tanh.
PARALLEL_EXT_OP(fixed_gelu, at::Tensor(const at::Tensor& input));
PARALLEL_EXT_OP(fixed_gelu_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& input));

// --- leaves.cpp ---

// Values [...] of nodes of a tree, by the start and the width of each (base/tree.h) -> [...] their
// sum in `dtype`, added in fp32 or wider. No gradients.
PARALLEL_EXT_OP(sum_leaves,
                at::Tensor(at::TensorList values, at::IntArrayRef nodes, at::ScalarType dtype));

// --- dropout.cpp ---

// input [..., K] -> the same shape: 0 with the probability `dropout`, else input / (1 - dropout).
// `dropout_counter` {key, step, token, feature} is the counter of the mask at the first element of
// the input (linear/dropout.h). Backward draws the mask again.
PARALLEL_EXT_OP(seeded_dropout, at::Tensor(const at::Tensor& input, double dropout,
                                           at::IntArrayRef dropout_counter));
PARALLEL_EXT_OP(seeded_dropout_backward, at::Tensor(const at::Tensor& grad_output, double dropout,
                                                    at::IntArrayRef dropout_counter));

// --- linear_lora.cpp ---

// input [..., K], weight [F, K], lora_a [r, K], lora_b [F, r], bias [F] -> [..., F]:
// input weight^T + scale (dropout(input) lora_a^T) lora_b^T. The mask is that of seeded_dropout;
// its counter is {} where the probability is 0. Row-parallel (a group): weight and
// lora_a are sharded by columns; the partial results are summed over the group, then the replicated
// bias is added. Column-parallel (a rank alone): weight and lora_b are sharded by rows; the
// gradients of the replicated input and of lora_a are partial.
PARALLEL_EXT_OP(lora_linear,
                at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& lora_a, const at::Tensor& lora_b,
                           const std::optional<at::Tensor>& bias, double scale, double dropout,
                           at::IntArrayRef dropout_counter, const Group& group));

// -> the output; and lora_a_out = lora_a dropout(input)^T [r, T], not scaled, for backward.
PARALLEL_EXT_OP(lora_linear_forward,
                Tensors<2>(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& lora_a, const at::Tensor& lora_b,
                           const std::optional<at::Tensor>& bias, double scale, double dropout,
                           at::IntArrayRef dropout_counter, const Group& group));

// grad_output [..., F] -> gradients of input, weight, lora_a, lora_b, bias; local.
PARALLEL_EXT_OP(lora_linear_backward,
                Tensors<5>(const at::Tensor& grad_output, const at::Tensor& input,
                           const at::Tensor& weight, const at::Tensor& lora_a,
                           const at::Tensor& lora_b, const at::Tensor& lora_a_out, double scale,
                           double dropout, at::IntArrayRef dropout_counter,
                           std::array<bool, 5> needed));

}  // namespace parallel_ext
