// The ops of this room, in the words of linear/ops.h. An ExchangePlan stands for the arguments of
// the schema that it is built from.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "comm/comm.h"
#include "moe/exchange.h"
#include "op.h"

namespace parallel_ext {

// --- router.cpp: E experts, of which each of T tokens gets top_k ---

// logits [T, E] -> weights [T, top_k] in fp32 or wider: the largest probabilities, the largest
// first, divided by their sum where `normalized`; and expert_ids [T, top_k], int64, of equal
// probabilities the lower first. Given expert_ids are kept, and their probabilities are weighted.
PARALLEL_EXT_OP(moe_router,
                Tensors<2>(const at::Tensor& logits, const std::optional<at::Tensor>& expert_ids,
                           int64_t top_k, bool normalized));

// grad_weights [T, top_k] -> gradient of the logits.
PARALLEL_EXT_OP(moe_router_backward,
                at::Tensor(const at::Tensor& grad_weights, const at::Tensor& logits,
                           const at::Tensor& expert_ids, bool normalized));

// --- route.cpp: E experts, each of T tokens chooses top_k of them ---

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

// --- dispatch.cpp: tokens at home on this rank, experts on the ranks of a group ---

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

// --- gated_silu.cpp, linear.cpp: the rows of this rank's experts ---

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

// --- block_experts.cpp: bits that do not depend on the layout ---

// rows [N, K] in the order of experts and of an expert in that of leaves, counts [e c] of them,
// weights [c, e, F, K], once for each leaf -> [N, F]: each row times the weight of its expert.
PARALLEL_EXT_OP(block_experts, at::Tensor(const at::Tensor& rows, const at::Tensor& weight,
                                          at::IntArrayRef counts));

// -> gradients of rows and weight, zero for a leaf without rows.
PARALLEL_EXT_OP(block_experts_backward,
                Tensors<2>(const at::Tensor& grad_output, const at::Tensor& rows,
                           const at::Tensor& weight, at::IntArrayRef counts,
                           std::array<bool, 2> needed));

// --- linear_lora.cpp ---

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

// --- tokens.cpp: sizes[rank] of the T = sum(sizes) tokens for each rank of a tp group ---

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

}  // namespace parallel_ext
