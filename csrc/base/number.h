// Conversions that a loop can inline and vectorize; those of c10 are calls or branch. For CPU and
// CUDA.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __CUDACC__
#define PARALLEL_EXT_INLINE __host__ __device__ __forceinline__
#else
#define PARALLEL_EXT_INLINE inline __attribute__((always_inline))
#endif

// Stands before a short loop of constant length. Each compiler warns about the other's pragma, and
// nvcc's host pass about both.
#if defined(__CUDA_ARCH__)
#define PARALLEL_EXT_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define PARALLEL_EXT_UNROLL
#else
#define PARALLEL_EXT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace parallel_ext {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

PARALLEL_EXT_INLINE float to_float(float x) { return x; }
PARALLEL_EXT_INLINE float to_float(c10::BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
PARALLEL_EXT_INLINE float to_float(c10::Half x) { return static_cast<float>(x); }

// To the type in which sums are computed.
PARALLEL_EXT_INLINE double widen(double x) { return x; }
template <typename scalar_t>
PARALLEL_EXT_INLINE float widen(scalar_t x) {
  return to_float(x);
}

template <typename scalar_t>
using wide_of = decltype(widen(scalar_t()));

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
