// The loss's arithmetic on [T] numbers by the kernels of vocab/loss_cuda.h.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include "base/kernel_choice.h"
#include "vocab/loss_cuda.h"
#include "vocab/loss_paths.h"

namespace parallel_ext {
namespace {

template <typename number_t>
number_t* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<number_t>() : nullptr;
}

// What the kernels read of the tokens, which the caller holds on to.
LossOnCuda on_cuda(const VocabLoss& loss, const Tokens& tokens) {
  return {tokens.labels.const_data_ptr<int64_t>(),
          data_or_null<double>(tokens.weight_of_class),
          data_or_null<double>(tokens.totals),
          tokens.labels.size(0),
          loss.vocab_size,
          loss.ignore_index,
          loss.label_smoothing,
          loss.z_loss,
          loss.reduction != "none",
          loss.reduction == "mean"};
}

// Fills those of the outputs that are defined; the normalizer always is.
void fill_on_cuda(const LossOnCuda& loss, const at::Tensor& all_stats_in, const StatsRows& rows,
                  const LossOutputs& outputs, const at::Tensor& scratch) {
  const at::Tensor all_stats = all_stats_in.contiguous();
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES(all_stats.scalar_type(), "vocab_cross_entropy_forward", [&] {
      const LossResults<scalar_t> results{
          data_or_null<scalar_t>(outputs.loss),       data_or_null<scalar_t>(outputs.log_sum_exp),
          data_or_null<scalar_t>(outputs.entropy),    data_or_null<int64_t>(outputs.argmax),
          data_or_null<scalar_t>(outputs.normalizer), data_or_null<double>(scratch)};
      loss_results_on_cuda(loss, all_stats.size(0), rows, all_stats.const_data_ptr<scalar_t>(),
                           results, all_stats.get_device());
    });
  }
}

}  // namespace

Tokens tokens_on_cuda(const VocabLoss& loss, const at::Tensor& labels) {
  Tokens tokens;
  tokens.labels = labels.contiguous();
  const auto options = labels.options().dtype(at::kDouble);
  if (loss.weight) tokens.weight_of_class = loss.weight->to(options).contiguous();
  if (loss.reduction == "mean" || (loss.weight && loss.label_smoothing > 0)) {
    tokens.totals = at::empty({LossTotals::kCount}, options);
    if constexpr (kWithCudaKernels) {
      loss_totals_on_cuda(on_cuda(loss, tokens), data_or_null<double>(tokens.totals),
                          labels.get_device());
    }
  }
  return tokens;
}

at::Tensor merged_on_cuda(const at::Tensor& all_stats_in, const StatsRows& rows) {
  const at::Tensor all_stats = all_stats_in.contiguous();
  at::Tensor stats = at::empty({rows.count, all_stats.size(2)}, all_stats.options());
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES(all_stats.scalar_type(), "vocab_cross_entropy_forward", [&] {
      merge_stats_on_cuda(all_stats.size(0), all_stats.size(2), rows,
                          all_stats.const_data_ptr<scalar_t>(), stats.mutable_data_ptr<scalar_t>(),
                          all_stats.get_device());
    });
  }
  return stats;
}

at::Tensor normalizer_on_cuda(const at::Tensor& all_stats, const StatsRows& rows) {
  LossOnCuda nothing_of_labels{};
  nothing_of_labels.num_tokens = all_stats.size(2);
  LossOutputs outputs;
  outputs.normalizer = at::empty({kRowsWithoutEntropy, all_stats.size(2)}, all_stats.options());
  fill_on_cuda(nothing_of_labels, all_stats, rows, outputs, {});
  return outputs.normalizer;
}

LossOutputs outputs_on_cuda(const VocabLoss& loss, const Tokens& tokens,
                            const at::Tensor& all_stats, const StatsRows& rows,
                            const WantedStatistics& wanted) {
  const int64_t num_tokens = all_stats.size(2);
  const auto options = all_stats.options();
  const bool is_sum = loss.reduction != "none";
  const auto if_wanted = [&](bool is_wanted, const at::TensorOptions& of_output) {
    return is_wanted ? at::empty({num_tokens}, of_output) : at::Tensor();
  };
  LossOutputs outputs{
      is_sum ? at::empty({}, options) : at::empty({num_tokens}, options),
      if_wanted(wanted.log_sum_exp, options), if_wanted(wanted.entropy, options),
      if_wanted(wanted.argmax, options.dtype(at::kLong)),
      at::empty({wanted.entropy ? kRowsWithEntropy : kRowsWithoutEntropy, num_tokens}, options)};
  const at::Tensor scratch =
      is_sum ? at::empty({2, num_tokens}, options.dtype(at::kDouble)) : at::Tensor();
  fill_on_cuda(on_cuda(loss, tokens), all_stats, rows, outputs, scratch);
  for (at::Tensor* each : {&outputs.log_sum_exp, &outputs.entropy}) {
    if (!each->defined()) *each = at::empty({0}, options);
  }
  if (!wanted.argmax) outputs.argmax = at::empty({0}, options.dtype(at::kLong));
  return outputs;
}

at::Tensor factors_on_cuda(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                           const at::Tensor& normalizer_in) {
  const at::Tensor normalizer = normalizer_in.contiguous();
  const int64_t num_tokens = normalizer.size(1);
  at::Tensor factors = at::empty({GradientRows::kCount, num_tokens}, normalizer.options());
  const auto of_tokens = [&](const std::optional<at::Tensor>& grad) {
    return grad ? grad->to(normalizer.options()).expand({num_tokens}) : at::Tensor();
  };
  const at::Tensor of_loss = of_tokens(grads.loss), of_entropy = of_tokens(grads.entropy),
                   of_log_sum_exp = of_tokens(grads.log_sum_exp);
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES(normalizer.scalar_type(), "vocab_cross_entropy_backward", [&] {
      const auto per_token = [](const at::Tensor& grad) {
        return grad.defined() ? PerToken<scalar_t>{grad.const_data_ptr<scalar_t>(), grad.stride(0)}
                              : PerToken<scalar_t>{};
      };
      loss_factors_on_cuda<scalar_t>(
          on_cuda(loss, tokens),
          {per_token(of_loss), per_token(of_log_sum_exp), per_token(of_entropy)},
          normalizer.const_data_ptr<scalar_t>(), factors.mutable_data_ptr<scalar_t>(),
          normalizer.get_device());
    });
  }
  return factors;
}

}  // namespace parallel_ext
