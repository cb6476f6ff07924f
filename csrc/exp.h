// The exponential of loops that the compiler shall vectorize, which std::exp prevents.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "number.h"

namespace parallel_ext {

// exp(x) for x <= 0, to 1e-7 relative; 0 below the smallest normal number, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's two-part reduction), exp(r) by its Taylor
// polynomial of degree 7, 2^n by its bits.
PARALLEL_EXT_INLINE float exp_nonpositive(float x) {
  constexpr float kLowest = -87.33f, kRound = 12582912.0f;  // 1.5 * 2^23
  const float clamped = x < kLowest ? kLowest : x;
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
  p = p * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;  // the low bits of `shifted` are n
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < kLowest ? 0.0f : p * power;
}
PARALLEL_EXT_INLINE double exp_nonpositive(double x) { return std::exp(x); }

}  // namespace parallel_ext
