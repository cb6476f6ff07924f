#include "vocab/loss.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

#include "base/kernel_choice.h"
#include "check.h"
#include "comm/comm.h"
#include "vocab/loss_paths.h"

namespace parallel_ext {
namespace {

void check_weight(const char* op, const at::Tensor& weight, int64_t vocab_size) {
  check_floating(op, "weight", weight);
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.size(0) == vocab_size, op, ": weight of shape ",
                    weight.sizes(), " does not fit the vocabulary of ", vocab_size,
                    "; pass one number for each id, the whole ", vocab_size, " on every rank");
}

void check_weight_values(const char* op, const at::Tensor& weight) {
  if (!weight.is_cpu()) return;  // reading it back would stall the device
  const at::Tensor wide = weight.to(at::kDouble).contiguous();
  const double* value = wide.const_data_ptr<double>();
  for (int64_t id = 0; id < wide.numel(); ++id) {
    TORCH_CHECK_VALUE(0 <= value[id] && value[id] < kInfinity, op, ": weight ", value[id],
                      " of id ", id, " is not a finite number >= 0");
  }
}

void check_options(const char* op, const VocabLoss& loss) {
  TORCH_CHECK_VALUE(0 <= loss.label_smoothing && loss.label_smoothing < 1, op,
                    ": label_smoothing must be in [0, 1), got ", loss.label_smoothing);
  TORCH_CHECK_VALUE(0 <= loss.z_loss && std::isfinite(loss.z_loss), op,
                    ": z_loss must be a finite number >= 0, got ", loss.z_loss);
  TORCH_CHECK_VALUE(!loss.softcap || (*loss.softcap > 0 && std::isfinite(*loss.softcap)), op,
                    ": softcap must be a finite number > 0, or None for no cap, got ",
                    *loss.softcap);
  TORCH_CHECK_VALUE(std::isfinite(loss.logit_scale), op, ": logit_scale must be finite, got ",
                    loss.logit_scale);
  TORCH_CHECK_VALUE(loss.reduction == "none" || loss.reduction == "sum" || loss.reduction == "mean",
                    op, ": reduction must be 'none', 'sum' or 'mean', got '", loss.reduction, "'");
}

void check_labels(const char* op, const VocabLoss& loss, const at::Tensor& labels) {
  if (!labels.is_cpu()) return;  // reading ids back would stall the device; agreement checks them
  const at::Tensor in_order = labels.contiguous();
  const int64_t* label = in_order.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < labels.numel(); ++token) {
    TORCH_CHECK_INDEX(
        label[token] == loss.ignore_index || (0 <= label[token] && label[token] < loss.vocab_size),
        op, ": label ", label[token], " at position ", token, " is outside the vocabulary [0, ",
        loss.vocab_size, ") and is not ignore_index ", loss.ignore_index);
  }
}

// Checks ranges [ranks, 2], the (start, stop) of each rank: together they are the vocabulary.
void check_ranges(const char* op, const at::Tensor& ranges, int64_t vocab_size) {
  const at::Tensor in_order = ranges.to(at::kLong).contiguous();
  const int64_t* bound = in_order.const_data_ptr<int64_t>();
  std::vector<std::pair<int64_t, int64_t>> sorted;
  for (int64_t rank = 0; rank < ranges.size(0); ++rank) {
    const int64_t start = bound[2 * rank], stop = bound[2 * rank + 1];
    if (start < stop) sorted.emplace_back(start, stop);
  }
  std::sort(sorted.begin(), sorted.end());
  bool fit = true;
  int64_t next = 0;
  for (const auto& [start, stop] : sorted) {
    fit = fit && start == next;
    next = stop;
  }
  TORCH_CHECK_VALUE(fit && next == vocab_size, op, ": the ranks' shards begin and end at ",
                    at::IntArrayRef(bound, in_order.numel()), ", which is some of the ", vocab_size,
                    " ids twice, or not at all; pass each rank's own");
}

}  // namespace

VocabShard VocabLoss::shard(const at::Tensor& logits, const at::Tensor& labels,
                            int64_t start) const {
  at::Tensor own_weight;
  if (weight) own_weight = weight->narrow(0, start, logits.size(1)).to(wide_type(logits));
  return {logits, labels.contiguous(), own_weight.defined() ? own_weight.contiguous() : own_weight,
          start,  logit_scale,         softcap.value_or(0)};
}

void check_vocab_loss_shapes(const char* op, const VocabLoss& loss, const char* name,
                             int64_t shard_size, int64_t num_tokens, const at::Tensor& labels) {
  check_int64(op, "labels", labels);
  check_vocab_range(op, name, shard_size, loss.vocab_size, loss.vocab_start, loss.vocab_stop);
  TORCH_CHECK_VALUE(labels.dim() == 1 && labels.size(0) == num_tokens, op, ": labels of shape ",
                    labels.sizes(), " do not fit the ", num_tokens,
                    " tokens; one label for each is expected");
  if (loss.weight) check_weight(op, *loss.weight, loss.vocab_size);
}

void check_vocab_loss(const char* op, const VocabLoss& loss, const char* name, int64_t shard_size,
                      int64_t num_tokens, const at::Tensor& labels, bool want_argmax) {
  check_options(op, loss);
  TORCH_CHECK_VALUE(!want_argmax || loss.vocab_size <= kLastId, op, ": argmax is for at most ",
                    kLastId, " ids, got ", loss.vocab_size);
  check_vocab_loss_shapes(op, loss, name, shard_size, num_tokens, labels);
  if (loss.weight) check_weight_values(op, *loss.weight);
  check_labels(op, loss, labels);
}

void check_normalizer(const char* op, const at::Tensor& normalizer, int64_t num_tokens,
                      bool with_entropy) {
  TORCH_CHECK_VALUE(
      normalizer.dim() == 2 && normalizer.size(1) == num_tokens &&
          normalizer.size(0) >= (with_entropy ? kRowsWithEntropy : kRowsWithoutEntropy) &&
          normalizer.size(0) <= kRowsWithEntropy,
      op, ": the normalizer of ", num_tokens, " tokens has shape [2, ", num_tokens, "], or [3, ",
      num_tokens, "] with the entropy, got ", normalizer.sizes());
}

Tokens tokens_of(const VocabLoss& loss, const at::Tensor& labels) {
  return use_cuda_kernel(labels) ? tokens_on_cuda(loss, labels) : tokens_by_aten(loss, labels);
}

Tokens Tokens::narrow(int64_t start, int64_t size) const {
  const auto own = [&](const at::Tensor& each) {
    return each.defined() ? each.narrow(0, start, size) : each;
  };
  return {own(labels), weight_of_class, totals, own(ignored), own(weight), total_weight, count};
}

at::Tensor gather_stats(const char* op, const VocabLoss& loss, const at::Tensor& partial_stats,
                        const Group& group) {
  if (group.alone() || !partial_stats.is_cpu() || loss.vocab_size > kLastId) {
    return all_gather(op, partial_stats, group);
  }
  const int64_t size = partial_stats.numel();
  at::Tensor message = at::empty({size + 2}, partial_stats.options());
  message.narrow(0, 0, size).view(partial_stats.sizes()).copy_(partial_stats);
  at::Tensor range = view_as_ids(message.narrow(0, size, 2));
  range[0].fill_(loss.vocab_start), range[1].fill_(loss.vocab_stop);
  const at::Tensor all = all_gather(op, message, group);
  check_ranges(op, view_as_ids(all.narrow(1, size, 2)), loss.vocab_size);
  return all.narrow(1, 0, size).unflatten(1, partial_stats.sizes());
}

at::Tensor merged_stats(const at::Tensor& all_stats, const StatsRows& rows) {
  return use_cuda_kernel(all_stats) ? merged_on_cuda(all_stats, rows)
                                    : merged_by_aten(all_stats, rows);
}

at::Tensor normalizer_of(const at::Tensor& all_stats, const StatsRows& rows) {
  return use_cuda_kernel(all_stats) ? normalizer_on_cuda(all_stats, rows)
                                    : normalizer_by_aten(all_stats, rows);
}

LossOutputs outputs_of(const VocabLoss& loss, const Tokens& tokens, const at::Tensor& all_stats,
                       const StatsRows& rows, const WantedStatistics& wanted) {
  return use_cuda_kernel(all_stats) ? outputs_on_cuda(loss, tokens, all_stats, rows, wanted)
                                    : outputs_by_aten(loss, tokens, all_stats, rows, wanted);
}

at::Tensor factors_of(const VocabLoss& loss, const LossGradients& grads, const Tokens& tokens,
                      const at::Tensor& normalizer) {
  return use_cuda_kernel(normalizer) ? factors_on_cuda(loss, grads, tokens, normalizer)
                                     : factors_by_aten(loss, grads, tokens, normalizer);
}

}  // namespace parallel_ext
