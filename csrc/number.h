// Conversions that a loop can inline and vectorize: c10's own call out of line or branch.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#define PARALLEL_EXT_INLINE inline __attribute__((always_inline))

namespace parallel_ext {

PARALLEL_EXT_INLINE float to_float(float x) { return x; }
PARALLEL_EXT_INLINE float to_float(c10::BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
PARALLEL_EXT_INLINE float to_float(c10::Half x) { return static_cast<float>(x); }

PARALLEL_EXT_INLINE void store(float value, float* out) { *out = value; }
PARALLEL_EXT_INLINE void store(float value, c10::BFloat16* out) {
  uint32_t bits;  // rounds to nearest even; every NaN becomes the quiet one
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->x = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}
PARALLEL_EXT_INLINE void store(float value, c10::Half* out) { *out = value; }
PARALLEL_EXT_INLINE void store(double value, double* out) { *out = value; }

}  // namespace parallel_ext
