// The embedding of ranks that keep tokens of their own (sequence parallelism): each rank is given
// the rows of its tokens alone. On the CPU a row goes to the ranks that look it up, and a gradient
// to the rank that has the row (vocab/embedding_cpu.cpp). On other devices, where reading the ids
// would mean to wait for them, rows and zeros are summed for each rank's tokens, and gradients are
// gathered.
#include <ATen/ops/empty.h>

#include "base/empty.h"
#include "base/kernel_choice.h"
#include "base/layout.h"
#include "base/shares.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "linear/ops.h"
#include "vocab/embedding.h"
#include "vocab/ops.h"

namespace parallel_ext {
namespace {

TokensOfRanks tokens_of_ranks(const at::Tensor& ids, at::IntArrayRef tokens, int64_t rank,
                              const Group& group) {
  const int64_t total = check_sizes(kEmbedding, tokens, rank, group.size);
  check_rank(kEmbedding, rank, group);
  TORCH_CHECK_VALUE(ids.dim() >= 1 && ids.size(-1) == total, kEmbedding, ": tokens ", tokens,
                    " are not those of each rank in ids of shape ", ids.sizes());
  return {total == 0 ? 0 : ids.numel() / total, starts_of(tokens), rank};
}

at::Tensor of_tokens_aten(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                          int64_t vocab_start, std::optional<int64_t> padding_idx,
                          at::IntArrayRef sizes, at::IntArrayRef tokens, int64_t rank,
                          const Group& group) {
  bounds_of(sizes, weight.size(0), vocab_size, vocab_start, group);
  tokens_of_ranks(ids, tokens, rank, group);
  const at::Tensor rows =
      vocab_embedding(ids, weight, vocab_size, vocab_start, padding_idx, {}, Group{1, ""});
  return sum_tokens(rows, tokens, rank, group);
}

at::Tensor of_tokens_cpu(const at::Tensor& ids_in, const at::Tensor& weight, int64_t vocab_size,
                         int64_t vocab_start, std::optional<int64_t> padding_idx,
                         at::IntArrayRef sizes, at::IntArrayRef tokens, int64_t rank,
                         const Group& group) {
  if (aten_path_on_cpu() || group.alone()) {
    return of_tokens_aten(ids_in, weight, vocab_size, vocab_start, padding_idx, sizes, tokens, rank,
                          group);
  }
  check_embedding(ids_in, weight, vocab_size, vocab_start, padding_idx);
  const at::Tensor ids = ids_in.contiguous();
  check_ids(ids, vocab_size);
  const auto bounds = bounds_of(sizes, weight.size(0), vocab_size, vocab_start, group);
  return rows_of_own_tokens(ids, weight.contiguous(), vocab_start, bounds,
                            tokens_of_ranks(ids, tokens, rank, group), group);
}

at::Tensor of_tokens_meta(const at::Tensor& ids, const at::Tensor& weight, int64_t, int64_t,
                          std::optional<int64_t>, at::IntArrayRef, at::IntArrayRef tokens,
                          int64_t rank, const Group& group) {
  check_sizes(kEmbedding, tokens, rank, group.size);
  auto shape = shape_with(ids, -1, tokens[rank]);
  shape.push_back(weight.sym_size(1));
  return at::empty_symint(shape, weight.options());
}

at::Tensor of_tokens_backward_aten(const at::Tensor& grad_output, const at::Tensor& ids,
                                   c10::SymInt num_rows, int64_t, int64_t vocab_start,
                                   std::optional<int64_t> padding_idx, at::IntArrayRef,
                                   at::IntArrayRef tokens, int64_t rank, const Group& group) {
  const at::Tensor of_all = gather_tokens(grad_output, tokens, rank, false, group);
  return vocab_embedding_backward(of_all, ids, std::move(num_rows), vocab_start, padding_idx);
}

at::Tensor of_tokens_backward_cpu(const at::Tensor& grad_output, const at::Tensor& ids_in,
                                  c10::SymInt num_rows_in, int64_t vocab_size, int64_t vocab_start,
                                  std::optional<int64_t> padding_idx, at::IntArrayRef sizes,
                                  at::IntArrayRef tokens, int64_t rank, const Group& group) {
  if (aten_path_on_cpu() || group.alone()) {
    return of_tokens_backward_aten(grad_output, ids_in, std::move(num_rows_in), vocab_size,
                                   vocab_start, padding_idx, sizes, tokens, rank, group);
  }
  const at::Tensor ids = ids_in.contiguous();
  check_int64(kEmbedding, "ids", ids);
  check_ids(ids, vocab_size);
  const TokensOfRanks of_ranks = tokens_of_ranks(ids, tokens, rank, group);
  auto shape = ids.sizes().vec();
  shape.back() = tokens[rank];
  TORCH_CHECK_VALUE(
      grad_output.dim() == ids.dim() + 1 && grad_output.sizes().slice(0, ids.dim()) == shape,
      kEmbedding, ": grad_output of shape ", grad_output.sizes(),
      " is not one row for each of this rank's ", tokens[rank], " tokens of ids ", ids.sizes());
  const int64_t num_rows = num_rows_in.expect_int();
  const auto bounds = bounds_of(sizes, num_rows, vocab_size, vocab_start, group);
  return gradient_of_own_tokens(grad_output.contiguous(), ids, num_rows, vocab_start, padding_idx,
                                bounds, of_ranks, group);
}

struct VocabEmbeddingOfTokens
    : Gradient<VocabEmbeddingOfTokens, vocab_embedding_of_tokens, Saved<0>> {
  static variable_list rule(const ForwardCall<vocab_embedding_of_tokens>& forward,
                            const variable_list& grads) {
    const auto [ids, weight, vocab_size, vocab_start, padding_idx, sizes, tokens, rank, group] =
        forward.arguments();
    const at::Tensor grad_weight =
        vocab_embedding_of_tokens_backward(grads[0], ids, forward.info<1>().sizes[0], vocab_size,
                                           vocab_start, padding_idx, sizes, tokens, rank, group);
    return forward.gradients(Tensors<2>{at::Tensor(), grad_weight});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<vocab_embedding_of_tokens>(library)
      .kernel<of_tokens_aten>()
      .on<of_tokens_cpu>(c10::DispatchKey::CPU)
      .meta<of_tokens_meta>()
      .gradient<VocabEmbeddingOfTokens>();
  implement<vocab_embedding_of_tokens_backward>(library)
      .kernel<of_tokens_backward_aten>()
      .on<of_tokens_backward_cpu>(c10::DispatchKey::CPU)
      .meta<embedding_backward_meta>();
}

}  // namespace parallel_ext
