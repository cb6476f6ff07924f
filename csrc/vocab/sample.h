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

// A logit has four digits: the bits of its fp32 value, turned so that they count up with it.
inline constexpr int64_t kDigitBits = 8, kDigits = int64_t{1} << kDigitBits, kLogitBits = 32;

PARALLEL_EXT_INLINE uint32_t order_of(float logit) {
  const float one_zero = logit + 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &one_zero, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The same of fp32 tensors, as int64, and back.
at::Tensor orders_of(const at::Tensor& logits);
at::Tensor logits_of(const at::Tensor& orders);

// -> [B, kDigits], int64: the sum of scale * exp((logit - max) / temperature), each of them rounded
// to a whole number, of the logits of which the bits above the digit at `shift` are `prefix`, by
// that digit. Whole numbers, since their sum is the same in every order and over any ranks.
// max [B] fp64, prefix [B] int64; any numbers where max is not finite.
at::Tensor vocab_shard_mass_cpu(const SampleShard& shard, const at::Tensor& max,
                                const at::Tensor& prefix, int64_t shift, double scale);
at::Tensor vocab_shard_mass_aten(const SampleShard& shard, const at::Tensor& max,
                                 const at::Tensor& prefix, int64_t shift, double scale);

// Bits q of an id of a row: the 64 of words 2 * (id mod 2) and the next of the Philox block with
// the counter (id / 2, row, step, kDraw) and the seed as key; dropout has 0 for kDraw. Its noise is
// -log(-log(1 - u)), u = (the upper 52 of them + 1/2) / 2^52.
inline constexpr uint32_t kDraw = 1;
inline constexpr int kNoiseBits = 52;

// -> record [B, 2], int64: the bits of the fp64 logit / temperature + noise that is the largest of
// the logits not below floor [B] fp64, and its id, the lowest of equal ones. NaN where the shard
// holds a NaN or +inf, and -inf where it holds nothing to draw.
at::Tensor vocab_shard_draw_cpu(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                int64_t step);
at::Tensor vocab_shard_draw_aten(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                 int64_t step);

// A record of fp64 scores [B] and int64 ids [B].
at::Tensor record_of(const at::Tensor& score, const at::Tensor& id);

}  // namespace parallel_ext
