// What a forward of the fused head and loss computes ahead of its backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "check.h"
#include "vocab/loss.h"

namespace parallel_ext {

enum class Ahead {
  kNothing,    // backward makes the logits again
  kGradients,  // all gradients, but for the factor that arrives in backward: three GEMMs instead of
               // four
  kRows,       // of a frozen head, the expected row of each token: two GEMMs and one exchange
};

// `needed`: gradients of input, head, bias.
inline Ahead ahead_of(const VocabLoss& loss, c10::ScalarType dtype, std::array<bool, 3> needed) {
  if (!needed[0] && !needed[1] && !needed[2]) return Ahead::kNothing;
  // A cap makes the share of the label's row, and of all rows, depend on the logits.
  if (!needed[1] && !needed[2] && !loss.softcap) return Ahead::kRows;
  // Each token has a factor of its own.
  if (loss.reduction == "none") return Ahead::kNothing;
  // Before its loss is scaled up, the gradient of a mean is too small for fp16.
  if (loss.reduction == "mean" && dtype == c10::ScalarType::Half) return Ahead::kNothing;
  return Ahead::kGradients;
}

// A tile of few tokens costs time, since every GEMM packs the head anew (5 % at 512), one of many
// costs memory.
inline int64_t tokens_of_tile(const at::Tensor& input) { return input.is_cpu() ? 1024 : 4096; }

// Of the gradients that forward computes: sums over tiles are made in fp32 or fp64. In fp16 a
// single tile's are as well, which may be larger than fp16 allows until the loss scale is lowered.
inline at::ScalarType type_ahead(const at::Tensor& input) {
  const bool one_tile = input.sym_size(0) <= tokens_of_tile(input);
  return one_tile && input.scalar_type() != at::kHalf ? input.scalar_type() : wide_type(input);
}

}  // namespace parallel_ext
