// Dropout whose mask is a function of a key, a step, the token and the feature: every rank draws
// its part of the same global mask, and the backward draws the mask again instead of saving it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace parallel_ext {

struct Dropout {
  double p;         // probability of a zero; used as the nearest multiple of 2^-16
  uint64_t key;     // one for each layer
  int64_t step;     // number of the layer's forward
  int64_t token;    // global index of the first row
  int64_t feature;  // global index of the first column

  // From the arguments of the ops for `rows` [T, K]: p, and {key, step, token, feature}, which may
  // be empty for p = 0.
  static Dropout parse(const char* op, double p, at::IntArrayRef counter, const at::Tensor& rows);

  // An element is dropped when its 16 random bits are below this.
  uint32_t threshold() const;
  // 1 / (1 - p) for the p that is used; 0 if everything is dropped.
  double scale() const;
};

// input [T, K] -> output [T, K]: 0 where dropped, else the input times `factor`. The first row uses
// row `first_row` of the mask.
void drop(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
          const at::Tensor& output, double factor = 1);

// As drop() without a factor, and target += factor * addend where an element is kept; all [T, K].
void drop_and_add(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
                  const at::Tensor& output, const at::Tensor& addend, double factor,
                  const at::Tensor& target);

}  // namespace parallel_ext
