// The passes over memory of the fused head's gradients that ATen would make several of, as CUDA
// kernels. They exist in builds with PARALLEL_EXT_WITH_CUDA; scalar_t is float, double,
// c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>

#include "base/number.h"

namespace parallel_ext {

// The kernels run on the current stream of the device.

// Multiplies `count` numbers by *factor in memory of the device. Where it is 1, as mostly, they are
// neither read nor written.
template <typename scalar_t>
void scale_on_cuda(scalar_t* numbers, int64_t count, const wide_of<scalar_t>* factor, int device);

// What the gradient of the hidden states in front of a frozen head follows from. All pointers are
// to contiguous memory of the device.
template <typename scalar_t>
struct FrozenHeadOnCuda {
  const wide_of<scalar_t>* expected_rows;  // [num_tokens, hidden_size], less the labels' rows
  const scalar_t* head;                    // [num_rows, hidden_size], of this rank
  const int64_t* labels;                   // [num_tokens]
  const wide_of<scalar_t>* factors;        // [GradientRows::kCount, num_tokens]
  const wide_of<scalar_t>* column_row;     // [hidden_size], what kColumn multiplies, or null
  int64_t num_tokens, hidden_size, num_rows, vocab_start;
  wide_of<scalar_t> scale;  // of the logits
};

// Fills grad [num_tokens, hidden_size]; zeros for tokens whose factors are all 0.
template <typename scalar_t>
void frozen_gradient_on_cuda(const FrozenHeadOnCuda<scalar_t>& head, scalar_t* grad, int device);

}  // namespace parallel_ext
