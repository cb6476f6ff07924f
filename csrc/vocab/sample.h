// The two passes of sampling over a shard of the logits that have a CPU loop; vocab/sample.cpp does
// what lies between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>

#include "base/number.h"

namespace parallel_ext {

struct SampleShard {
  at::Tensor logits;  // [B, Vl], fp32, columns one apart
  int64_t vocab_start;
  double temperature;
};

// A logit has four digits: the bits of its fp32 value, changed so that they grow with the logit.
inline constexpr int64_t kDigitBits = 8, kDigits = int64_t{1} << kDigitBits, kLogitBits = 32;

PARALLEL_EXT_INLINE uint32_t order_of(float logit) {
  const float one_zero = logit + 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &one_zero, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// order_of for fp32 tensors, as int64, and its inverse.
at::Tensor orders_of(const at::Tensor& logits);
at::Tensor logits_of(const at::Tensor& orders);

// -> [B, kDigits], int64: for each value of the digit at `shift`, the sum over the logits that have
// it there and the bits `prefix` above it, of scale * exp((logit - max) / temperature) rounded to a
// whole number. The sum of whole numbers is the same in every order and over any ranks.
// max [B] fp64, prefix [B] int64; the result is arbitrary where max is not finite.
at::Tensor vocab_shard_mass_cpu(const SampleShard& shard, const at::Tensor& max,
                                const at::Tensor& prefix, int64_t shift, double scale);
at::Tensor vocab_shard_mass_aten(const SampleShard& shard, const at::Tensor& max,
                                 const at::Tensor& prefix, int64_t shift, double scale);

// The 64 random bits for an id of a row are words 2 * (id mod 2) and the next of the Philox block
// with the counter (id / 2, row, step, kDraw) and the seed as key; dropout has 0 in the place of
// kDraw. The noise is -log(-log(1 - u)), u = (the upper 52 bits + 1/2) / 2^52.
inline constexpr uint32_t kDraw = 1;
inline constexpr int kNoiseBits = 52;

// -> candidates [B, 2], int64, of each row the best of the shard: its score, the bits of the fp64
// logit / temperature + noise, the largest among the logits not below floor [B] fp64; and its id,
// the lowest of equal ones. The score is NaN where the shard holds a NaN or +inf, and -inf where it
// holds nothing to draw.
at::Tensor vocab_shard_draw_cpu(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                int64_t step);
at::Tensor vocab_shard_draw_aten(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                 int64_t step);

// fp64 scores [B] and int64 ids [B] -> candidates [B, 2].
at::Tensor candidates_of(const at::Tensor& score, const at::Tensor& id);

}  // namespace parallel_ext
