// The embedding's CPU loops; vocab/embedding.cpp checks what they are given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parallel_ext {

// Sums, over the ranks, rows of which one rank has each and the others have zeros. The bits are
// summed and not the numbers: those of -0.0 and NaN arrive too.
void sum_bits(at::Tensor& rows, int64_t group_size, const std::string& group_name);

// ids and weight are contiguous; rank r has the ids [bounds[r], bounds[r + 1]).
at::Tensor vocab_embedding_loops(const at::Tensor& ids, const at::Tensor& weight,
                                 int64_t vocab_start, const std::vector<int64_t>& bounds,
                                 int64_t group_size, const std::string& group_name);

// grad_output and ids are contiguous.
at::Tensor vocab_embedding_backward_loops(const at::Tensor& grad_output, const at::Tensor& ids,
                                          int64_t num_rows, int64_t vocab_start,
                                          std::optional<int64_t> padding_idx);

}  // namespace parallel_ext
