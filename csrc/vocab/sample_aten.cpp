// The two passes of sampling over a shard of the logits by ATen calls, for any device.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>
#include <limits>

#include "base/philox_aten.h"
#include "vocab/sample.h"

namespace parallel_ext {
namespace {

// Inverts the bits of negative fp32 numbers, so that they too grow with the number, or undoes it.
at::Tensor turned(const at::Tensor& bits) {
  return bits.bitwise_xor(bits.bitwise_right_shift(31).bitwise_and(0x7fffffff));
}

constexpr int64_t kZero = int64_t{1} << 31;  // the order of the logit 0

at::Tensor noise_by_aten(const at::Tensor& high, const at::Tensor& low) {
  const at::Tensor bits =
      high.bitwise_left_shift(kNoiseBits - 32).bitwise_or(low.bitwise_right_shift(64 - kNoiseBits));
  const at::Tensor u = (bits.to(at::kDouble) + 0.5) * std::ldexp(1.0, -kNoiseBits);
  return u.neg().log1p().neg().log().neg();
}

at::Tensor noise(const SampleShard& shard, int64_t seed, int64_t step) {
  const auto options = shard.logits.options().dtype(at::kLong);
  const int64_t num_rows = shard.logits.size(0), size = shard.logits.size(1);
  const int64_t first = shard.vocab_start / 2;
  const int64_t stop = (shard.vocab_start + size + 1) / 2;
  const at::Tensor zero = at::zeros({num_rows, stop - first}, options);
  std::array<at::Tensor, 4> word{
      zero + at::arange(first, stop, options), zero + at::arange(num_rows, options).unsqueeze(1),
      zero + static_cast<int64_t>(static_cast<uint32_t>(step)), zero + static_cast<int64_t>(kDraw)};
  philox_aten(word, static_cast<uint32_t>(seed),
              static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32));
  return at::stack({noise_by_aten(word[0], word[1]), noise_by_aten(word[2], word[3])}, 2)
      .flatten(1)
      .narrow(1, shard.vocab_start - 2 * first, size);
}

}  // namespace

at::Tensor orders_of(const at::Tensor& logits) {
  return turned((logits + 0).view(at::kInt)).to(at::kLong) + kZero;
}

at::Tensor logits_of(const at::Tensor& orders) {
  return turned((orders - kZero).to(at::kInt)).view(at::kFloat);
}

at::Tensor vocab_shard_mass_aten(const SampleShard& shard, const at::Tensor& max,
                                 const at::Tensor& prefix, int64_t shift, double scale) {
  const at::Tensor order = orders_of(shard.logits);
  at::Tensor part = (shard.logits.to(at::kDouble) - max.unsqueeze(1)).div_(shard.temperature);
  part = part.exp_().mul_(scale).add_(0.5).floor_();
  const at::Tensor elsewhere = order.bitwise_right_shift(shift + kDigitBits) != prefix.unsqueeze(1);
  part.masked_fill_(elsewhere.logical_or(part.isnan()), 0);
  return at::zeros({part.size(0), kDigits}, prefix.options())
      .scatter_add_(1, order.bitwise_right_shift(shift).bitwise_and(kDigits - 1),
                    part.to(at::kLong));
}

at::Tensor vocab_shard_draw_aten(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                 int64_t step) {
  if (shard.logits.size(1) == 0) {
    return candidates_of(at::full_like(floor, -kInfinity),
                         at::full_like(floor, std::numeric_limits<int64_t>::max(), at::kLong));
  }
  const at::Tensor logits = shard.logits.to(at::kDouble);
  const at::Tensor max = logits.amax(1);
  const at::Tensor score = (logits / shard.temperature + noise(shard, seed, step))
                               .masked_fill_(logits < floor.unsqueeze(1), -kInfinity);
  const at::Tensor id = score.argmax(1, /*keepdim=*/true);
  const at::Tensor nothing = max.isnan().logical_or(max == kInfinity);
  return candidates_of(
      score.gather(1, id).squeeze(1).masked_fill(nothing, std::numeric_limits<double>::quiet_NaN()),
      id.squeeze(1) + shard.vocab_start);
}

}  // namespace parallel_ext
