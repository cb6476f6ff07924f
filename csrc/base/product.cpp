#include "base/product.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "base/kernel_choice.h"
#include "base/layout.h"
#include "base/number.h"

namespace parallel_ext {
namespace {

constexpr int64_t kRowsOfProduct = 1024;

// Whether torch multiplies these factors by loops of its own, since oneDNN has none for the CPU.
// They take ten times as long for a b as for a b^T or a^T b.
bool multiplied_by_loops(const at::Tensor& a) {
  static const bool has_one_dnn = [] {
    const auto op =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return op && op->typed<bool()>().call();
  }();
  return a.is_cpu() && a.scalar_type() == at::kBFloat16 && !has_one_dnn;
}

PARALLEL_EXT_MULTIVERSION void add_wide(const c10::BFloat16* values, int64_t size, float* sum) {
  for (int64_t i = 0; i < size; ++i) sum[i] += widen(values[i]);
}

// sum += values; ATen would convert the values to the dtype of the sum in two more passes.
void add_to(at::Tensor& sum, const at::Tensor& values) {
  if (!values.is_cpu() || values.scalar_type() != at::kBFloat16 || !sum.is_contiguous()) {
    sum.add_(values);
    return;
  }
  const auto* from = values.const_data_ptr<c10::BFloat16>();
  auto* to = sum.mutable_data_ptr<float>();
  at::parallel_for(0, values.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    add_wide(from + begin, end - begin, to + begin);
  });
}

constexpr int64_t kBlock = 32, kBitsOfBlock = 5;

// Writes the transposed block of kBlock rows and columns to `room`. Interleaving the two halves of
// a block rotates the bits of the index (row, column) by one; after kBitsOfBlock times they are
// (column, row).
PARALLEL_EXT_INLINE void transpose_block(uint16_t* block, uint16_t* room) {
  constexpr int64_t kHalf = kBlock * kBlock / 2;
  static_assert(kBlock == 1 << kBitsOfBlock && kBitsOfBlock % 2 == 1);
  for (int64_t turn = 0; turn < kBitsOfBlock; ++turn) {
    const uint16_t* __restrict from = turn % 2 == 0 ? block : room;
    uint16_t* __restrict to = turn % 2 == 0 ? room : block;
    for (int64_t i = 0; i < kHalf; ++i) {
      to[2 * i] = from[i];
      to[2 * i + 1] = from[i + kHalf];
    }
  }
}

// Sums are wide, so a bf16 output is written once and never added to.
PARALLEL_EXT_INLINE void put(uint16_t bits, bool, c10::BFloat16* out) { out->x = bits; }
PARALLEL_EXT_INLINE void put(uint16_t bits, bool first, float* out) {
  const float value = widen(c10::BFloat16(bits, c10::BFloat16::from_bits()));
  *out = first ? value : *out + value;
}

PARALLEL_EXT_INLINE uint16_t bits_of(uint16_t bits) { return bits; }
PARALLEL_EXT_INLINE uint16_t bits_of(c10::BFloat16 value) { return value.x; }

// Copies at most kBlock numbers; the compiler unrolls the loop of known length.
template <typename from_t>
PARALLEL_EXT_INLINE void copy_bits(const from_t* from, int64_t size, uint16_t* to) {
  if (size == kBlock) {
    for (int64_t i = 0; i < kBlock; ++i) to[i] = bits_of(from[i]);
  } else {
    for (int64_t i = 0; i < size; ++i) to[i] = bits_of(from[i]);
  }
}

// out [columns, rows] += values^T, or out = values^T if `first`; values [rows, columns] has rows
// `stride` apart.
template <typename out_t>
PARALLEL_EXT_INLINE void transpose(const c10::BFloat16* values, int64_t stride, int64_t rows,
                                   int64_t columns, out_t* out, int64_t out_stride, bool first) {
  constexpr int64_t kPanel = 512;  // numbers of a row that are written to memory at once
  uint16_t block[kBlock * kBlock]{}, transposed[kBlock * kBlock], panel[kBlock][kPanel];
  for (int64_t column = 0; column < columns; column += kBlock) {
    const int64_t width = std::min(kBlock, columns - column);
    for (int64_t start = 0; start < rows; start += kPanel) {
      const int64_t length = std::min(kPanel, rows - start);
      for (int64_t row = 0; row < length; row += kBlock) {
        const int64_t height = std::min(kBlock, length - row);
        for (int64_t i = 0; i < height; ++i) {
          copy_bits(values + (start + row + i) * stride + column, width, block + i * kBlock);
        }
        transpose_block(block, transposed);
        for (int64_t j = 0; j < width; ++j) {
          copy_bits(transposed + j * kBlock, kBlock, panel[j] + row);
        }
      }
      for (int64_t j = 0; j < width; ++j) {
        out_t* to = out + (column + j) * out_stride + start;
        for (int64_t i = 0; i < length; ++i) put(panel[j][i], first, to + i);
      }
    }
  }
}

// One function per dtype: target_clones does not work with templates.
#define PARALLEL_EXT_ADD_TRANSPOSED(out_t)                                                   \
  PARALLEL_EXT_MULTIVERSION void add_transposed(const c10::BFloat16* values, int64_t stride, \
                                                int64_t rows, int64_t columns, out_t* out,   \
                                                int64_t out_stride, bool first) {            \
    transpose(values, stride, rows, columns, out, out_stride, first);                        \
  }

PARALLEL_EXT_ADD_TRANSPOSED(float)
PARALLEL_EXT_ADD_TRANSPOSED(c10::BFloat16)

template <typename out_t>
void add_transposed(const at::Tensor& values, at::Tensor& sum, bool first) {
  const auto* from = values.const_data_ptr<c10::BFloat16>();
  auto* out = sum.mutable_data_ptr<out_t>();
  const int64_t stride = values.stride(0), out_stride = sum.stride(0), rows = values.size(0);
  at::parallel_for(0, values.size(1), 64, [&](int64_t begin, int64_t end) {
    add_transposed(from + begin, stride, rows, end - begin, out + begin * out_stride, out_stride,
                   first);
  });
}

}  // namespace

std::vector<Range> ranges_of(int64_t total, int64_t largest) {
  std::vector<Range> ranges;
  if (total == 0) return ranges;
  const std::vector<int64_t> bounds = split(total, (total + largest - 1) / largest, 1);
  for (size_t part = 0; part + 1 < bounds.size(); ++part) {
    ranges.push_back({bounds[part], bounds[part + 1] - bounds[part]});
  }
  return ranges;
}

void add_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b_in, bool first) {
  const bool copy_pays = multiplied_by_loops(a) && a.stride(1) == 1;
  const at::Tensor b = copy_pays ? b_in.t().contiguous().t() : b_in;
  if (a.scalar_type() == sum.scalar_type()) {
    if (first) {
      at::mm_out(sum, a, b);
    } else {
      sum.addmm_(a, b);
    }
    return;
  }
  if (a.is_cuda()) {  // where a product may be wider than its factors
    first ? void(at::mm_out(sum, a, b, sum.scalar_type()))
          : add_to(sum, at::mm(a, b, sum.scalar_type()));
    return;
  }
  for (const Range part : ranges_of(sum.size(0), a.is_cpu() ? kRowsOfProduct : sum.size(0))) {
    const at::Tensor product = at::mm(a.narrow(0, part.start, part.size), b);
    at::Tensor of_sum = sum.narrow(0, part.start, part.size);
    first ? void(of_sum.copy_(product)) : add_to(of_sum, product);
  }
}

void add_transposed_product(at::Tensor sum, const at::Tensor& a, const at::Tensor& b, bool first) {
  const bool adds_wide = first || sum.scalar_type() == at::kFloat;
  if (!a.is_cpu() || a.scalar_type() != at::kBFloat16 || multiplied_by_loops(a) ||
      sum.stride(1) != 1 || !adds_wide) {
    return add_product(sum, a.t(), b, first);
  }
  // oneDNN takes twice as long for a^T b as for b^T a, and b is small enough to be transposed by a
  // copy.
  const at::Tensor b_transposed = b.t().contiguous();
  const auto parts = ranges_of(a.size(1), kRowsOfProduct);
  const at::Tensor room =
      at::empty({b.size(1), parts.empty() ? 0 : parts.front().size}, a.options());
  for (const Range part : parts) {
    at::Tensor product = room.narrow(1, 0, part.size),
               of_sum = sum.narrow(0, part.start, part.size);
    at::mm_out(product, b_transposed, a.narrow(1, part.start, part.size));
    if (sum.scalar_type() == at::kBFloat16) {
      add_transposed<c10::BFloat16>(product, of_sum, first);
    } else {
      add_transposed<float>(product, of_sum, first);
    }
  }
}

}  // namespace parallel_ext
