// exp and tanh for loops that the compiler is to vectorize, which std::exp would prevent.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/number.h"

namespace parallel_ext {

// exp(x) = power * (1 + r * series).
struct ExpParts {
  float power;
  float r;
  float series;
};

inline constexpr float kLowestExp = -87.33f;  // exp is below the smallest normal number

// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's two-part reduction), exp(r) by its Taylor
// polynomial of degree 7, 2^n by its bits.
PARALLEL_EXT_INLINE ExpParts exp_parts(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const float clamped = x < kLowestExp ? kLowestExp : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;  // the low bits of `shifted` are n
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return {power, r, p};
}

// exp(x) for x < 88, to 1e-7 relative; 0 below the smallest normal number, NaN for NaN.
PARALLEL_EXT_INLINE float exp_below_88(float x) {
#ifdef __CUDA_ARCH__
  return std::exp(x);  // half as many instructions there, to 1.2e-7
#else
  const ExpParts parts = exp_parts(x);
  return x < kLowestExp ? 0.0f : (parts.series * parts.r + 1.0f) * parts.power;
#endif
}
PARALLEL_EXT_INLINE double exp_below_88(double x) { return std::exp(x); }

// tanh(x) to 2e-7 relative, also near 0, by exp(-2|x|) - 1.
PARALLEL_EXT_INLINE float tanh_by_exp(float x) {
  const ExpParts parts = exp_parts(-2.0f * std::fabs(x));
  const float minus_one = parts.power * (parts.series * parts.r) + (parts.power - 1.0f);
  return std::copysign(minus_one / (2.0f + minus_one), x);
}
PARALLEL_EXT_INLINE double tanh_by_exp(double x) { return std::tanh(x); }

// 1 / (1 + exp(-x)), without overflow.
template <typename wide_t>
PARALLEL_EXT_INLINE wide_t sigmoid(wide_t x) {
  const wide_t small = exp_below_88(x < 0 ? x : -x);
  return (x < 0 ? small : wide_t(1)) / (1 + small);
}

}  // namespace parallel_ext
