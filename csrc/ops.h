// Every op of the package, declared once, as a function that calls it through the dispatcher.
//
// Shapes: T tokens, H hidden, V vocabulary (true size). "Replicated" means equal on all ranks of
// the group, "sharded" that each rank holds its own range, "partial" that the sum over the ranks is
// the value. A group of size 1 communicates nothing. Gradients that are not `needed` are [0]. A
// Group, an ExchangePlan and a VocabLoss stand for several arguments of the schema each.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "comm/comm.h"
#include "moe/exchange.h"
#include "op.h"
#include "vocab/loss.h"

namespace parallel_ext {

// --- linear/region.cpp: the borders of a parallel region ---

// partial [..., H] -> replicated [..., H]. Backward: identity.
PARALLEL_EXT_OP(reduce_from_region, at::Tensor(const at::Tensor& partial, const Group& group));

// replicated [..., H] -> replicated [..., H]. Backward: sums the ranks' partial gradients.
PARALLEL_EXT_OP(copy_to_region, at::Tensor(const at::Tensor& input, const Group& group));

// sharded [..., sizes[rank]] -> replicated [..., sum(sizes)]. Backward: this rank's slice.
PARALLEL_EXT_OP(gather_from_region, at::Tensor(const at::Tensor& shard, at::IntArrayRef sizes,
                                               int64_t rank, const Group& group));

// --- linear/tokens.cpp: the borders of a region between which each rank has tokens of its own ---

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

// --- linear/linear.cpp ---

// replicated input [..., K], weight rows [F, K] of this rank -> sharded [..., F], in rows of
// `row_stride` >= F elements. Backward: the input's gradient is summed over the group while the
// weight's is computed. With a group of size 1 that sum is left to the caller (copy_to_region).
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

// --- linear/block_linear.cpp: bits that do not depend on the layout. `blocks`: start and stop of
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

// --- linear/block_bias.cpp ---

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

// --- linear/fixed_activation.cpp: in fp32 or wider, rounded once; the bits of an element depend on
// nothing but that element ---

// input * sigmoid(input).
PARALLEL_EXT_OP(fixed_silu, at::Tensor(const at::Tensor& input));
PARALLEL_EXT_OP(fixed_silu_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& input));

// gelu by tanh.
PARALLEL_EXT_OP(fixed_gelu, at::Tensor(const at::Tensor& input));
PARALLEL_EXT_OP(fixed_gelu_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& input));

// --- linear/leaves.cpp ---

// Values [...] of nodes of a tree, by the start and the width of each (base/tree.h) -> [...] their
// sum in `dtype`, added in fp32 or wider. No gradients.
PARALLEL_EXT_OP(sum_leaves,
                at::Tensor(at::TensorList values, at::IntArrayRef nodes, at::ScalarType dtype));

// --- linear/dropout.cpp ---

// input [..., K] -> the same shape: 0 with the probability `dropout`, else input / (1 - dropout).
// `dropout_counter` {key, step, token, feature} is the counter of the mask at the first element of
// the input (linear/dropout.h). Backward draws the mask again.
PARALLEL_EXT_OP(seeded_dropout, at::Tensor(const at::Tensor& input, double dropout,
                                           at::IntArrayRef dropout_counter));
PARALLEL_EXT_OP(seeded_dropout_backward, at::Tensor(const at::Tensor& grad_output, double dropout,
                                                    at::IntArrayRef dropout_counter));

// --- linear/linear_lora.cpp ---

// input [..., K], weight [F, K], lora_a [r, K], lora_b [F, r], bias [F] -> [..., F]:
// input weight^T + scale (dropout(input) lora_a^T) lora_b^T. The mask is that of seeded_dropout;
// its counter is {} where the probability is 0. Row-parallel (a group larger than one): weight and
// lora_a are sharded by columns; the partial results are summed over the group, then the replicated
// bias is added. Column-parallel (a group of one): weight and lora_b are sharded by rows; the
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

// --- vocab/embedding.cpp ---

// replicated ids [...], rows [vocab_start, vocab_start + R) of the table as weight [R, H], sizes
// [ranks] the rows of every rank, empty for those of split() -> replicated [..., H], the bits of
// the rows. A group of one gives zeros for the rows of other ranks and ignores `sizes`. Row
// `padding_idx` (global), if given, gets no gradient.
PARALLEL_EXT_OP(vocab_embedding,
                at::Tensor(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                           int64_t vocab_start, std::optional<int64_t> padding_idx,
                           at::IntArrayRef sizes, const Group& group));

// replicated grad_output [..., H] -> sharded [num_rows, H]; local.
PARALLEL_EXT_OP(vocab_embedding_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& ids,
                           c10::SymInt num_rows, int64_t vocab_start,
                           std::optional<int64_t> padding_idx));

// --- vocab/embedding_tokens.cpp: each rank has tokens[rank] of the S tokens of a sequence ---

// replicated ids [..., S], sharded table as weight (`sizes` as above) -> the rows of this rank's
// tokens, [..., tokens[rank], H]. Backward: each rank sums the gradients of its own rows.
PARALLEL_EXT_OP(vocab_embedding_of_tokens,
                at::Tensor(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                           int64_t vocab_start, std::optional<int64_t> padding_idx,
                           at::IntArrayRef sizes, at::IntArrayRef tokens, int64_t rank,
                           const Group& group));

// this rank's tokens grad_output [..., tokens[rank], H] -> sharded [num_rows, H].
PARALLEL_EXT_OP(vocab_embedding_of_tokens_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& ids,
                           c10::SymInt num_rows, int64_t vocab_size, int64_t vocab_start,
                           std::optional<int64_t> padding_idx, at::IntArrayRef sizes,
                           at::IntArrayRef tokens, int64_t rank, const Group& group));

// --- vocab/cross_entropy.cpp ---

// sharded logits [T, vocab_stop - vocab_start], replicated labels [T] in [0, V) or ignore_index ->
// four replicated tensors, the same bits on every rank: the loss, [T] for reduction "none" and []
// for "sum" and "mean"; and for each token, where `wanted`, else [0], the log-sum-exp, the entropy
// and the lowest id of the largest, all of softcap * tanh(logit_scale * logits / softcap). fp32, or
// fp64 for fp64 logits; ids int64. The first three have gradients. With `consume_logits` backward
// writes the logits' gradient over the logits.
PARALLEL_EXT_OP(vocab_cross_entropy, Tensors<4>(const at::Tensor& logits, const at::Tensor& labels,
                                                std::array<bool, 3> wanted, bool consume_logits,
                                                const Group& group, const VocabLoss& loss));

// -> the four tensors above; and the normalizer, [2, T] or, with the entropy, [3, T]: the maximum
// over the whole vocabulary, the log of the sum of exp(logit - maximum), the entropy.
PARALLEL_EXT_OP(vocab_cross_entropy_forward,
                Tensors<5>(const at::Tensor& logits, const at::Tensor& labels,
                           std::array<bool, 3> wanted, const Group& group, const VocabLoss& loss));

// replicated gradients of the loss ([T] or []), log-sum-exp and entropy ([T]), if any -> sharded
// gradient of the logits, in their dtype and row stride; local.
PARALLEL_EXT_OP(vocab_cross_entropy_backward,
                at::Tensor(const std::optional<at::Tensor>& grad_loss,
                           const std::optional<at::Tensor>& grad_log_sum_exp,
                           const std::optional<at::Tensor>& grad_entropy, const at::Tensor& logits,
                           const at::Tensor& labels, const at::Tensor& normalizer,
                           const VocabLoss& loss));

// vocab_cross_entropy_backward that writes over the logits, whose columns must be one apart.
PARALLEL_EXT_OP(vocab_cross_entropy_backward_,
                void(const std::optional<at::Tensor>& grad_loss,
                     const std::optional<at::Tensor>& grad_log_sum_exp,
                     const std::optional<at::Tensor>& grad_entropy, at::Tensor& logits,
                     const at::Tensor& labels, const at::Tensor& normalizer,
                     const VocabLoss& loss));

// --- vocab/linear_cross_entropy.cpp ---

// vocab_cross_entropy of column_linear(input, head_weight, head_bias), whose logits are made a tile
// at a time: replicated input [T, H], rows [vocab_start, vocab_stop) of the head as head_weight
// [Vl, H] and head_bias [Vl] -> the four tensors of vocab_cross_entropy. Backward: the input's
// gradient is summed over the group. With sizes each rank has tokens of its own,
// input [B, sizes[rank], H] and its gradient; T = B * sum(sizes).
PARALLEL_EXT_OP(linear_vocab_cross_entropy,
                Tensors<4>(const at::Tensor& input, const at::Tensor& head_weight,
                           const std::optional<at::Tensor>& head_bias, const at::Tensor& labels,
                           std::array<bool, 3> wanted, at::IntArrayRef sizes, int64_t rank,
                           const Group& group, const VocabLoss& loss));

// -> the four tensors; the normalizer of vocab_cross_entropy_forward; and what is computed ahead
// (vocab/linear_cross_entropy.h) in fp32 or fp64, [0] where nothing is: the expected row of each
// token, sum of p * row over this rank's ids; the gradients of input (partial), head_weight and
// head_bias that are `needed`.
PARALLEL_EXT_OP(linear_vocab_cross_entropy_forward,
                Tensors<9>(const at::Tensor& input, const at::Tensor& head_weight,
                           const std::optional<at::Tensor>& head_bias, const at::Tensor& labels,
                           std::array<bool, 3> wanted, std::array<bool, 3> needed,
                           const Group& group, const VocabLoss& loss));

// -> gradients of input (partial), head_weight, head_bias; computes the logits again. Local.
PARALLEL_EXT_OP(linear_vocab_cross_entropy_backward,
                Tensors<3>(const std::optional<at::Tensor>& grad_loss,
                           const std::optional<at::Tensor>& grad_log_sum_exp,
                           const std::optional<at::Tensor>& grad_entropy, const at::Tensor& input,
                           const at::Tensor& head_weight,
                           const std::optional<at::Tensor>& head_bias, const at::Tensor& labels,
                           const at::Tensor& normalizer, std::array<bool, 3> needed,
                           const VocabLoss& loss));

// expected_rows [T, H] of a loss without softcap -> the partial gradient of the input, for a head
// without gradients. Local.
PARALLEL_EXT_OP(linear_vocab_cross_entropy_frozen_backward,
                at::Tensor(const std::optional<at::Tensor>& grad_loss,
                           const std::optional<at::Tensor>& grad_log_sum_exp,
                           const at::Tensor& expected_rows, const at::Tensor& head_weight,
                           const at::Tensor& labels, const at::Tensor& normalizer,
                           const VocabLoss& loss));

// --- vocab/block_cross_entropy.cpp ---

// The loss of linear_vocab_cross_entropy with bits that do not depend on the layout, from the
// statistics of all `num_blocks` blocks of the vocabulary; `blocks` as of block_linears. An adapter
// adds replicated lora_a_out [T, R] times lora_b [V of this rank, R] to the logits; R = 0 for none.
// Backward: the gradients of input and lora_a_out are summed over the tree of the blocks.
PARALLEL_EXT_OP(block_linear_cross_entropy,
                at::Tensor(const at::Tensor& input, const at::Tensor& head_weight,
                           const at::Tensor& lora_a_out, const at::Tensor& lora_b,
                           const at::Tensor& labels, at::IntArrayRef blocks, int64_t num_blocks,
                           const Group& group, const VocabLoss& loss));

// -> the loss; the gradients of input, head_weight, lora_a_out and lora_b that are `needed`.
PARALLEL_EXT_OP(block_linear_cross_entropy_forward,
                Tensors<5>(const at::Tensor& input, const at::Tensor& head_weight,
                           const at::Tensor& lora_a_out, const at::Tensor& lora_b,
                           const at::Tensor& labels, at::IntArrayRef blocks, int64_t num_blocks,
                           std::array<bool, 4> needed, const Group& group, const VocabLoss& loss));

// --- vocab/sample.cpp: the next token of B rows, from sharded logits
// [B, vocab_stop - vocab_start] -> replicated ids [B], int64 ---

// The lowest id of the largest logit, or of the first NaN.
PARALLEL_EXT_OP(vocab_argmax,
                at::Tensor(const at::Tensor& logits, int64_t vocab_size, int64_t vocab_start,
                           int64_t vocab_stop, const Group& group));

// One draw from softmax(logits / temperature) among the ids that the filters leave, which apply one
// after the other: top_k (0: off), top_p (1: off) and min_p (0: off); -1 where the largest logit is
// not finite. The random number for an id of row r depends on seed, step, r and the id alone.
// Logits are used in fp32.
PARALLEL_EXT_OP(vocab_sample,
                at::Tensor(const at::Tensor& logits, int64_t vocab_size, int64_t vocab_start,
                           int64_t vocab_stop, double temperature, int64_t top_k, double top_p,
                           double min_p, int64_t seed, int64_t step, const Group& group));

// --- moe/route.cpp: E experts, each of T tokens chooses top_k of them ---

// expert_ids [T, top_k] in [0, E), where the ranks hold experts_per_rank of the E in order ->
// counts [E]: choices of each expert; rows_per_rank [ranks]: rows in the message to each;
// rows_of_choices [T, top_k]: the row, among those of all messages, that serves a choice;
// sources [N = T * top_k]: the choices, token * top_k + number, in the order of (expert, token,
// choice), which is that of the *slots*; tokens [N]: the token of each row, zeros after the last
// row. Where that saves bytes, a message to another rank than `rank`, this one, holds a token's row
// of row_bytes once, else once for each choice. int64; no gradient.
PARALLEL_EXT_OP(moe_route_plan,
                Tensors<5>(const at::Tensor& expert_ids, at::IntArrayRef experts_per_rank,
                           int64_t row_bytes, int64_t rank));

// --- moe/dispatch.cpp: tokens at home on this rank, experts on the ranks of a group ---

// input [T, H], weights [T, top_k] -> rows [M, H] of this rank's experts in the order of (expert,
// rank that they come from, token); weights [M] of these rows in fp32 or wider; origins [M], int64:
// the number that each of these rows had when it arrived. Backward: the gradients travel back.
PARALLEL_EXT_OP(moe_dispatch,
                Tensors<3>(const at::Tensor& input, const at::Tensor& weights,
                           const at::Tensor& rows_of_choices, const at::Tensor& sources,
                           const at::Tensor& tokens, const ExchangePlan& plan));

// -> gradients of input and weights.
PARALLEL_EXT_OP(moe_dispatch_backward,
                Tensors<2>(const at::Tensor& grad_rows, const at::Tensor& grad_weights,
                           const at::Tensor& rows_of_choices, const at::Tensor& sources,
                           const at::Tensor& origins, at::ScalarType weights_dtype,
                           std::array<bool, 2> needed, const ExchangePlan& plan));

// rows [M, H] of this rank's experts -> [T, H]: at home, the sum over each token's choices; in fp32
// or wider on each rank, rounded before it travels and at the end.
PARALLEL_EXT_OP(moe_combine, at::Tensor(const at::Tensor& rows, const at::Tensor& origins,
                                        const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                                        const ExchangePlan& plan));

// grad_output [T, H] -> gradient of the rows.
PARALLEL_EXT_OP(moe_combine_backward,
                at::Tensor(const at::Tensor& grad_output, const at::Tensor& origins,
                           const at::Tensor& tokens, const ExchangePlan& plan));

// --- moe/gated_silu.cpp, moe/linear.cpp: the rows of this rank's experts ---

// gate_up [M, 2 I], weights [M] -> [M, I]: silu(gate) * up * weight in fp32 or wider.
PARALLEL_EXT_OP(moe_gated_silu, at::Tensor(const at::Tensor& gate_up, const at::Tensor& weights));

// -> gradients of gate_up and weights.
PARALLEL_EXT_OP(moe_gated_silu_backward,
                Tensors<2>(const at::Tensor& grad_output, const at::Tensor& gate_up,
                           const at::Tensor& weights));

// rows [N, K] in expert order, counts[e] for each of the weights [e, F, K] -> [N, F]: each row
// times the weight of its expert.
PARALLEL_EXT_OP(moe_linear, at::Tensor(const at::Tensor& rows, const at::Tensor& weight,
                                       at::IntArrayRef counts, double weight_grad_scale));

// -> gradients of rows and weight; the weight's is multiplied by `weight_grad_scale`, and zero for
// an expert without rows.
PARALLEL_EXT_OP(moe_linear_backward,
                Tensors<2>(const at::Tensor& grad_output, const at::Tensor& rows,
                           const at::Tensor& weight, at::IntArrayRef counts,
                           std::array<bool, 2> needed, double weight_grad_scale));

// moe_linear with counts [e], int64, on the device of the rows: the host does not read them where
// torch has a grouped product for the rows, and then nobody checks that they add up to N.
PARALLEL_EXT_OP(moe_linear_on_device,
                at::Tensor(const at::Tensor& rows, const at::Tensor& weight,
                           const at::Tensor& counts, double weight_grad_scale));
PARALLEL_EXT_OP(moe_linear_on_device_backward,
                Tensors<2>(const at::Tensor& grad_output, const at::Tensor& rows,
                           const at::Tensor& weight, const at::Tensor& counts,
                           std::array<bool, 2> needed, double weight_grad_scale));

// --- moe/block_experts.cpp: bits that do not depend on the layout ---

// rows [N, K] in the order of experts and of an expert in that of leaves, counts [e c] of them,
// weights [c, e, F, K], once for each leaf -> [N, F]: each row times the weight of its expert.
PARALLEL_EXT_OP(block_experts, at::Tensor(const at::Tensor& rows, const at::Tensor& weight,
                                          at::IntArrayRef counts));

// -> gradients of rows and weight, zero for a leaf without rows.
PARALLEL_EXT_OP(block_experts_backward,
                Tensors<2>(const at::Tensor& grad_output, const at::Tensor& rows,
                           const at::Tensor& weight, at::IntArrayRef counts,
                           std::array<bool, 2> needed));

// --- moe/linear_lora.cpp ---

// rows [N, K] in expert order, counts[e] for each of the weights [e, F, K], lora_a [e, r, K],
// lora_b [e, F, r] -> [N, F]: rows weight^T + scale (rows lora_a^T) lora_b^T, each row with the
// factors of its expert.
PARALLEL_EXT_OP(moe_lora_linear,
                at::Tensor(const at::Tensor& rows, const at::Tensor& weight,
                           const at::Tensor& lora_a, const at::Tensor& lora_b,
                           at::IntArrayRef counts, double scale, double weight_grad_scale));

// -> the output; and lora_a_out = rows lora_a^T [N, r], not scaled, for backward.
PARALLEL_EXT_OP(moe_lora_linear_forward,
                Tensors<2>(const at::Tensor& rows, const at::Tensor& weight,
                           const at::Tensor& lora_a, const at::Tensor& lora_b,
                           at::IntArrayRef counts, double scale));

// -> gradients of rows, weight, lora_a, lora_b; all but that of the rows are multiplied by
// `weight_grad_scale`, and zero for an expert without rows.
PARALLEL_EXT_OP(moe_lora_linear_backward,
                Tensors<4>(const at::Tensor& grad_output, const at::Tensor& rows,
                           const at::Tensor& weight, const at::Tensor& lora_a,
                           const at::Tensor& lora_b, const at::Tensor& lora_a_out,
                           at::IntArrayRef counts, double scale, std::array<bool, 4> needed,
                           double weight_grad_scale));

// --- moe/tokens.cpp: sizes[rank] of the T = sum(sizes) tokens for each rank of a tp group ---

// replicated input [T, H] and weights [T, top_k] -> sharded [sizes[rank], H] and
// [sizes[rank], top_k]. Backward: the gradients of all ranks' rows, in one message.
PARALLEL_EXT_OP(moe_take_tokens,
                Tensors<2>(const at::Tensor& input, const at::Tensor& weights,
                           at::IntArrayRef sizes, int64_t rank, const Group& group));

// sharded [sizes[rank], H] and [sizes[rank], top_k] -> replicated gradients of input and weights.
PARALLEL_EXT_OP(moe_take_tokens_backward,
                Tensors<2>(const at::Tensor& grad_input, const at::Tensor& grad_weights,
                           at::IntArrayRef sizes, std::array<bool, 2> needed, int64_t rank,
                           const Group& group));

// sharded [sizes[rank], H] -> replicated [T, H]. Backward: this rank's rows.
PARALLEL_EXT_OP(moe_gather_tokens, at::Tensor(const at::Tensor& slice, at::IntArrayRef sizes,
                                              int64_t rank, const Group& group));

}  // namespace parallel_ext
