// The fused head's gradients by the kernels of vocab/linear_cross_entropy_cuda.h.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "base/kernel_choice.h"
#include "vocab/linear_cross_entropy.h"
#include "vocab/linear_cross_entropy_cuda.h"

namespace parallel_ext {

void multiply_on_cuda(const at::Tensor& numbers, const at::Tensor& factor_in) {
  const at::Tensor factor = factor_in.to(wide_type(numbers));
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, numbers.scalar_type(), "linear_vocab_cross_entropy_backward",
        [&] {
          scale_on_cuda(numbers.mutable_data_ptr<scalar_t>(), numbers.numel(),
                        factor.const_data_ptr<wide_of<scalar_t>>(), numbers.get_device());
        });
  }
}

at::Tensor frozen_gradient_on_cuda(const VocabLoss& loss, const at::Tensor& expected_rows_in,
                                   const at::Tensor& head_in, const at::Tensor& labels_in,
                                   const at::Tensor& factors, const at::Tensor& column_row) {
  const at::Tensor expected_rows = expected_rows_in.contiguous(), head = head_in.contiguous();
  const at::Tensor labels = labels_in.contiguous();
  at::Tensor grad = at::empty(expected_rows.sizes(), head.options());
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, head.scalar_type(), "linear_vocab_cross_entropy_backward", [&] {
          using wide_t = wide_of<scalar_t>;
          frozen_gradient_on_cuda<scalar_t>(
              {expected_rows.const_data_ptr<wide_t>(), head.const_data_ptr<scalar_t>(),
               labels.const_data_ptr<int64_t>(), factors.const_data_ptr<wide_t>(),
               column_row.defined() ? column_row.const_data_ptr<wide_t>() : nullptr, labels.numel(),
               head.size(1), head.size(0), loss.vocab_start, static_cast<wide_t>(loss.logit_scale)},
              grad.mutable_data_ptr<scalar_t>(), grad.get_device());
        });
  }
  return grad;
}

}  // namespace parallel_ext
