#include "dropout.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernel_choice.h"
#include "number.h"
#include "philox.h"

namespace parallel_ext {
namespace {

// The 16 random bits of feature f of token t are half s mod 2 of word s / 2 of the Philox block
// with the counter (f / 128 * 16 + f mod 16, t, step, 0), where s = f / 16 mod 8: so 16 blocks,
// which a vector register computes side by side, serve 128 features in a row.
constexpr int64_t kLanes = 16;
constexpr int64_t kHalves = 8;
constexpr int64_t kBlock = kLanes * kHalves;
constexpr uint16_t kAll = 0xffff;

struct Stream {
  uint32_t key0, key1, step, threshold;

  explicit Stream(const Dropout& dropout)
      : key0(static_cast<uint32_t>(dropout.key)),
        key1(static_cast<uint32_t>(dropout.key >> 32)),
        step(static_cast<uint32_t>(dropout.step)),
        threshold(dropout.threshold()) {}
};

// kept[i] has all bits where feature 128 * block + i of the token is kept, else none.
PARALLEL_EXT_INLINE void draw_block(const Stream& stream, uint32_t block, uint32_t token,
                                    uint16_t* kept) {
  uint32_t word[kHalves / 2][kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t first = block * static_cast<uint32_t>(kLanes) + lane;
    const Philox x = philox({{first, token, stream.step, 0}}, stream.key0, stream.key1);
    for (int i = 0; i < kHalves / 2; ++i) word[i][lane] = x.word[i];
  }
  for (int i = 0; i < kHalves / 2; ++i) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      kept[2 * i * kLanes + lane] = (word[i][lane] & 0xffffu) >= stream.threshold ? kAll : 0;
      kept[(2 * i + 1) * kLanes + lane] = (word[i][lane] >> 16) >= stream.threshold ? kAll : 0;
    }
  }
}

// The same for `size` features from `feature` on.
PARALLEL_EXT_MULTIVERSION void draw_row(const Stream& stream, uint32_t token, int64_t feature,
                                        int64_t size, uint16_t* kept) {
  for (int64_t done = 0; done < size;) {
    const int64_t inside = (feature + done) % kBlock;
    const auto block = static_cast<uint32_t>((feature + done) / kBlock);
    const int64_t count = std::min(kBlock - inside, size - done);
    if (count == kBlock) {
      draw_block(stream, block, token, kept + done);
    } else {
      uint16_t whole[kBlock];
      draw_block(stream, block, token, whole);
      std::copy_n(whole + inside, count, kept + done);
    }
    done += count;
  }
}

// One function per dtype, since target_clones does not go with templates.
#define PARALLEL_EXT_DROP(scalar_t, kept_value)                                      \
  PARALLEL_EXT_MULTIVERSION void drop_row(const uint16_t* kept, int64_t size,        \
                                          const scalar_t* input, scalar_t* output) { \
    for (int64_t i = 0; i < size; ++i) output[i] = kept_value;                       \
  }
#define PARALLEL_EXT_ADD(scalar_t, wide_t, widen)                               \
  PARALLEL_EXT_MULTIVERSION void add_row(const uint16_t* kept, int64_t size,    \
                                         const scalar_t* addend, wide_t factor, \
                                         scalar_t* target) {                    \
    for (int64_t i = 0; i < size; ++i) {                                        \
      const wide_t added = kept[i] ? factor * widen(addend[i]) : wide_t(0);     \
      store(widen(target[i]) + added, target + i);                              \
    }                                                                           \
  }

PARALLEL_EXT_DROP(uint16_t, input[i] & kept[i])  // bf16 and fp16, by their bits
PARALLEL_EXT_DROP(float, kept[i] ? input[i] : 0)
PARALLEL_EXT_DROP(double, kept[i] ? input[i] : 0)
PARALLEL_EXT_ADD(float, float, to_float)
PARALLEL_EXT_ADD(c10::BFloat16, float, to_float)
PARALLEL_EXT_ADD(c10::Half, float, to_float)
PARALLEL_EXT_ADD(double, double, double)

bool use_cpu_loops(const at::Tensor& tensor) { return tensor.is_cpu() && !aten_path_on_cpu(); }

// Calls use(row, kept) for each row of `rows` by `size`, in parallel.
template <typename Use>
void for_rows(const Dropout& dropout, int64_t first_row, int64_t rows, int64_t size,
              const Use& use) {
  const Stream stream(dropout);
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, size)),
                   [&](int64_t begin, int64_t end) {
                     std::vector<uint16_t> kept(size);
                     for (int64_t row = begin; row < end; ++row) {
                       const auto token = static_cast<uint32_t>(dropout.token + first_row + row);
                       draw_row(stream, token, dropout.feature, size, kept.data());
                       use(row, kept.data());
                     }
                   });
}

// The path of other devices: the same mask [T, K] by plain ATen calls on int64.
at::Tensor mask(const Dropout& dropout, int64_t first_row, const at::Tensor& like) {
  const Stream stream(dropout);
  constexpr int64_t kLow = 0xffffffff;
  const auto counted = like.options().dtype(at::kLong);
  const int64_t first = dropout.feature / kBlock, inside = dropout.feature % kBlock;
  const int64_t blocks = (inside + like.size(1) + kBlock - 1) / kBlock;
  const at::Tensor zero = at::zeros({like.size(0), blocks * kLanes}, counted);
  const at::Tensor token =
      at::arange(dropout.token + first_row, dropout.token + first_row + like.size(0), counted);
  at::Tensor word[4] = {zero + at::arange(first * kLanes, (first + blocks) * kLanes, counted),
                        zero + token.unsqueeze(1), zero + static_cast<int64_t>(stream.step), zero};
  uint32_t key0 = stream.key0, key1 = stream.key1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const at::Tensor a = word[0] * static_cast<int64_t>(kPhiloxMultiplier[0]);
    const at::Tensor b = word[2] * static_cast<int64_t>(kPhiloxMultiplier[1]);
    // An arithmetic shift of a product above 2^63 smears its sign, which the mask takes off.
    word[0] = b.bitwise_right_shift(32).bitwise_and(kLow).bitwise_xor(word[1]).bitwise_xor(
        static_cast<int64_t>(key0));
    word[2] = a.bitwise_right_shift(32).bitwise_and(kLow).bitwise_xor(word[3]).bitwise_xor(
        static_cast<int64_t>(key1));
    word[1] = b.bitwise_and(kLow);
    word[3] = a.bitwise_and(kLow);
    key0 += kPhiloxKeyStep[0];
    key1 += kPhiloxKeyStep[1];
  }
  std::vector<at::Tensor> halves;
  for (const at::Tensor& each : word) {
    halves.push_back(each.bitwise_and(0xffff));
    halves.push_back(each.bitwise_right_shift(16));
  }
  const at::Tensor bits = at::stack(halves, 1)                 // [T, 8, blocks * 16]
                              .unflatten(2, {blocks, kLanes})  // [T, 8, blocks, 16]
                              .transpose(1, 2)                 // [T, blocks, 8, 16]
                              .flatten(1);
  return bits.narrow(1, inside, like.size(1)).ge(static_cast<int64_t>(stream.threshold));
}

}  // namespace

Dropout Dropout::parse(const char* op, double p, at::IntArrayRef counter, int64_t num_tokens) {
  constexpr int64_t kWord = int64_t{1} << 32;
  TORCH_CHECK_VALUE(0 <= p && p <= 1, op, ": dropout must be in [0, 1], got ", p);
  if (p == 0 && counter.empty()) return {0, 0, 0, 0, 0};
  TORCH_CHECK_VALUE(counter.size() == 4, op,
                    ": dropout_counter must be [key, step, token, feature], got ", counter);
  TORCH_CHECK_VALUE(0 <= counter[1] && counter[1] < kWord, op, ": step ", counter[1],
                    " of dropout_counter is outside [0, 2^32)");
  TORCH_CHECK_VALUE(0 <= counter[2] && counter[2] + num_tokens <= kWord, op, ": the tokens from ",
                    counter[2], " of dropout_counter on, ", num_tokens,
                    " of them, leave [0, 2^32)");
  TORCH_CHECK_VALUE(counter[3] >= 0, op, ": feature ", counter[3],
                    " of dropout_counter is negative");
  return {p, static_cast<uint64_t>(counter[0]), counter[1], counter[2], counter[3]};
}

uint32_t Dropout::threshold() const { return static_cast<uint32_t>(std::lround(p * 65536)); }

double Dropout::scale() const {
  const uint32_t kept = 65536 - threshold();
  return kept == 0 ? 0.0 : 65536.0 / kept;
}

void drop(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
          const at::Tensor& output) {
  const int64_t rows = input.size(0), size = input.size(1);
  if (!use_cpu_loops(input)) {
    output.copy_(input.masked_fill(mask(dropout, first_row, input).logical_not(), 0));
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, input.scalar_type(), "drop", [&] {
    using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, scalar_t>;
    const auto* in = static_cast<const bits_t*>(input.const_data_ptr());
    auto* out = static_cast<bits_t*>(output.mutable_data_ptr());
    for_rows(dropout, first_row, rows, size, [&](int64_t row, const uint16_t* kept) {
      drop_row(kept, size, in + row * size, out + row * size);
    });
  });
}

void drop_and_add(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
                  const at::Tensor& output, const at::Tensor& addend, double factor,
                  const at::Tensor& target) {
  const int64_t rows = input.size(0), size = input.size(1);
  if (!use_cpu_loops(input)) {
    const at::Tensor dropped = mask(dropout, first_row, input).logical_not();
    output.copy_(input.masked_fill(dropped, 0));
    target.add_(addend.masked_fill(dropped, 0), factor);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, input.scalar_type(), "drop_and_add", [&] {
        using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, scalar_t>;
        const auto* in = static_cast<const bits_t*>(input.const_data_ptr());
        const auto* add = addend.const_data_ptr<scalar_t>();
        auto* out = static_cast<bits_t*>(output.mutable_data_ptr());
        auto* sum = target.mutable_data_ptr<scalar_t>();
        for_rows(dropout, first_row, rows, size, [&](int64_t row, const uint16_t* kept) {
          drop_row(kept, size, in + row * size, out + row * size);
          add_row(kept, size, add + row * size, factor, sum + row * size);
        });
      });
}

}  // namespace parallel_ext
