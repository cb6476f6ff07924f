// The two paths of what vocab/loss.h declares for [T] numbers: ATen calls, and CUDA kernels.
#pragma once

#include "vocab/loss.h"

namespace parallel_ext {

// The bits of an id, which stands in a row of statistics, as an integer.
inline at::Tensor view_as_ids(const at::Tensor& row) {
  return row.view(row.scalar_type() == at::kDouble ? at::kLong : at::kInt);
}

Tokens tokens_by_aten(const VocabLoss& loss, const at::Tensor& labels);
at::Tensor merged_by_aten(const at::Tensor& all_stats, const StatsRows& rows);
at::Tensor normalizer_by_aten(const at::Tensor& all_stats, const StatsRows& rows);
LossOutputs outputs_by_aten(const VocabLoss& loss, const Tokens& tokens,
                            const at::Tensor& all_stats, const StatsRows& rows,
                            const WantedStatistics& wanted);
at::Tensor factors_by_aten(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                           const at::Tensor& normalizer);

Tokens tokens_on_cuda(const VocabLoss& loss, const at::Tensor& labels);
at::Tensor merged_on_cuda(const at::Tensor& all_stats, const StatsRows& rows);
at::Tensor normalizer_on_cuda(const at::Tensor& all_stats, const StatsRows& rows);
LossOutputs outputs_on_cuda(const VocabLoss& loss, const Tokens& tokens,
                            const at::Tensor& all_stats, const StatsRows& rows,
                            const WantedStatistics& wanted);
at::Tensor factors_on_cuda(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                           const at::Tensor& normalizer);

}  // namespace parallel_ext
