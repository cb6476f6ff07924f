// What sampling computes of one logit or id, for CPU and CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/number.h"
#include "base/philox.h"

namespace parallel_ext {

// A logit has four digits: the bits of its fp32 value, changed so that they grow with the logit.
inline constexpr int64_t kDigitBits = 8, kDigits = int64_t{1} << kDigitBits, kLogitBits = 32;

PARALLEL_EXT_INLINE uint32_t order_of(float logit) {
  const float one_zero = logit + 0.0f;  // -0 is 0
  uint32_t bits;
  std::memcpy(&bits, &one_zero, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Its inverse.
PARALLEL_EXT_INLINE float logit_of(uint32_t order) {
  const uint32_t bits = order >> 31 ? order & 0x7fffffffu : ~order;
  float logit;
  std::memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

// The 64 random bits for an id of a row are words 2 * (id mod 2) and the next of the Philox block
// with the counter (id / 2, row, step, kDraw) and the seed as key; dropout has 0 in the place of
// kDraw. The noise is -log(-log(1 - u)), u = (the upper 52 bits + 1/2) / 2^52.
inline constexpr uint32_t kDraw = 1;
inline constexpr int kNoiseBits = 52;

// u of the id 2 * pair + place.
PARALLEL_EXT_INLINE double uniform_of(const Philox& block, int place) {
  const uint64_t bits = uint64_t{block.word[2 * place]} << 32 | block.word[2 * place + 1];
  return (static_cast<double>(bits >> (64 - kNoiseBits)) + 0.5) / 0x1p52;
}

PARALLEL_EXT_INLINE double noise_of(double u) { return -std::log(-std::log1p(-u)); }

// An upper bound of the noise, without its two logarithms: -log(1 - u) > u >= 2^exponent.
PARALLEL_EXT_INLINE double noise_below(double u) {
  uint64_t bits;
  std::memcpy(&bits, &u, sizeof(bits));
  const int exponent = static_cast<int>(bits >> 52) - 1023;
  return -exponent * M_LN2;
}

}  // namespace parallel_ext
