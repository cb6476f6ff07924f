// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011, section 3.3). A number is a function of key and counter alone, so any rank can
// draw any number, in any order and again.
#pragma once

#include <cstdint>

#include "base/number.h"

namespace parallel_ext {

// Not arrays: device code cannot read a constexpr array of the host.
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

struct Philox {
  uint32_t word[4];  // the counter before, four random words afterwards
};

PARALLEL_EXT_INLINE Philox philox(Philox x, uint32_t key0, uint32_t key1) {
  PARALLEL_EXT_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * x.word[0];
    const uint64_t b = uint64_t{kPhiloxMultiplier1} * x.word[2];
    x = {static_cast<uint32_t>(b >> 32) ^ x.word[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ x.word[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  return x;
}

}  // namespace parallel_ext
