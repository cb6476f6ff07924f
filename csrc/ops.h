// Every op of the package, declared once. Shapes: T tokens, H hidden, V vocabulary (true size),
// "replicated" means equal on all ranks of the group, "sharded" that each rank holds its range,
// "partial" that the sum over the ranks is the value. `group_size` and `group_name` name the
// tensor-parallel group; a group of size 1 communicates nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace parallel_ext {

struct VocabLoss;  // vocab/loss.h

// --- linear/region.cpp: the borders of a tensor-parallel region ---

// partial [..., H] -> replicated [..., H]. Backward: identity.
at::Tensor reduce_from_region(const at::Tensor& partial, int64_t group_size,
                              const std::string& group_name);

// replicated [..., H] -> replicated [..., H]. Backward: sums the ranks' partial gradients.
at::Tensor copy_to_region(const at::Tensor& input, int64_t group_size,
                          const std::string& group_name);

// sharded [..., sizes[rank]] -> replicated [..., sum(sizes)]. Backward: this rank's slice.
at::Tensor gather_from_region(const at::Tensor& shard, at::IntArrayRef sizes, int64_t rank,
                              int64_t group_size, const std::string& group_name);

// --- linear/linear.cpp ---

// replicated input [..., K], weight rows [F, K] of this rank -> sharded [..., F], in rows of
// `row_stride` >= F elements. Backward: the input's gradient is summed over the group while the
// weight's is computed. With a group of size 1 that sum is left to the caller (copy_to_region).
at::Tensor column_linear(const at::Tensor& input, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, int64_t row_stride,
                         int64_t group_size, const std::string& group_name);

// -> gradients of input, weight, bias; an empty tensor where `needed` is false.
std::tuple<at::Tensor, at::Tensor, at::Tensor> column_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    std::array<bool, 3> needed, int64_t group_size, const std::string& group_name);

// sharded input [..., K], weight columns [F, K] of this rank -> replicated [..., F]: the partial
// products are summed over the group, then the replicated bias [F] is added once. Backward: local.
at::Tensor row_linear(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, int64_t group_size,
                      const std::string& group_name);

// --- linear/linear_lora.cpp ---

// input [..., K], weight [F, K], lora_a [r, K], lora_b [F, r], bias [F] -> [..., F]:
// input weight^T + scale (dropout(input) lora_a^T) lora_b^T; what a rank holds of each follows the
// base. `dropout` is the probability of a zero, and {key, step, token, feature} the counter of the
// mask at the first element of the input (linear/dropout.h); {} where the probability is 0.
// A group larger than one sums the partial results over it, then adds the replicated bias: the
// base is cut by columns, and so is lora_a. For a base cut by rows, as lora_b then is, the group is
// one, and the gradients of the replicated input and lora_a are partial.
at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
                       const at::Tensor& lora_b, const std::optional<at::Tensor>& bias,
                       double scale, double dropout, at::IntArrayRef dropout_counter,
                       int64_t group_size, const std::string& group_name);

// -> the output, and lora_a dropout(input)^T, not scaled, as [r, T] for backward.
std::tuple<at::Tensor, at::Tensor> lora_linear_forward(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& lora_a,
    const at::Tensor& lora_b, const std::optional<at::Tensor>& bias, double scale, double dropout,
    at::IntArrayRef dropout_counter, int64_t group_size, const std::string& group_name);

// grad_output [..., F] -> gradients of input, weight, lora_a, lora_b, bias as `needed` says, else
// [0]; local.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> lora_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& lora_a, const at::Tensor& lora_b, const at::Tensor& low, double scale,
    double dropout, at::IntArrayRef dropout_counter, std::array<bool, 5> needed);

// --- vocab/embedding.cpp ---

// replicated ids [...], rows [vocab_start, vocab_start + R) of the table as weight [R, H], sizes
// [ranks] the rows of every rank, empty for those of split() -> replicated [..., H], the bits of
// the rows. A group of one gives zeros for rows that it has not, whatever sizes says. Row
// `padding_idx` (global), if given, gets no gradient.
at::Tensor vocab_embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                           int64_t vocab_start, std::optional<int64_t> padding_idx,
                           at::IntArrayRef sizes, int64_t group_size,
                           const std::string& group_name);

// replicated grad_output [..., H] -> sharded [num_rows, H]; local.
at::Tensor vocab_embedding_backward(const at::Tensor& grad_output, const at::Tensor& ids,
                                    c10::SymInt num_rows, int64_t vocab_start,
                                    std::optional<int64_t> padding_idx);

// --- vocab_cross_entropy*.cpp: a VocabLoss stands for the last arguments of the op ---

// sharded logits [T, vocab_stop - vocab_start], replicated labels [T] in [0, V) or ignore_index ->
// four replicated tensors, the same bits on every rank: the loss, [T] for reduction "none" and []
// for "sum" and "mean"; and, where `wanted`, else [0], of each token the log-sum-exp, the entropy
// and the lowest id of the largest, all of softcap * tanh(logit_scale * logits / softcap). fp32, or
// fp64 for fp64 logits; ids int64. The first three have gradients. With `consume_logits` backward
// writes that of the logits over them.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> vocab_cross_entropy(
    const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels,
    std::array<bool, 3> wanted, bool consume_logits, int64_t group_size,
    const std::string& group_name);

// -> the four as above, and [2, T] or, with the entropy, [3, T]: the maximum over the whole
// vocabulary, the log of the sum of exp(logit - maximum), the entropy.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> vocab_cross_entropy_forward(
    const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels,
    std::array<bool, 3> wanted, int64_t group_size, const std::string& group_name);

// replicated gradients of the loss ([T] or []), log-sum-exp and entropy ([T]), if any -> sharded
// gradient of the logits, in their dtype and row stride; local.
at::Tensor vocab_cross_entropy_backward(const VocabLoss& loss,
                                        const std::optional<at::Tensor>& grad_loss,
                                        const std::optional<at::Tensor>& grad_log_sum_exp,
                                        const std::optional<at::Tensor>& grad_entropy,
                                        const at::Tensor& logits, const at::Tensor& labels,
                                        const at::Tensor& normalizer);

// The same, written over the logits, whose columns are one apart.
void vocab_cross_entropy_backward_(const VocabLoss& loss,
                                   const std::optional<at::Tensor>& grad_loss,
                                   const std::optional<at::Tensor>& grad_log_sum_exp,
                                   const std::optional<at::Tensor>& grad_entropy,
                                   at::Tensor& logits, const at::Tensor& labels,
                                   const at::Tensor& normalizer);

// --- linear_vocab_cross_entropy*.cpp ---

// vocab_cross_entropy of column_linear(input, head_weight, head_bias), whose logits are made a tile
// at a time: replicated input [T, H], rows [vocab_start, vocab_stop) of the head as head_weight
// [Vl, H] and head_bias [Vl] -> the four of vocab_cross_entropy. Backward: the input's gradient is
// summed over the group.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> linear_vocab_cross_entropy(
    const VocabLoss& loss, const at::Tensor& input, const at::Tensor& head_weight,
    const std::optional<at::Tensor>& head_bias, const at::Tensor& labels,
    std::array<bool, 3> wanted, int64_t group_size, const std::string& group_name);

// -> the four; the normalizer, as of vocab_cross_entropy_forward; and what is computed ahead
// (vocab/linear_cross_entropy.h) in fp32 or fp64, [0] where nothing is: the expected row of each
// token, sum of p * row over this rank's ids; the gradients of input (partial), head_weight and
// head_bias that are `needed`.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
           at::Tensor, at::Tensor>
linear_vocab_cross_entropy_forward(const VocabLoss& loss, const at::Tensor& input,
                                   const at::Tensor& head_weight,
                                   const std::optional<at::Tensor>& head_bias,
                                   const at::Tensor& labels, std::array<bool, 3> wanted,
                                   std::array<bool, 3> needed, int64_t group_size,
                                   const std::string& group_name);

// -> gradients of input (partial), head_weight, head_bias as `needed` says, else [0]; makes the
// logits again. Local, like the next.
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_vocab_cross_entropy_backward(
    const VocabLoss& loss, const std::optional<at::Tensor>& grad_loss,
    const std::optional<at::Tensor>& grad_log_sum_exp,
    const std::optional<at::Tensor>& grad_entropy, const at::Tensor& input,
    const at::Tensor& head_weight, const std::optional<at::Tensor>& head_bias,
    const at::Tensor& labels, const at::Tensor& normalizer, std::array<bool, 3> needed);

// expected_rows [T, H] of a loss without softcap -> the partial gradient of the input, where the
// head has none.
at::Tensor linear_vocab_cross_entropy_frozen_backward(
    const VocabLoss& loss, const std::optional<at::Tensor>& grad_loss,
    const std::optional<at::Tensor>& grad_log_sum_exp, const at::Tensor& expected_rows,
    const at::Tensor& head_weight, const at::Tensor& labels, const at::Tensor& normalizer);

// --- vocab_sample*.cpp: the next token of B rows, from sharded logits
// [B, vocab_stop - vocab_start] -> replicated ids [B], int64 ---

// The lowest id of the largest logit, or of the first NaN.
at::Tensor vocab_argmax(const at::Tensor& logits, int64_t vocab_size, int64_t vocab_start,
                        int64_t vocab_stop, int64_t group_size, const std::string& group_name);

// One draw from softmax(logits / temperature), of what top_k (0: off), top_p (1: off) and min_p (0:
// off) leave, one after the other; -1 where the largest logit is not finite. The random number of
// an id of row r depends on seed, step, r and the id alone. Logits go by their fp32 value.
at::Tensor vocab_sample(const at::Tensor& logits, int64_t vocab_size, int64_t vocab_start,
                        int64_t vocab_stop, double temperature, int64_t top_k, double top_p,
                        double min_p, int64_t seed, int64_t step, int64_t group_size,
                        const std::string& group_name);

// --- moe/route.cpp: E experts, each of T tokens chooses top_k of them ---

// expert_ids [T, top_k] in [0, E), where the ranks hold experts_per_rank of the E in order ->
// counts [E]: choices of each expert; rows_per_rank [ranks]: rows in the message to each;
// rows_of_choices [T, top_k]: the row, among those of all messages, that serves a choice;
// sources [N = T * top_k]: the choices, token * top_k + number, in the order of (expert, token,
// choice), which is that of the *slots*; tokens [N]: the token of each row, zeros after the last
// row. A rank but `rank`, the own one, gets a token's row of row_bytes once where that saves bytes,
// else once for each choice. int64; no gradient.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_route_plan(
    const at::Tensor& expert_ids, at::IntArrayRef experts_per_rank, int64_t row_bytes,
    int64_t rank);

// --- moe/dispatch.cpp: tokens at home on this rank, experts on the ranks of a group ---
// send [E + ranks]: this rank's counts, and its rows_per_rank. receive [ranks * (own experts + 1)]:
// the counts of each rank for this one's experts, and its rows for this one.

// input [T, H], weights [T, top_k] -> rows [M, H] of this rank's experts in the order of (expert,
// rank that they come from, token); weights [M] of these rows in fp32 or wider; origins [M], int64:
// which of the rows that arrived this is. Backward: the gradients travel back.
std::tuple<at::Tensor, at::Tensor, at::Tensor> moe_dispatch(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& rows_of_choices,
    const at::Tensor& sources, const at::Tensor& tokens, at::IntArrayRef send,
    at::IntArrayRef receive, at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
    const std::string& group_name);

// -> gradients of input and weights; the latter [0] where not needed[1].
std::tuple<at::Tensor, at::Tensor> moe_dispatch_backward(
    const at::Tensor& grad_rows, const at::Tensor& grad_weights, const at::Tensor& rows_of_choices,
    const at::Tensor& sources, const at::Tensor& origins, at::ScalarType weights_dtype,
    std::array<bool, 2> needed, at::IntArrayRef send, at::IntArrayRef receive,
    at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
    const std::string& group_name);

// rows [M, H] of this rank's experts -> [T, H]: at home, the sum over each token's choices; in fp32
// or wider on each rank, rounded before it travels and at the end.
at::Tensor moe_combine(const at::Tensor& rows, const at::Tensor& origins,
                       const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                       at::IntArrayRef send, at::IntArrayRef receive,
                       at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                       const std::string& group_name);

// grad_output [T, H] -> gradient of the rows.
at::Tensor moe_combine_backward(const at::Tensor& grad_output, const at::Tensor& origins,
                                const at::Tensor& tokens, at::IntArrayRef send,
                                at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                int64_t rank, int64_t group_size, const std::string& group_name);

// --- moe/gated_silu.cpp, moe/linear.cpp: the rows of this rank's experts ---

// gate_up [M, 2 I], weights [M] -> [M, I]: silu(gate) * up * weight, in fp32 or wider, rounded
// once.
at::Tensor moe_gated_silu(const at::Tensor& gate_up, const at::Tensor& weights);

// -> gradients of gate_up and weights.
std::tuple<at::Tensor, at::Tensor> moe_gated_silu_backward(const at::Tensor& grad_output,
                                                           const at::Tensor& gate_up,
                                                           const at::Tensor& weights);

// rows [N, K] in expert order, counts[e] for each of the weights [e, F, K] -> [N, F]: each row
// times the weight of its expert.
at::Tensor moe_linear(const at::Tensor& rows, const at::Tensor& weight, at::IntArrayRef counts,
                      double weight_grad_scale);

// -> gradients of rows and weight, that of the weight times `weight_grad_scale` and zeros for an
// expert without rows; [0] where not `needed`.
std::tuple<at::Tensor, at::Tensor> moe_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& rows, const at::Tensor& weight,
    at::IntArrayRef counts, std::array<bool, 2> needed, double weight_grad_scale);

// --- moe/linear_lora.cpp ---

// rows [N, K] in expert order, counts[e] for each of the weights [e, F, K], lora_a [e, r, K],
// lora_b [e, F, r] -> [N, F]: rows weight^T + scale (rows lora_a^T) lora_b^T, each row by those of
// its expert.
at::Tensor moe_lora_linear(const at::Tensor& rows, const at::Tensor& weight,
                           const at::Tensor& lora_a, const at::Tensor& lora_b,
                           at::IntArrayRef counts, double scale, double weight_grad_scale);

// -> the output, and rows lora_a^T, not scaled, as [N, r] for backward.
std::tuple<at::Tensor, at::Tensor> moe_lora_linear_forward(const at::Tensor& rows,
                                                           const at::Tensor& weight,
                                                           const at::Tensor& lora_a,
                                                           const at::Tensor& lora_b,
                                                           at::IntArrayRef counts, double scale);

// -> gradients of rows, weight, lora_a, lora_b; all but that of the rows times
// `weight_grad_scale` and zeros for an expert without rows; [0] where not `needed`.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_lora_linear_backward(
    const at::Tensor& grad_output, const at::Tensor& rows, const at::Tensor& weight,
    const at::Tensor& lora_a, const at::Tensor& lora_b, const at::Tensor& low,
    at::IntArrayRef counts, double scale, std::array<bool, 4> needed, double weight_grad_scale);

// --- moe/tokens.cpp: sizes[rank] of the T = sum(sizes) tokens for each rank of a tp group ---

// replicated input [T, H] and weights [T, top_k] -> sharded [sizes[rank], H] and
// [sizes[rank], top_k]. Backward: the gradients of all ranks' rows, in one message.
std::tuple<at::Tensor, at::Tensor> moe_take_tokens(const at::Tensor& input,
                                                   const at::Tensor& weights, at::IntArrayRef sizes,
                                                   int64_t rank, int64_t group_size,
                                                   const std::string& group_name);

// sharded [sizes[rank], H] and [sizes[rank], top_k] -> replicated gradients of input and weights;
// [0] where not `needed`.
std::tuple<at::Tensor, at::Tensor> moe_take_tokens_backward(
    const at::Tensor& grad_input, const at::Tensor& grad_weights, at::IntArrayRef sizes,
    std::array<bool, 2> needed, int64_t rank, int64_t group_size, const std::string& group_name);

// sharded [sizes[rank], H] -> replicated [T, H]. Backward: this rank's rows.
at::Tensor moe_gather_tokens(const at::Tensor& slice, at::IntArrayRef sizes, int64_t rank,
                             int64_t group_size, const std::string& group_name);

}  // namespace parallel_ext
