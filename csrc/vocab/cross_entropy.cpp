// Cross entropy of logits that are cut by vocabulary. A rank reduces its shard to one record per
// token, the records are exchanged once, and every rank merges the same records in rank order.
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "base/workspace.h"
#include "check.h"
#include "linear/linear.h"
#include "ops.h"
#include "vocab/loss_op.h"

namespace parallel_ext {
namespace {

constexpr const char* kOp = "vocab_cross_entropy";
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using FiveTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

at::Tensor with_adjacent_columns(const at::Tensor& logits) {
  return has_adjacent_columns(logits) ? logits : logits.contiguous();
}

FiveTensors forward_kernel(const VocabLoss& loss, const at::Tensor& logits,
                           const at::Tensor& labels, std::array<bool, 3> wanted, int64_t group_size,
                           const std::string& group_name) {
  check_floating(kOp, "logits", logits);
  check_dim(kOp, "logits", logits, 2);
  check_vocab_loss(kOp, loss, "logits", logits.size(1), logits.size(0), labels, wanted[2]);
  const RecordRows rows(loss.label_smoothing > 0, wanted[1], wanted[2]);
  const at::Tensor record =
      vocab_shard_record(loss.shard(with_adjacent_columns(logits), labels, loss.vocab_start), rows);
  const Merged merged = merge(exchange_records(kOp, loss, record, group_size, group_name), rows);
  const auto [total, log_sum_exp, entropy, argmax, normalizer] =
      outputs_of(loss, tokens_of(loss, labels), merged, {wanted[0], wanted[1], wanted[2]},
                 record.scalar_type());
  return {total, log_sum_exp, entropy, argmax, normalizer};
}

FourTensors loss_kernel(const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels,
                        std::array<bool, 3> wanted, bool, int64_t group_size,
                        const std::string& group_name) {
  const auto [total, log_sum_exp, entropy, argmax, _] =
      forward_kernel(loss, logits, labels, wanted, group_size, group_name);
  return {total, log_sum_exp, entropy, argmax};
}

at::Tensor empty_gradient(const at::Tensor& logits) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const int64_t stride = row_stride_of_gradient(logits).expect_int();
  if (logits.numel() == 0) return at::empty_strided({rows, columns}, {stride, 1}, logits.options());
  const at::Tensor empty = pooled_empty({(rows - 1) * stride + columns}, logits.options())
                               .as_strided({rows, columns}, {stride, 1});
  fill_gaps(empty);
  return empty;
}

void fill_gradient(const VocabLoss& loss, const LossGradients& grads, const at::Tensor& logits,
                   const at::Tensor& labels, const at::Tensor& normalizer,
                   at::Tensor& grad_logits) {
  check_normalizer(kOp, normalizer, logits.size(0), grads.entropy.has_value());
  vocab_shard_gradient(loss.shard(logits, labels, loss.vocab_start), normalizer,
                       factors_of(loss, grads, tokens_of(loss, labels), normalizer), grad_logits);
}

void check_backward(const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels) {
  check_floating(kOp, "logits", logits);
  check_dim(kOp, "logits", logits, 2);
  check_vocab_loss_shapes(kOp, loss, "logits", logits.size(1), logits.size(0), labels);
}

at::Tensor backward_kernel(const VocabLoss& loss, const MaybeTensor& grad_loss,
                           const MaybeTensor& grad_log_sum_exp, const MaybeTensor& grad_entropy,
                           const at::Tensor& logits, const at::Tensor& labels,
                           const at::Tensor& normalizer) {
  check_backward(loss, logits, labels);
  at::Tensor grad_logits = empty_gradient(logits);
  const bool as_they_are = has_adjacent_columns(logits);
  if (!as_they_are) grad_logits.copy_(logits);
  fill_gradient(loss, {grad_loss, grad_log_sum_exp, grad_entropy},
                as_they_are ? logits : grad_logits, labels, normalizer, grad_logits);
  return grad_logits;
}

void consuming_backward_kernel(const VocabLoss& loss, const MaybeTensor& grad_loss,
                               const MaybeTensor& grad_log_sum_exp, const MaybeTensor& grad_entropy,
                               at::Tensor& logits, const at::Tensor& labels,
                               const at::Tensor& normalizer) {
  check_backward(loss, logits, labels);
  TORCH_CHECK_VALUE(has_adjacent_columns(logits), kOp, ": columns of logits with strides ",
                    logits.strides(), " are not one apart");
  fill_gradient(loss, {grad_loss, grad_log_sum_exp, grad_entropy}, logits, labels, normalizer,
                logits);
}

}  // namespace

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("vocab_cross_entropy", vocab_loss_kernel<loss_kernel>);
  m.impl("vocab_cross_entropy_forward", vocab_loss_kernel<forward_kernel>);
  m.impl("vocab_cross_entropy_backward", vocab_loss_kernel<backward_kernel>);
  m.impl("vocab_cross_entropy_backward_", vocab_loss_kernel<consuming_backward_kernel>);
}

}  // namespace parallel_ext
