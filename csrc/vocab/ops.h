// The ops of this room, in the words of linear/ops.h. V is the true size of the vocabulary. A
// VocabLoss stands for the arguments of the schema that it is built from.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "comm/comm.h"
#include "op.h"
#include "vocab/loss.h"

namespace parallel_ext {

// --- embedding.cpp ---

// replicated ids [...], rows [vocab_start, vocab_start + R) of the table as weight [R, H], sizes
// [ranks] the rows of every rank, empty for those of split() -> replicated [..., H], the bits of
// the rows. A rank alone gives zeros for the rows of other ranks and ignores `sizes`. Row
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

// --- embedding_tokens.cpp: each rank has tokens[rank] of the S tokens of a sequence ---

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

// --- cross_entropy.cpp ---

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

// --- linear_cross_entropy.cpp ---

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
// token less that of its label, sum of (p - onehot) * row over this rank's ids; the gradients of
// input (partial), head_weight and head_bias that are `needed`.
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

// --- block_cross_entropy.cpp ---

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

// --- sample.cpp: the next token of B rows, from sharded logits
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

}  // namespace parallel_ext
