// The checks of the embedding's arguments, and its CPU loops.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.h"

namespace parallel_ext {

inline constexpr const char* kEmbedding = "vocab_embedding";

// Combines rows of which one rank has each and the other ranks have zeros: by a sum over the ranks
// of the bits and not of the numbers, which keeps -0.0 and NaN.
inline void or_rows(at::Tensor& rows, const Group& group) {
  at::Tensor bits = rows.view({-1}).view(rows.nbytes() % 4 == 0 ? at::kInt : at::kByte);
  all_reduce_sum(kEmbedding, bits, group);
}

// ids are contiguous, on the CPU.
void check_ids(const at::Tensor& ids, int64_t vocab_size);

void check_embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                     int64_t vocab_start, std::optional<int64_t> padding_idx);

// The boundaries of the ranks' rows, after a check of this rank's `num_rows`; {} for a rank
// alone, which does not need them. `sizes` are the rows of each rank, {} for those of split().
std::vector<int64_t> bounds_of(at::IntArrayRef sizes, int64_t num_rows, int64_t vocab_size,
                               int64_t vocab_start, const Group& group);

// Of both backward ops.
inline at::Tensor embedding_backward_meta(const at::Tensor& grad_output, const at::Tensor&,
                                          c10::SymInt num_rows) {
  return at::empty_symint({std::move(num_rows), grad_output.sym_size(-1)}, grad_output.options());
}

// --- The loops, whose arguments were checked ---

// ids and weight are contiguous; rank r has the ids [bounds[r], bounds[r + 1]).
at::Tensor vocab_embedding_loops(const at::Tensor& ids, const at::Tensor& weight,
                                 int64_t vocab_start, const std::vector<int64_t>& bounds,
                                 const Group& group);

// grad_output and ids are contiguous.
at::Tensor vocab_embedding_backward_loops(const at::Tensor& grad_output, const at::Tensor& ids,
                                          int64_t num_rows, int64_t vocab_start,
                                          std::optional<int64_t> padding_idx);

// Which rank has which tokens of ids [..., S]: those of rank r are [starts[r], starts[r + 1]) of
// each sequence.
struct TokensOfRanks {
  int64_t sequences;
  std::vector<int64_t> starts;
  int64_t rank;  // this one

  // Calls `use` with the place of each token of a rank, in their order.
  template <typename Use>
  void for_each(int64_t of_rank, const Use& use) const {
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      const int64_t first = sequence * starts.back();
      for (int64_t i = starts[of_rank]; i < starts[of_rank + 1]; ++i) use(first + i);
    }
  }
};

// The rows of this rank's tokens. A row travels once to each rank with tokens that look it up.
at::Tensor rows_of_own_tokens(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_start,
                              const std::vector<int64_t>& bounds, const TokensOfRanks& tokens,
                              const Group& group);

// The gradient of this rank's rows. That of a token travels to the rank that has its row.
at::Tensor gradient_of_own_tokens(const at::Tensor& grad_output, const at::Tensor& ids,
                                  int64_t num_rows, int64_t vocab_start,
                                  std::optional<int64_t> padding_idx,
                                  const std::vector<int64_t>& bounds, const TokensOfRanks& tokens,
                                  const Group& group);

}  // namespace parallel_ext
