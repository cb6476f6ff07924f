// The embedding's CPU loops, whose arguments vocab/embedding.cpp has checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/comm.h"

namespace parallel_ext {

// Combines rows of which one rank has each and the other ranks have zeros: by a sum over the ranks
// of the bits and not of the numbers, which keeps -0.0 and NaN.
inline void or_rows(at::Tensor& rows, const Group& group) {
  at::Tensor bits = rows.view({-1}).view(rows.nbytes() % 4 == 0 ? at::kInt : at::kByte);
  all_reduce_sum("vocab_embedding", bits, group);
}

// ids and weight are contiguous; rank r has the ids [bounds[r], bounds[r + 1]).
at::Tensor vocab_embedding_loops(const at::Tensor& ids, const at::Tensor& weight,
                                 int64_t vocab_start, const std::vector<int64_t>& bounds,
                                 const Group& group);

// grad_output and ids are contiguous.
at::Tensor vocab_embedding_backward_loops(const at::Tensor& grad_output, const at::Tensor& ids,
                                          int64_t num_rows, int64_t vocab_start,
                                          std::optional<int64_t> padding_idx);

}  // namespace parallel_ext
