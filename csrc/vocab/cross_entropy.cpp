// Cross entropy of logits that are sharded by vocabulary. A rank reduces its shard to a few numbers
// per token, its partial statistics; the ranks exchange them once, and every rank merges the same
// numbers in rank order.
#include <ATen/ops/empty_strided.h>

#include "base/workspace.h"
#include "check.h"
#include "comm/comm.h"
#include "linear/linear.h"
#include "vocab/loss.h"
#include "vocab/loss_autograd.h"
#include "vocab/ops.h"

namespace parallel_ext {
namespace {

constexpr const char* kLogitsLoss = "vocab_cross_entropy";
Tensors<5> logits_loss_forward(const at::Tensor& logits, const at::Tensor& labels,
                               std::array<bool, 3> wanted, const Group& group,
                               const VocabLoss& loss) {
  check_floating(kLogitsLoss, "logits", logits);
  check_dim(kLogitsLoss, "logits", logits, 2);
  check_vocab_loss(kLogitsLoss, loss, "logits", logits.size(1), logits.size(0), labels, wanted[2]);
  const StatsRows rows(loss.label_smoothing > 0, wanted[1], wanted[2]);
  const at::Tensor partial_stats =
      vocab_shard_stats(loss.shard(with_adjacent_columns(logits), labels, loss.vocab_start), rows);
  const at::Tensor all_stats = gather_stats(kLogitsLoss, loss, partial_stats, group);
  const auto [total, log_sum_exp, entropy, argmax, normalizer] =
      outputs_of(loss, tokens_of(loss, labels), all_stats, rows, {wanted[0], wanted[1], wanted[2]});
  return {total, log_sum_exp, entropy, argmax, normalizer};
}

Tensors<5> logits_loss_forward_meta(const at::Tensor& logits, const at::Tensor& labels,
                                    std::array<bool, 3> wanted, const Group&,
                                    const VocabLoss& loss) {
  return loss_outputs_meta(logits, labels, wanted, loss);
}

// The op where nothing has a gradient.
template <auto forward>
Tensors<4> logits_loss_without_gradient(const at::Tensor& logits, const at::Tensor& labels,
                                        std::array<bool, 3> wanted, bool, const Group& group,
                                        const VocabLoss& loss) {
  return from_list<Tensors<4>>(as_list(forward(logits, labels, wanted, group, loss)));
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
  check_normalizer(kLogitsLoss, normalizer, logits.size(0), grads.entropy.has_value());
  vocab_shard_gradient(loss.shard(logits, labels, loss.vocab_start), normalizer,
                       factors_of(loss, grads, tokens_of(loss, labels), normalizer), grad_logits);
}

void check_backward(const VocabLoss& loss, const at::Tensor& logits, const at::Tensor& labels) {
  check_floating(kLogitsLoss, "logits", logits);
  check_dim(kLogitsLoss, "logits", logits, 2);
  check_vocab_loss_shapes(kLogitsLoss, loss, "logits", logits.size(1), logits.size(0), labels);
}

at::Tensor logits_loss_backward(const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
                                const MaybeTensor& grad_entropy, const at::Tensor& logits,
                                const at::Tensor& labels, const at::Tensor& normalizer,
                                const VocabLoss& loss) {
  check_backward(loss, logits, labels);
  at::Tensor grad_logits = empty_gradient(logits);
  const bool as_they_are = has_adjacent_columns(logits);
  if (!as_they_are) grad_logits.copy_(logits);
  fill_gradient(loss, {grad_loss, grad_log_sum_exp, grad_entropy},
                as_they_are ? logits : grad_logits, labels, normalizer, grad_logits);
  return grad_logits;
}

at::Tensor logits_loss_backward_meta(const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                     const at::Tensor& logits) {
  return at::empty_strided_symint(logits.sym_sizes(), {row_stride_of_gradient(logits), 1},
                                  logits.options());
}

void logits_loss_backward_over_logits(const MaybeTensor& grad_loss,
                                      const MaybeTensor& grad_log_sum_exp,
                                      const MaybeTensor& grad_entropy, at::Tensor& logits,
                                      const at::Tensor& labels, const at::Tensor& normalizer,
                                      const VocabLoss& loss) {
  check_backward(loss, logits, labels);
  TORCH_CHECK_VALUE(has_adjacent_columns(logits), kLogitsLoss, ": columns of logits with strides ",
                    logits.strides(), " are not one apart");
  fill_gradient(loss, {grad_loss, grad_log_sum_exp, grad_entropy}, logits, labels, normalizer,
                logits);
}

void backward_over_logits_meta(const MaybeTensor&) {}

// The normalizer is saved, never the loss, which users add to in place.
class VocabCrossEntropy : public torch::autograd::Function<VocabCrossEntropy> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& logits,
                               const at::Tensor& labels, std::array<bool, 3> wanted,
                               bool consume_logits, const Group& group, const VocabLoss& loss) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [total, log_sum_exp, entropy, argmax, normalizer] =
        vocab_cross_entropy_forward(logits, labels, wanted, group, loss);
    keep_for_backward(ctx, {loss, group}, wanted, {total, log_sum_exp, entropy, argmax});
    ctx->save_for_backward({logits, labels, loss.weight.value_or(at::Tensor()), normalizer});
    ctx->saved_data["consume_logits"] = consume_logits;
    return {total, log_sum_exp, entropy, argmax};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    variable_list grads(6);
    auto& data = ctx->saved_data;
    TORCH_CHECK_VALUE(!data["consumed"].isBool(), kLogitsLoss,
                      ": a backward has written the gradient over these logits, as "
                      "consume_logits=True allows, so it cannot run again");
    const auto saved = ctx->get_saved_variables();
    const auto [grad_loss, grad_log_sum_exp, grad_entropy] = gradients_of(grad_outputs);
    if (!grad_loss && !grad_log_sum_exp && !grad_entropy) return grads;
    refuse_create_graph(kLogitsLoss);
    const VocabLoss loss = kept_in_graph<LossCall>(ctx).loss_with(saved[2]);
    if (data["consume_logits"].toBool()) {
      at::Tensor logits = saved[0].detach();
      vocab_cross_entropy_backward_(grad_loss, grad_log_sum_exp, grad_entropy, logits, saved[1],
                                    saved[3], loss);
      data["consumed"] = true;
      grads[0] = logits;
    } else {
      grads[0] = vocab_cross_entropy_backward(grad_loss, grad_log_sum_exp, grad_entropy, saved[0],
                                              saved[1], saved[3], loss);
    }
    return grads;
  }
};

Tensors<4> logits_loss_autograd(const at::Tensor& logits, const at::Tensor& labels,
                                std::array<bool, 3> wanted, bool consume_logits, const Group& group,
                                const VocabLoss& loss) {
  refuse_gradient_of_weight(kLogitsLoss, loss);
  if (consume_logits && logits.requires_grad() && at::GradMode::is_enabled()) {
    TORCH_CHECK_VALUE(!logits.is_leaf() && !(logits.is_view() && logits._base().is_leaf()),
                      kLogitsLoss,
                      ": consume_logits=True would write a gradient over a leaf, which the user "
                      "keeps; pass logits that were computed");
    TORCH_CHECK_VALUE(logits.dim() == 2 && has_adjacent_columns(logits), kLogitsLoss,
                      ": consume_logits=True needs columns one apart and rows that do not overlap, "
                      "got strides ",
                      logits.sym_strides());
  }
  return from_list<Tensors<4>>(
      VocabCrossEntropy::apply(logits, labels, wanted, consume_logits, group, loss));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<vocab_cross_entropy>(library)
      .kernel<logits_loss_without_gradient<logits_loss_forward>>()
      .meta<logits_loss_without_gradient<logits_loss_forward_meta>>()
      .on<logits_loss_autograd>(c10::DispatchKey::Autograd);
  implement<vocab_cross_entropy_forward>(library)
      .kernel<logits_loss_forward>()
      .meta<logits_loss_forward_meta>();
  implement<vocab_cross_entropy_backward>(library)
      .kernel<logits_loss_backward>()
      .meta<logits_loss_backward_meta>();
  implement<vocab_cross_entropy_backward_>(library)
      .kernel<logits_loss_backward_over_logits>()
      .meta<backward_over_logits_meta>();
}

}  // namespace parallel_ext
