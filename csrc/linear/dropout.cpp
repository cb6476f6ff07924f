#include "linear/dropout.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "base/dropout_mask.h"
#include "base/empty.h"
#include "base/kernel_choice.h"
#include "base/philox_aten.h"
#include "check.h"
#include "gradient.h"
#include "linear/dropout_cuda.h"
#include "linear/linear.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

constexpr uint16_t kAll = 0xffff;

MaskPart part_of(const Dropout& dropout, int64_t first_row, const at::Tensor& like) {
  const MaskStream stream{static_cast<uint32_t>(dropout.key),
                          static_cast<uint32_t>(dropout.key >> 32),
                          static_cast<uint32_t>(dropout.step), dropout.threshold()};
  return {stream, static_cast<uint32_t>(dropout.token + first_row), dropout.feature, like.size(0),
          like.size(1)};
}

// Sets all bits of kept[i] if feature 128 * block + i of the token is kept, else none.
PARALLEL_EXT_INLINE void draw_block(const MaskStream& stream, uint32_t token, uint32_t block,
                                    uint16_t* kept) {
  uint32_t word[kMaskHalves / 2][kMaskLanes];
  for (uint32_t lane = 0; lane < kMaskLanes; ++lane) {
    const Philox x = draw_lane(stream, token, block, lane);
    for (int i = 0; i < kMaskHalves / 2; ++i) word[i][lane] = x.word[i];
  }
  for (int i = 0; i < kMaskHalves / 2; ++i) {
    for (int64_t lane = 0; lane < kMaskLanes; ++lane) {
      kept[2 * i * kMaskLanes + lane] = is_kept(stream, word[i][lane], 0) ? kAll : 0;
      kept[(2 * i + 1) * kMaskLanes + lane] = is_kept(stream, word[i][lane], 1) ? kAll : 0;
    }
  }
}

// As draw_block, for `size` features from `feature` on.
PARALLEL_EXT_MULTIVERSION void draw_row(const MaskStream& stream, uint32_t token, int64_t feature,
                                        int64_t size, uint16_t* kept) {
  for (int64_t done = 0; done < size;) {
    const int64_t inside = (feature + done) % kMaskBlock;
    const auto block = static_cast<uint32_t>((feature + done) / kMaskBlock);
    const int64_t count = std::min(kMaskBlock - inside, size - done);
    if (count == kMaskBlock) {
      draw_block(stream, token, block, kept + done);
    } else {
      uint16_t whole[kMaskBlock];
      draw_block(stream, token, block, whole);
      std::copy_n(whole + inside, count, kept + done);
    }
    done += count;
  }
}

// One function per dtype: target_clones does not work with templates.
#define PARALLEL_EXT_DROP(scalar_t, kept_value)                                      \
  PARALLEL_EXT_MULTIVERSION void drop_row(const uint16_t* kept, int64_t size,        \
                                          const scalar_t* input, scalar_t* output) { \
    for (int64_t i = 0; i < size; ++i) output[i] = kept_value;                       \
  }
#define PARALLEL_EXT_SCALE_AND_ADD(scalar_t, wide_t)                                      \
  PARALLEL_EXT_MULTIVERSION void drop_and_scale_row(const uint16_t* kept, int64_t size,   \
                                                    const scalar_t* input, wide_t factor, \
                                                    scalar_t* output) {                   \
    for (int64_t i = 0; i < size; ++i) {                                                  \
      store(kept[i] ? factor * widen(input[i]) : wide_t(0), output + i);                  \
    }                                                                                     \
  }                                                                                       \
  PARALLEL_EXT_MULTIVERSION void add_row(const uint16_t* kept, int64_t size,              \
                                         const scalar_t* addend, wide_t factor,           \
                                         scalar_t* target) {                              \
    for (int64_t i = 0; i < size; ++i) {                                                  \
      const wide_t added = kept[i] ? factor * widen(addend[i]) : wide_t(0);               \
      store(widen(target[i]) + added, target + i);                                        \
    }                                                                                     \
  }

PARALLEL_EXT_DROP(uint16_t, input[i] & kept[i])  // bf16 and fp16, by their bits
PARALLEL_EXT_DROP(float, kept[i] ? input[i] : 0)
PARALLEL_EXT_DROP(double, kept[i] ? input[i] : 0)
PARALLEL_EXT_SCALE_AND_ADD(float, float)
PARALLEL_EXT_SCALE_AND_ADD(c10::BFloat16, float)
PARALLEL_EXT_SCALE_AND_ADD(c10::Half, float)
PARALLEL_EXT_SCALE_AND_ADD(double, double)

template <typename scalar_t>
void drop_numbers(const uint16_t* kept, int64_t size, const scalar_t* input, scalar_t* output) {
  using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, scalar_t>;
  drop_row(kept, size, reinterpret_cast<const bits_t*>(input), reinterpret_cast<bits_t*>(output));
}

// Calls use(first, kept) in parallel for each row, where `first` is the number of its first
// element.
template <typename Use>
void for_rows(const MaskPart& part, const Use& use) {
  at::parallel_for(0, part.rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, part.size)),
                   [&](int64_t begin, int64_t end) {
                     std::vector<uint16_t> kept(part.size);
                     for (int64_t row = begin; row < end; ++row) {
                       const auto token = part.token + static_cast<uint32_t>(row);
                       draw_row(part.stream, token, part.feature, part.size, kept.data());
                       use(row * part.size, kept.data());
                     }
                   });
}

// The same mask [T, K] by plain ATen calls on int64, for devices without a kernel.
at::Tensor mask(const MaskPart& part, const at::Tensor& like) {
  const auto counted = like.options().dtype(at::kLong);
  const int64_t first = part.feature / kMaskBlock, inside = part.inside();
  const int64_t blocks = part.blocks_per_row();
  const at::Tensor zero = at::zeros({part.rows, blocks * kMaskLanes}, counted);
  const int64_t first_token = part.token;
  const at::Tensor token = at::arange(first_token, first_token + part.rows, counted);
  std::array<at::Tensor, 4> word{
      zero + at::arange(first * kMaskLanes, (first + blocks) * kMaskLanes, counted),
      zero + token.unsqueeze(1), zero + static_cast<int64_t>(part.stream.step), zero};
  philox_aten(word, part.stream.key0, part.stream.key1);
  std::vector<at::Tensor> halves;
  for (const at::Tensor& each : word) {
    halves.push_back(each.bitwise_and(0xffff));
    halves.push_back(each.bitwise_right_shift(16));
  }
  const at::Tensor bits = at::stack(halves, 1)                     // [T, 8, blocks * 16]
                              .unflatten(2, {blocks, kMaskLanes})  // [T, 8, blocks, 16]
                              .transpose(1, 2)                     // [T, blocks, 8, 16]
                              .flatten(1);
  return bits.narrow(1, inside, part.size).ge(static_cast<int64_t>(part.stream.threshold));
}

}  // namespace

Dropout Dropout::parse(const char* op, double p, at::IntArrayRef counter, const at::Tensor& rows) {
  constexpr int64_t kWord = int64_t{1} << 32;
  constexpr int64_t kMostFeatures = kWord / kMaskLanes * kMaskBlock;  // whose draws are counted
  const int64_t num_tokens = rows.size(0), num_features = rows.size(1);
  TORCH_CHECK_VALUE(0 <= p && p <= 1, op, ": dropout must be in [0, 1], got ", p);
  if (p == 0 && counter.empty()) return {0, 0, 0, 0, 0};
  TORCH_CHECK_VALUE(counter.size() == 4, op,
                    ": dropout_counter must be [key, step, token, feature], got ", counter);
  TORCH_CHECK_VALUE(0 <= counter[1] && counter[1] < kWord, op, ": step ", counter[1],
                    " of dropout_counter is outside [0, 2^32)");
  TORCH_CHECK_VALUE(0 <= counter[2] && counter[2] <= kWord - num_tokens, op, ": the tokens from ",
                    counter[2], " of dropout_counter on, ", num_tokens,
                    " of them, leave [0, 2^32)");
  TORCH_CHECK_VALUE(0 <= counter[3] && counter[3] <= kMostFeatures - num_features, op,
                    ": the features from ", counter[3], " of dropout_counter on, ", num_features,
                    " of them, leave [0, 2^35)");
  return {p, static_cast<uint64_t>(counter[0]), counter[1], counter[2], counter[3]};
}

uint32_t Dropout::threshold() const { return static_cast<uint32_t>(std::lround(p * 65536)); }

double Dropout::scale() const {
  const uint32_t kept = 65536 - threshold();
  return kept == 0 ? 0.0 : 65536.0 / kept;
}

void drop(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
          const at::Tensor& output, double factor) {
  const MaskPart part = part_of(dropout, first_row, input);
  if (use_own_kernel(input)) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, input.scalar_type(), "drop", [&] {
      const auto* in = input.const_data_ptr<scalar_t>();
      auto* out = output.mutable_data_ptr<scalar_t>();
      if (input.is_cpu()) {
        const auto scale = static_cast<wide_of<scalar_t>>(factor);
        for_rows(part, [&](int64_t first, const uint16_t* kept) {
          if (factor == 1) {
            drop_numbers(kept, part.size, in + first, out + first);
          } else {
            drop_and_scale_row(kept, part.size, in + first, scale, out + first);
          }
        });
      } else if constexpr (kWithCudaKernels) {
        drop_on_cuda(part, in, factor, out, input.get_device());
      }
    });
  } else {
    output.copy_(input.masked_fill(mask(part, input).logical_not(), 0));
    if (factor != 1) output.mul_(factor);
  }
}

void drop_and_add(const Dropout& dropout, int64_t first_row, const at::Tensor& input,
                  const at::Tensor& output, const at::Tensor& addend, double factor,
                  const at::Tensor& target) {
  const MaskPart part = part_of(dropout, first_row, input);
  if (!use_own_kernel(input)) {
    const at::Tensor dropped = mask(part, input).logical_not();
    output.copy_(input.masked_fill(dropped, 0));
    target.add_(addend.masked_fill(dropped, 0), factor);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, input.scalar_type(), "drop_and_add", [&] {
        const auto* in = input.const_data_ptr<scalar_t>();
        const auto* add = addend.const_data_ptr<scalar_t>();
        auto* out = output.mutable_data_ptr<scalar_t>();
        auto* sum = target.mutable_data_ptr<scalar_t>();
        if (input.is_cpu()) {
          for_rows(part, [&](int64_t first, const uint16_t* kept) {
            drop_numbers(kept, part.size, in + first, out + first);
            add_row(kept, part.size, add + first, static_cast<wide_of<scalar_t>>(factor),
                    sum + first);
          });
        } else if constexpr (kWithCudaKernels) {
          drop_and_add_on_cuda(part, in, out, add, factor, sum, input.get_device());
        }
      });
}

namespace {

at::Tensor dropped(const char* op, const at::Tensor& input, double p, at::IntArrayRef counter) {
  check_floating(op, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": input must have a dimension of features");
  const at::Tensor rows = as_matrix(input).contiguous();
  const auto dropout = Dropout::parse(op, p, counter, rows);
  at::Tensor output = at::empty_like(rows);
  drop(dropout, 0, rows, output, dropout.scale());
  return output.view(input.sizes());
}

at::Tensor seeded_dropout_kernel(const at::Tensor& input, double p, at::IntArrayRef counter) {
  return dropped("seeded_dropout", input, p, counter);
}

at::Tensor seeded_dropout_backward_kernel(const at::Tensor& grad_output, double p,
                                          at::IntArrayRef counter) {
  return dropped("seeded_dropout_backward", grad_output, p, counter);
}

struct SeededDropout : Gradient<SeededDropout, seeded_dropout, Saved<>> {
  static variable_list rule(const ForwardCall<seeded_dropout>& forward,
                            const variable_list& grads) {
    const auto [input, p, counter] = forward.arguments();
    return forward.gradients(seeded_dropout_backward(grads[0], p, counter));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<seeded_dropout>(library)
      .kernel<seeded_dropout_kernel>()
      .meta<same_shape_meta>()
      .gradient<SeededDropout>();
  implement<seeded_dropout_backward>(library)
      .kernel<seeded_dropout_backward_kernel>()
      .meta<same_shape_meta>();
}

}  // namespace parallel_ext
