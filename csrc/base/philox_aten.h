// base/philox.h by ATen calls on int64, for devices that have no kernel.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <array>

#include "base/philox.h"

namespace parallel_ext {

// Four tensors of counters in [0, 2^32), of shapes that broadcast -> random words in [0, 2^32).
inline void philox_aten(std::array<at::Tensor, 4>& word, uint32_t key0, uint32_t key1) {
  constexpr int64_t kLow = 0xffffffff;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const at::Tensor a = word[0] * static_cast<int64_t>(kPhiloxMultiplier0);
    const at::Tensor b = word[2] * static_cast<int64_t>(kPhiloxMultiplier1);
    // The arithmetic shift of a product above 2^63 repeats its sign bit, which the mask removes.
    word[0] = b.bitwise_right_shift(32).bitwise_and(kLow).bitwise_xor(word[1]).bitwise_xor(
        static_cast<int64_t>(key0));
    word[2] = a.bitwise_right_shift(32).bitwise_and(kLow).bitwise_xor(word[3]).bitwise_xor(
        static_cast<int64_t>(key1));
    word[1] = b.bitwise_and(kLow);
    word[3] = a.bitwise_and(kLow);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
}

}  // namespace parallel_ext
