#include "moe/grouped.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>

#include <limits>

#include "base/kernel_choice.h"
#include "moe/grouped_cuda.h"
#include "moe/rows_cuda.h"

namespace parallel_ext {
namespace {

constexpr int64_t kAligned = 16;  // bytes, as torch's kernel wants strides and pointers

bool is_aligned(const at::Tensor& tensor) {
  return tensor.size(-1) * tensor.element_size() % kAligned == 0 &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAligned == 0;
}

// Either order of its last two dimensions.
bool is_packed(const at::Tensor& weight) {
  return weight.is_contiguous() || weight.transpose(1, 2).is_contiguous();
}

bool has_them(const at::Tensor& rows) {
  if constexpr (kWithCudaKernels) {
    if (rows.is_cuda()) return has_grouped_products_on_cuda(rows.get_device());
  }
  return rows.is_cpu() && aten_path_on_cpu();
}

}  // namespace

bool use_grouped_products(const at::Tensor& rows, const at::Tensor& weight) {
  if (rows.size(0) > std::numeric_limits<int32_t>::max()) return false;  // of the offsets
  return rows.scalar_type() == at::kBFloat16 && rows.numel() > 0 && weight.numel() > 0 &&
         weight.size(1) * weight.element_size() % kAligned == 0 && rows.is_contiguous() &&
         is_packed(weight) && is_aligned(rows) && is_aligned(weight) && has_them(rows);
}

at::Tensor ends_of(at::IntArrayRef counts, const at::Tensor& like) {
  at::Tensor ends = at::empty({static_cast<int64_t>(counts.size())}, at::kInt);
  auto* out = ends.mutable_data_ptr<int32_t>();
  int64_t end = 0;
  for (const int64_t count : counts) *out++ = static_cast<int32_t>(end += count);
  return ends.to(like.device(), /*non_blocking=*/true);
}

at::Tensor ends_of(const at::Tensor& counts, const at::Tensor&) {
  return counts.cumsum(0).to(at::kInt);
}

at::Tensor grouped_rows(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends) {
  return at::_grouped_mm(rows, weight.transpose(1, 2), ends);
}

at::Tensor grouped_weights(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& ends,
                           at::IntArrayRef counts) {
  at::Tensor out = at::_grouped_mm(grad.t(), rows, ends);
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    if (counts[expert] == 0) out.select(0, static_cast<int64_t>(expert)).zero_();
  }
  return out;
}

at::Tensor grouped_weights(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& ends,
                           const at::Tensor& counts) {
  at::Tensor out = at::_grouped_mm(grad.t(), rows, ends);
  if constexpr (kWithCudaKernels) {
    if (out.is_cuda() && out.is_contiguous()) {  // what masked_fill_ takes as long as a product for
      const at::Tensor dense = counts.contiguous();
      zero_unused_on_cuda(dense.const_data_ptr<int64_t>(), out.size(0), out.nbytes() / out.size(0),
                          out.mutable_data_ptr(), out.get_device());
      return out;
    }
  }
  return out.masked_fill_(counts.eq(0).view({-1, 1, 1}), 0);
}

}  // namespace parallel_ext
