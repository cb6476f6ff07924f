// The two passes of sampling over a shard of the logits as CPU loops.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vocab/sample.h"

namespace parallel_ext {
namespace {

constexpr int64_t kIdsAtATime = 4096;

struct Best {
  double score = -kInfinity;
  int64_t id = std::numeric_limits<int64_t>::max();

  // Ids come in ascending order, so the lowest of equal ones stays.
  void take(double other_score, int64_t other_id) {
    if (other_score > score || std::isnan(other_score)) score = other_score, id = other_id;
  }
};

struct Row {
  const float* logit;  // of vocab_start
  int64_t vocab_start;
  double temperature, floor;
  uint64_t seed;
  uint32_t number, step;
};

Best draw(const Row& row, int64_t begin, int64_t end) {
  Best best;
  Philox block{};
  int64_t pair = -1;
  for (int64_t id = begin; id < end; ++id) {
    const double logit = row.logit[id - row.vocab_start];
    if (!(logit < kInfinity)) return {std::numeric_limits<double>::quiet_NaN(), id};
    if (logit < row.floor || logit == -kInfinity) continue;
    if (pair != id / 2) {
      pair = id / 2;
      block = philox({{static_cast<uint32_t>(pair), row.number, row.step, kDraw}},
                     static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32));
    }
    const double scaled = logit / row.temperature;
    const double u = uniform_of(block, static_cast<int>(id % 2));
    // The noise takes two logarithms: only for the few ids that can still win.
    if (scaled + noise_below(u) >= best.score) best.take(scaled + noise_of(u), id);
  }
  return best;
}

}  // namespace

at::Tensor vocab_shard_mass_cpu(const SampleShard& shard, const at::Tensor& max,
                                const at::Tensor& prefix, int64_t shift, double scale) {
  const int64_t num_rows = shard.logits.size(0), size = shard.logits.size(1);
  at::Tensor mass = at::zeros({num_rows, kDigits}, prefix.options());
  const float* logits = shard.logits.const_data_ptr<float>();
  const auto* wanted = prefix.const_data_ptr<int64_t>();
  const auto* largest = max.const_data_ptr<double>();
  auto* sums = mass.mutable_data_ptr<int64_t>();
  at::parallel_for(0, num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* logit = logits + row * shard.logits.stride(0);
      for (int64_t i = 0; i < size; ++i) {
        const uint64_t order = order_of(logit[i]);
        if (static_cast<int64_t>(order >> (shift + kDigitBits)) != wanted[row]) continue;
        const double part = std::exp((logit[i] - largest[row]) / shard.temperature) * scale;
        if (part >= 0.5) {  // not so for a NaN
          sums[row * kDigits + ((order >> shift) & (kDigits - 1))] +=
              static_cast<int64_t>(part + 0.5);
        }
      }
    }
  });
  return mass;
}

at::Tensor vocab_shard_draw_cpu(const SampleShard& shard, const at::Tensor& floor, int64_t seed,
                                int64_t step) {
  const int64_t num_rows = shard.logits.size(0), size = shard.logits.size(1);
  const int64_t parts = std::max<int64_t>(1, (size + kIdsAtATime - 1) / kIdsAtATime);
  std::vector<Best> best_of_part(num_rows * parts);
  const float* logits = shard.logits.const_data_ptr<float>();
  const auto* floors = floor.const_data_ptr<double>();
  at::parallel_for(0, num_rows * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t number = i / parts, first = i % parts * kIdsAtATime;
      const Row row{logits + number * shard.logits.stride(0),
                    shard.vocab_start,
                    shard.temperature,
                    floors[number],
                    static_cast<uint64_t>(seed),
                    static_cast<uint32_t>(number),
                    static_cast<uint32_t>(step)};
      best_of_part[i] = draw(row, shard.vocab_start + first,
                             shard.vocab_start + std::min(size, first + kIdsAtATime));
    }
  });
  at::Tensor score = at::empty({num_rows}, floor.options());
  at::Tensor id = at::empty({num_rows}, floor.options().dtype(at::kLong));
  for (int64_t row = 0; row < num_rows; ++row) {
    Best best;
    for (int64_t part = 0; part < parts; ++part) {
      const Best& other = best_of_part[row * parts + part];
      best.take(other.score, other.id);
    }
    score.mutable_data_ptr<double>()[row] = best.score;
    id.mutable_data_ptr<int64_t>()[row] = best.id;
  }
  return candidates_of(score, id);
}

}  // namespace parallel_ext
