// What the forward of the fused head and loss computes ahead, for its backward; and what CUDA
// kernels compute of the gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "check.h"
#include "vocab/loss.h"

namespace parallel_ext {

inline constexpr const char* kLinearLoss = "linear_vocab_cross_entropy";

enum class Ahead {
  kNothing,    // the backward computes the logits again
  kGradients,  // all gradients, but for the factor that arrives in backward: three GEMMs instead of
               // four
  kExpectedRows,  // of a frozen head, the expected row of each token: two GEMMs and one exchange
};

// `needed`: gradients of input, head, bias.
inline Ahead ahead_of(const VocabLoss& loss, c10::ScalarType dtype, std::array<bool, 3> needed) {
  if (!needed[0] && !needed[1] && !needed[2]) return Ahead::kNothing;
  // With a cap the factor of each row of the head depends on the logit.
  if (!needed[1] && !needed[2] && !loss.softcap) return Ahead::kExpectedRows;
  // The factors that arrive in the backward differ from token to token.
  if (loss.reduction == "none") return Ahead::kNothing;
  // Without the loss scale, which arrives in the backward, the gradient of a mean is too small for
  // fp16.
  if (loss.reduction == "mean" && dtype == c10::ScalarType::Half) return Ahead::kNothing;
  return Ahead::kGradients;
}

// Tiles of few tokens cost time, since every GEMM packs the head again (5 % at 512); tiles of many
// tokens cost memory. On a GPU a second tile costs most, a sum over tiles in fp32: as much memory
// as the logits of 2 H more tokens, and more passes over memory than the loss itself.
inline int64_t tokens_of_tile(const at::Tensor& input) { return input.is_cpu() ? 1024 : 8192; }

// The dtype of the gradients that the forward computes: fp32 or fp64 for sums over tiles. So too
// for a single tile in fp16, whose gradients may overflow fp16 until the loss scale is lowered.
inline at::ScalarType type_ahead(const at::Tensor& input) {
  const bool one_tile = input.sym_size(0) <= tokens_of_tile(input);
  return one_tile && input.scalar_type() != at::kHalf ? input.scalar_type() : wide_type(input);
}

// numbers *= factor, one number on the device; contiguous numbers of a GPU.
void multiply_on_cuda(const at::Tensor& numbers, const at::Tensor& factor);

// The gradient of the hidden states in front of a frozen head, [T, H], from the expected row of
// each token less that of its label, wide, and the factors [GradientRows::kCount, T]. column_row
// [H], wide, is what kColumn multiplies; undefined without label smoothing.
at::Tensor frozen_gradient_on_cuda(const VocabLoss& loss, const at::Tensor& expected_rows,
                                   const at::Tensor& head, const at::Tensor& labels,
                                   const at::Tensor& factors, const at::Tensor& column_row);

}  // namespace parallel_ext
