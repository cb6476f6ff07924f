// What sampling from sharded logits is made of. Two passes read a rank's shard: one sums up masses,
// one draws. Each is there as CPU loops and as ATen calls; vocab/sample.cpp calls them and does the
// rest. Where the build has CUDA kernels, these do all of it on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/comm.h"
#include "vocab/sample_numbers.h"

namespace parallel_ext {

constexpr const char* kSample = "vocab_sample";  // which errors name

struct SampleShard {
  at::Tensor logits;  // [B, Vl], fp32, columns one apart
  int64_t vocab_start;
  double temperature;
};

struct Filters {
  double temperature;
  int64_t top_k;
  double top_p, min_p;

  bool with_top_k(int64_t vocab_size) const { return 0 < top_k && top_k < vocab_size; }
};

// What one logit's mass is multiplied with: the sum of V masses then fits into an int64.
double mass_scale(int64_t vocab_size);

// order_of for fp32 tensors, as int64, and its inverse.
at::Tensor orders_of(const at::Tensor& logits);
at::Tensor logits_of(const at::Tensor& orders);

// -> [B, kDigits], int64: for each value of the digit at `shift`, the sum over the logits that have
// it there and the bits `prefix` above it, of scale * exp((logit - max) / temperature) rounded to a
// whole number. The sum of whole numbers is the same in every order and over any ranks.
// max [B] fp64, prefix [B] int64; the result is arbitrary where max is not finite.
at::Tensor vocab_shard_mass_cpu(const SampleShard& shard, const at::Tensor& max,
                                const at::Tensor& prefix, int64_t shift, double scale);
at::Tensor vocab_shard_mass_aten(const SampleShard& shard, const at::Tensor& max,
                                 const at::Tensor& prefix, int64_t shift, double scale);

// -> candidates [B, 2], int64, of each row the best of the shard: its score, the bits of the fp64
// logit / temperature + noise, the largest among the logits not below floor [B] fp64; and its id,
// the lowest of equal ones. The score is NaN where the shard holds a NaN or +inf, and -inf where it
// holds nothing to draw.
at::Tensor vocab_shard_draw_cpu(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                int64_t step);
at::Tensor vocab_shard_draw_aten(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                 int64_t step);

// fp64 scores [B] and int64 ids [B] -> candidates [B, 2].
at::Tensor candidates_of(const at::Tensor& score, const at::Tensor& id);

// The ops by CUDA kernels, in builds that have them; the logits' columns are one apart.
at::Tensor vocab_argmax_by_kernels(const at::Tensor& logits, int64_t vocab_start,
                                   const Group& group);
at::Tensor vocab_sample_by_kernels(const SampleShard& shard, int64_t vocab_size,
                                   const Filters& filters, int64_t seed, int64_t step,
                                   const Group& group);

}  // namespace parallel_ext
