#include "vocab/shard.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "base/kernel_choice.h"
#include "check.h"
#include "vocab/shard_cuda.h"

namespace parallel_ext {
namespace {

template <typename scalar_t>
ShardOnCuda<scalar_t> shard_on_cuda(const VocabShard& shard) {
  using wide_t = wide_of<scalar_t>;
  return {shard.logits.const_data_ptr<scalar_t>(),
          shard.labels.const_data_ptr<int64_t>(),
          shard.weight.defined() ? shard.weight.const_data_ptr<wide_t>() : nullptr,
          shard.logits.size(0),
          shard.logits.size(1),
          shard.logits.stride(0),
          shard.vocab_start,
          static_cast<wide_t>(shard.scale),
          static_cast<wide_t>(shard.cap)};
}

at::Tensor stats_on_cuda(const VocabShard& shard, const StatsRows& rows) {
  at::Tensor partial_stats = at::empty({rows.count, shard.logits.size(0)},
                                       shard.logits.options().dtype(wide_type(shard.logits)));
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, shard.logits.scalar_type(), "vocab_cross_entropy_forward", [&] {
          vocab_stats_on_cuda(shard_on_cuda<scalar_t>(shard), rows,
                              partial_stats.mutable_data_ptr<wide_of<scalar_t>>(),
                              shard.logits.get_device());
        });
  }
  return partial_stats;
}

void gradient_on_cuda(const VocabShard& shard, const at::Tensor& normalizer,
                      const at::Tensor& factors, at::Tensor& grad_logits) {
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, shard.logits.scalar_type(), "vocab_cross_entropy_backward", [&] {
          using wide_t = wide_of<scalar_t>;
          vocab_gradient_on_cuda(
              shard_on_cuda<scalar_t>(shard), normalizer.const_data_ptr<wide_t>(),
              factors.const_data_ptr<wide_t>(), grad_logits.mutable_data_ptr<scalar_t>(),
              grad_logits.stride(0), shard.logits.get_device());
        });
  }
}

}  // namespace

at::Tensor vocab_shard_stats(const VocabShard& shard, const StatsRows& rows) {
  if (use_cuda_kernel(shard.logits)) return stats_on_cuda(shard, rows);
  if (use_cpu_loops(shard.logits)) return vocab_shard_stats_cpu(shard, rows);
  return vocab_shard_stats_aten(shard, rows);
}

void vocab_shard_gradient(const VocabShard& shard, const at::Tensor& normalizer_in,
                          const at::Tensor& factors_in, at::Tensor& grad_logits) {
  const at::Tensor normalizer = normalizer_in.contiguous(), factors = factors_in.contiguous();
  if (use_cuda_kernel(shard.logits)) {
    gradient_on_cuda(shard, normalizer, factors, grad_logits);
  } else if (use_cpu_loops(shard.logits)) {
    vocab_shard_gradient_cpu(shard, normalizer, factors, grad_logits);
  } else {
    vocab_shard_gradient_aten(shard, normalizer, factors, grad_logits);
  }
}

}  // namespace parallel_ext
