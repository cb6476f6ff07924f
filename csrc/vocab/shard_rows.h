// The numbers per token that the two passes of the cross entropy over a shard of the logits write
// and read: for CPU and CUDA.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/exp.h"

namespace parallel_ext {

// The rows of a partial_stats [count, T], wide; -1 where not asked for. m is the maximum of the
// shard's z, or 0 where nothing is above -inf.
struct StatsRows {
  static constexpr int64_t kMax = 0;     // of z; -inf for an empty shard
  static constexpr int64_t kSum = 1;     // of exp(z - m)
  static constexpr int64_t kTarget = 2;  // z of the label where this shard holds it, else 0
  int64_t smooth = -1;                   // sum of weight * (z - m); the next row: sum of weight
  int64_t moment = -1;                   // sum of exp(z - m) * (z - m)
  int64_t id = -1;                       // bits of the lowest id of the maximum: int32 in fp32
  int64_t count = 3;

  constexpr StatsRows(bool with_smooth, bool with_moment, bool with_id) {
    if (with_smooth) smooth = count, count += 2;
    if (with_moment) moment = count++;
    if (with_id) id = count++;
  }
};

// A pass sums exp(z - base) for a base that the maximum may exceed: as long as it is at most this
// far above, the sums do not overflow.
inline constexpr int kAboveBase = 30;

// The largest id that partial statistics can hold; the id of an empty shard.
inline constexpr int64_t kLastId = 0x7fffffff;

// The factors of each token's gradient with respect to z, with p = exp(z - max - log_sum):
// p * (probability + entropy * (z - max - log_sum)) - column * weight - label * onehot.
struct GradientRows {
  static constexpr int64_t kProbability = 0, kColumn = 1, kLabel = 2, kEntropy = 3, kCount = 4;
};

// The factors of one token, with its part of the normalizer.
template <typename wide_t>
struct RowFactors {
  wide_t max, log_sum;
  wide_t probability, column, label, entropy;

  PARALLEL_EXT_INLINE RowFactors(const wide_t* normalizer, const wide_t* factors,
                                 int64_t num_tokens, int64_t token)
      : max(normalizer[token]), log_sum(normalizer[num_tokens + token]) {
    probability = factors[GradientRows::kProbability * num_tokens + token];
    column = factors[GradientRows::kColumn * num_tokens + token];
    label = factors[GradientRows::kLabel * num_tokens + token];
    entropy = factors[GradientRows::kEntropy * num_tokens + token];
  }

  PARALLEL_EXT_INLINE bool all_zero() const {
    return probability == 0 && column == 0 && label == 0 && entropy == 0;
  }
};

// The column of a label in a shard of `size` ids, or -1; an ignored label may be any number.
PARALLEL_EXT_INLINE int64_t column_of(int64_t label, int64_t vocab_start, int64_t size) {
  return vocab_start <= label && label < vocab_start + size ? label - vocab_start : -1;
}

// Rows of the normalizer, wide: the maximum of z over the whole vocabulary, the log of the sum of
// exp(z - maximum), and the entropy where it was asked for.
inline constexpr int64_t kRowsWithoutEntropy = 2, kRowsWithEntropy = 3;

// The maximum of no logits.
template <typename wide_t>
inline constexpr wide_t kLowest = -std::numeric_limits<wide_t>::infinity();

// The bits of an id, stored as a floating-point number. Only fp64 holds ids above kLastId, which
// argmax refuses.
template <typename wide_t>
PARALLEL_EXT_INLINE wide_t bits_of_id(int64_t id) {
  using narrow_t = std::conditional_t<sizeof(wide_t) == 8, int64_t, int32_t>;
  const auto narrow = static_cast<narrow_t>(id);
  wide_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return bits;
}

template <typename wide_t>
PARALLEL_EXT_INLINE wide_t to_z(wide_t logit, wide_t scale, wide_t cap) {
  return cap == 0 ? logit * scale : cap * tanh_by_exp(logit * scale / cap);
}

}  // namespace parallel_ext
