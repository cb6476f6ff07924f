// Dropout whose mask is a function of a key, a step, the token and the feature: every rank draws
// its part of one and the same mask, and backward draws it again instead of keeping it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace parallel_ext {

struct Dropout {
  double p;         // probability of a zero; in effect the nearest multiple of 2^-16
  uint64_t key;     // of one layer's masks
  int64_t step;     // of training
  int64_t token;    // global index of the first row
  int64_t feature;  // global index of the first column

  // As the ops get it: p, and {key, step, token, feature}, which may be empty for p = 0.
  static Dropout parse(const char* op, double p, at::IntArrayRef counter, int64_t num_tokens);

  // An element is dropped when its 16 random bits are below this.
  uint32_t threshold() const;
  // 1 / (1 - p) for the p in effect; 0 where everything is dropped.
  double scale() const;
};

// input [T, K] -> output [T, K]: 0 where dropped, else the input, not scaled. Rows of the mask
// begin with `first_row` of it.
void drop(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
          const at::Tensor& output);

// The same, and target += factor * addend where an element is kept; all [T, K].
void drop_and_add(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
                  const at::Tensor& output, const at::Tensor& addend, double factor,
                  const at::Tensor& target);

}  // namespace parallel_ext
