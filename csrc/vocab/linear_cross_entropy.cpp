// The output head and its loss in one op: hidden states and the head's rows in, the loss and all
// gradients out. The logits exist only as tiles, some tokens by some of the rank's ids.
#include "vocab/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/kernel_choice.h"
#include "base/product.h"
#include "base/workspace.h"
#include "comm/comm.h"
#include "linear/linear.h"
#include "vocab/ops.h"

namespace parallel_ext {
namespace {

// The ids of a tile that need not hold all of the rank's: on the CPU, so many that its logits stay
// in the cache; on a GPU, so many that the products are at their full speed.
int64_t ids_of_tile(const at::Tensor& input) { return input.is_cpu() ? 8192 : 65536; }

// The tokens of a tile that holds all of the rank's ids, on a GPU.
constexpr int64_t kTokensOfWholeRows = 4096;

constexpr int64_t kRowAlignment = 64;  // elements

// The tensors of a call in the dtype of its GEMMs. On the CPU, fp16 is computed in fp32: few CPUs
// have fp16 GEMMs, and unscaled gradients would not fit.
struct Operands {
  at::Tensor input;  // [T, H]
  at::Tensor head;   // [Vl, H]
  at::Tensor bias;   // [Vl] or undefined
  at::Tensor labels;
  std::vector<Range> tokens;

  Operands(const at::Tensor& input_in, const at::Tensor& head_in, const MaybeTensor& bias_in,
           const at::Tensor& labels_in)
      : labels(labels_in.contiguous()) {
    const bool widen = input_in.is_cpu() && input_in.scalar_type() == at::kHalf;
    const auto dtype = widen ? at::kFloat : input_in.scalar_type();
    input = input_in.to(dtype), head = head_in.to(dtype);
    if (bias_in) bias = bias_in->to(dtype);
    tokens = ranges_of(input.size(0), tokens_of_tile(input_in));
  }

  at::Tensor labels_of(Range part) const { return labels.narrow(0, part.start, part.size); }
};

// Memory for the logits of one tile, which the next tile overwrites.
class Tile {
 public:
  // For some of `tokens` by `ids`.
  Tile(const Operands& operands, const std::vector<Range>& tokens, int64_t ids)
      : room_(pooled_empty({tokens.empty() ? 0 : tokens.front().size,
                            (ids + kRowAlignment - 1) / kRowAlignment * kRowAlignment},
                           operands.input.options())) {}

  at::Tensor logits(const Operands& operands, Range tokens, Range ids) const {
    at::Tensor logits = room_.narrow(0, 0, tokens.size).narrow(1, 0, ids.size);
    fill_gaps(logits);
    const at::Tensor rows = operands.input.narrow(0, tokens.start, tokens.size);
    const at::Tensor columns = operands.head.narrow(0, ids.start, ids.size).t();
    if (operands.bias.defined()) {
      at::addmm_out(logits, operands.bias.narrow(0, ids.start, ids.size), rows, columns);
    } else {
      at::mm_out(logits, rows, columns);
    }
    return logits;
  }

 private:
  at::Tensor room_;
};

// sum [T, H] += factor [T] * the row of each token's label, where this rank holds it.
void add_rows_of_labels(at::Tensor sum, const at::Tensor& factor, const at::Tensor& head,
                        const at::Tensor& labels, int64_t vocab_start) {
  if (head.size(0) == 0) return;
  const auto [row, own] = local_labels(labels, vocab_start, head.size(0));
  const at::Tensor rows = head.index_select(0, row.squeeze(1)).to(sum.scalar_type());
  sum.add_(rows.mul_(factor.unsqueeze(1)).masked_fill_(own.logical_not().unsqueeze(1), 0));
}

// The expected row of each token less that of its label: the sum over this rank's ids of
// (p - onehot) * row. The label has its own term, with p - 1 by expm1: of a token that is nearly
// sure of it little is left, less than a product in bf16 is rounded by.
class ExpectedRows {
 public:
  explicit ExpectedRows(const Operands& operands)
      : sum_(at::empty({operands.input.size(0), operands.input.size(1)},
                       operands.input.options().dtype(wide_type(operands.input)))),
        max_(at::full({operands.input.size(0)}, -kInfinity, sum_.options())),
        target_(at::zeros_like(max_)) {}

  // Adds a tile, whose partial statistics are known, and overwrites its logits. The tiles of some
  // tokens begin with that of the ids from 0 on.
  void add(const Operands& operands, const VocabShard& shard, const at::Tensor& partial_stats,
           Range tokens, Range ids) {
    const auto own = [&tokens](const at::Tensor& tensor) {
      return tensor.narrow(0, tokens.start, tokens.size);
    };
    at::Tensor max = own(max_), sum = own(sum_), logits = shard.logits;
    const at::Tensor raised = at::maximum(max, partial_stats[StatsRows::kMax]),
                     base = base_of(raised);
    at::Tensor factors = at::zeros({GradientRows::kCount, tokens.size}, max.options());
    factors[GradientRows::kProbability].fill_(1);
    vocab_shard_gradient(shard, at::stack({base, at::zeros_like(base)}), factors, logits);
    own(target_).add_(partial_stats[StatsRows::kTarget]);
    if (ids.size > 0) {
      const auto [column, has_label] = local_labels(shard.labels, shard.vocab_start, ids.size);
      logits.scatter_(1, column, logits.gather(1, column).masked_fill_(has_label.unsqueeze(1), 0));
    }
    const bool first = ids.start == 0;
    if (!first) sum.mul_((max - base).exp_().unsqueeze(1));
    add_product(sum, logits, operands.head.narrow(0, ids.start, ids.size), first);
    max.copy_(raised);
  }

  // The sums, with the probabilities p over the whole vocabulary.
  at::Tensor normalized(const VocabLoss& loss, const Operands& operands,
                        const at::Tensor& normalizer) {
    const at::Tensor log_factor = (base_of(max_) - normalizer[0]).sub_(normalizer[1]);
    sum_.mul_(log_factor.exp_().masked_fill_(max_ == -kInfinity, 0).unsqueeze(1));
    const at::Tensor factor =
        (target_ - normalizer[0]).sub_(normalizer[1]).expm1_().mul_(loss.logit_scale);
    for (const Range part : operands.tokens) {
      add_rows_of_labels(sum_.narrow(0, part.start, part.size),
                         factor.narrow(0, part.start, part.size), operands.head,
                         operands.labels_of(part), loss.vocab_start);
    }
    return sum_;
  }

 private:
  static at::Tensor base_of(const at::Tensor& max) { return max.masked_fill(max == -kInfinity, 0); }

  at::Tensor sum_, max_, target_;
};

// The gradients of input, head and bias; undefined where they are not needed.
struct Gradients {
  at::Tensor input, head, bias;

  Gradients(const Operands& operands, at::ScalarType dtype, std::array<bool, 3> needed) {
    const auto options = operands.input.options().dtype(dtype);
    if (needed[0]) input = at::empty(operands.input.sizes(), options);
    if (needed[1]) head = pooled_empty(operands.head.sizes(), options);
    if (needed[2]) bias = at::zeros({operands.head.size(0)}, options);
    if (needed[1] && operands.tokens.empty()) head.zero_();
  }

  // Adds what follows from the logits' gradient of one tile.
  void add(const Operands& operands, const at::Tensor& grad_logits, Range tokens, Range ids,
           bool first_ids, bool first_tokens) {
    const auto own_rows = [&](const at::Tensor& of_tokens) {
      return of_tokens.narrow(0, tokens.start, tokens.size);
    };
    const auto own_ids = [&](const at::Tensor& of_ids) {
      return of_ids.narrow(0, ids.start, ids.size);
    };
    if (input.defined()) {
      add_product(own_rows(input), grad_logits, own_ids(operands.head), first_ids);
    }
    if (head.defined()) {
      add_transposed_product(own_ids(head), grad_logits, own_rows(operands.input), first_tokens);
    }
    if (bias.defined()) own_ids(bias).add_(grad_logits.sum(0, false, bias.scalar_type()));
  }
};

// The partial statistics of all tokens; in the same pass the expected rows, if wanted. What is
// added over tiles of ids is in the CPU's cache; on a GPU it would be passes over memory, and a
// tile has all ids.
at::Tensor stats_of_tiles(const VocabLoss& loss, const Operands& operands, const StatsRows& rows,
                          ExpectedRows* expected) {
  const bool whole_rows = !use_cpu_loops(operands.input);
  const int64_t num_ids = operands.head.size(0), at_least_one = std::max<int64_t>(num_ids, 1);
  const auto ids = ranges_of(at_least_one, whole_rows ? at_least_one : ids_of_tile(operands.input));
  const auto tiles =
      whole_rows ? ranges_of(operands.input.size(0), kTokensOfWholeRows) : operands.tokens;
  const Tile tile(operands, tiles, std::min(ids.front().size, num_ids));
  const auto wide = wide_type(operands.input);
  at::Tensor all_stats =
      at::empty({rows.count, operands.input.size(0)}, operands.input.options().dtype(wide));
  for (const Range tokens : tiles) {
    std::vector<at::Tensor> parts;
    for (Range part : ids) {
      part.size = std::min(part.size, num_ids);  // 0 for an empty shard
      const VocabShard shard =
          loss.shard(tile.logits(operands, tokens, part), operands.labels_of(tokens),
                     loss.vocab_start + part.start);
      parts.push_back(vocab_shard_stats(shard, rows));
      if (expected != nullptr) expected->add(operands, shard, parts.back(), tokens, part);
    }
    const at::Tensor partial_stats =
        parts.size() == 1 ? parts[0] : merged_stats(at::stack(parts), rows);
    all_stats.narrow(1, tokens.start, tokens.size).copy_(partial_stats);
  }
  return all_stats;
}

// The statistics of all ranks, and all gradients but for the factor that arrives in the backward.
// The gradients of a tile need the sums over the whole vocabulary, so each tile has its own
// exchange.
template <typename Exchange>
at::Tensor gradients_of_tiles(const VocabLoss& loss, const Operands& operands,
                              const StatsRows& rows, const Tokens& tokens, const Exchange& exchange,
                              Gradients& gradients) {
  const Range ids{0, operands.head.size(0)};
  const Tile tile(operands, operands.tokens, ids.size);
  const at::Tensor one = at::ones({}, operands.input.options().dtype(wide_type(operands.input)));
  std::vector<at::Tensor> all_stats;
  for (const Range part : operands.tokens) {
    const VocabShard shard =
        loss.shard(tile.logits(operands, part, ids), operands.labels_of(part), loss.vocab_start);
    all_stats.push_back(exchange(vocab_shard_stats(shard, rows)));
    const at::Tensor normalizer = normalizer_of(all_stats.back(), rows);
    const at::Tensor factors =
        factors_of(loss, {one, {}, {}}, tokens.narrow(part.start, part.size), normalizer);
    at::Tensor logits = shard.logits;
    vocab_shard_gradient(shard, normalizer, factors, logits);
    gradients.add(operands, logits, part, ids, /*first_ids=*/true, part.start == 0);
  }
  return all_stats.size() == 1 ? all_stats[0] : at::cat(all_stats, 2);
}

Tensors<9> linear_loss_forward(const at::Tensor& input, const at::Tensor& head_weight,
                               const MaybeTensor& head_bias, const at::Tensor& labels,
                               std::array<bool, 3> wanted, std::array<bool, 3> needed,
                               const Group& group, const VocabLoss& loss) {
  check_dim(kLinearLoss, "input", input, 2);
  check_linear(kLinearLoss, input, head_weight, head_bias, "head_weight");
  check_vocab_loss(kLinearLoss, loss, "the rows of head_weight", head_weight.size(0), input.size(0),
                   labels, wanted[2]);
  const Operands operands(input, head_weight, head_bias, labels);
  const StatsRows rows(loss.label_smoothing > 0, wanted[1], wanted[2]);
  const Tokens tokens = tokens_of(loss, operands.labels);
  const Ahead ahead = ahead_of(loss, input.scalar_type(), needed);
  const auto exchange = [&](const at::Tensor& partial_stats) {
    return gather_stats(kLinearLoss, loss, partial_stats, group);
  };
  const bool all = ahead == Ahead::kGradients && !operands.tokens.empty();
  Gradients gradients(operands, type_ahead(input),
                      ahead == Ahead::kGradients ? needed : std::array<bool, 3>{});
  std::optional<ExpectedRows> expected;
  if (ahead == Ahead::kExpectedRows) expected.emplace(operands);
  const at::Tensor all_stats =  // [ranks, rows.count, T]
      all ? gradients_of_tiles(loss, operands, rows, tokens, exchange, gradients)
          : exchange(stats_of_tiles(loss, operands, rows, expected ? &*expected : nullptr));
  const auto [total, log_sum_exp, entropy, argmax, normalizer] =
      outputs_of(loss, tokens, all_stats, rows, {wanted[0], wanted[1], wanted[2]});
  const auto given = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor : at::empty({0}, all_stats.options());
  };
  return {total,
          log_sum_exp,
          entropy,
          argmax,
          normalizer,
          given(expected ? expected->normalized(loss, operands, normalizer) : at::Tensor()),
          given(gradients.input),
          given(gradients.head),
          given(gradients.bias)};
}

void check_backward(const VocabLoss& loss, const at::Tensor& head_weight, int64_t num_tokens,
                    const at::Tensor& labels, const at::Tensor& normalizer, bool with_entropy) {
  check_vocab_loss_shapes(kLinearLoss, loss, "the rows of head_weight", head_weight.size(0),
                          num_tokens, labels);
  check_normalizer(kLinearLoss, normalizer, num_tokens, with_entropy);
}

// Where the forward has computed nothing ahead: the logits are computed again.
Tensors<3> linear_loss_backward(const MaybeTensor& grad_loss, const MaybeTensor& grad_log_sum_exp,
                                const MaybeTensor& grad_entropy, const at::Tensor& input,
                                const at::Tensor& head_weight, const MaybeTensor& head_bias,
                                const at::Tensor& labels, const at::Tensor& normalizer,
                                std::array<bool, 3> needed, const VocabLoss& loss) {
  check_dim(kLinearLoss, "input", input, 2);
  check_linear(kLinearLoss, input, head_weight, head_bias, "head_weight");
  check_backward(loss, head_weight, input.size(0), labels, normalizer, grad_entropy.has_value());
  const Operands operands(input, head_weight, head_bias, labels);
  const at::Tensor factors = factors_of(loss, {grad_loss, grad_log_sum_exp, grad_entropy},
                                        tokens_of(loss, operands.labels), normalizer);
  Gradients gradients(operands, wide_type(input), needed);
  if (needed[0] && head_weight.size(0) == 0) gradients.input.zero_();
  const int64_t most_ids = ids_of_tile(input);
  const Tile tile(operands, operands.tokens, std::min(most_ids, head_weight.size(0)));
  for (const Range ids : ranges_of(head_weight.size(0), most_ids)) {
    for (const Range part : operands.tokens) {
      at::Tensor logits = tile.logits(operands, part, ids);
      const VocabShard shard =
          loss.shard(logits, operands.labels_of(part), loss.vocab_start + ids.start);
      vocab_shard_gradient(shard, normalizer.narrow(1, part.start, part.size),
                           factors.narrow(1, part.start, part.size), logits);
      gradients.add(operands, logits, part, ids, ids.start == 0, part.start == 0);
    }
  }
  const auto cast = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(input.scalar_type()) : at::empty({0}, input.options());
  };
  return {cast(gradients.input), cast(gradients.head), cast(gradients.bias)};
}

// The sum of weight * row over this rank's ids, [H], in `wide`.
at::Tensor weighted_row(const VocabLoss& loss, const at::Tensor& head_weight, at::ScalarType wide) {
  at::Tensor sum = at::zeros({head_weight.size(1)}, head_weight.options().dtype(wide));
  for (const Range ids : ranges_of(head_weight.size(0), ids_of_tile(head_weight))) {
    at::Tensor rows = head_weight.narrow(0, ids.start, ids.size).to(wide);
    if (loss.weight) {
      rows = rows *
             loss.weight->narrow(0, loss.vocab_start + ids.start, ids.size).to(wide).unsqueeze(1);
    }
    sum.add_(rows.sum(0));
  }
  return sum;
}

at::Tensor linear_loss_frozen_backward(const MaybeTensor& grad_loss,
                                       const MaybeTensor& grad_log_sum_exp,
                                       const at::Tensor& expected_rows,
                                       const at::Tensor& head_weight, const at::Tensor& labels,
                                       const at::Tensor& normalizer, const VocabLoss& loss) {
  TORCH_CHECK_VALUE(!loss.softcap, kLinearLoss, ": a softcap leaves no expected rows");
  check_floating(kLinearLoss, "expected_rows", expected_rows);
  check_dim(kLinearLoss, "head_weight", head_weight, 2);
  check_shape(kLinearLoss, "expected_rows", expected_rows, {labels.numel(), head_weight.size(1)});
  check_backward(loss, head_weight, labels.numel(), labels, normalizer, false);
  const auto wide = expected_rows.scalar_type();
  const at::Tensor factors =
      factors_of(loss, {grad_loss, grad_log_sum_exp, {}}, tokens_of(loss, labels), normalizer);
  const at::Tensor column_row = loss.label_smoothing > 0
                                    ? loss.logit_scale * weighted_row(loss, head_weight, wide)
                                    : at::Tensor();
  if (use_cuda_kernel(expected_rows)) {
    return frozen_gradient_on_cuda(loss, expected_rows, head_weight, labels, factors, column_row);
  }
  const auto factor = [&factors](int64_t row) { return factors[row].unsqueeze(1); };
  at::Tensor grad = expected_rows * factor(GradientRows::kProbability);
  if (column_row.defined()) grad.sub_(factor(GradientRows::kColumn) * column_row);
  add_rows_of_labels(
      grad,
      (factors[GradientRows::kProbability] - factors[GradientRows::kLabel]).mul_(loss.logit_scale),
      head_weight, labels, loss.vocab_start);
  grad.masked_fill_((factors == 0).all(0).unsqueeze(1), 0);
  return grad.to(head_weight.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<linear_vocab_cross_entropy_forward>(library).kernel<linear_loss_forward>();
  implement<linear_vocab_cross_entropy_backward>(library).kernel<linear_loss_backward>();
  implement<linear_vocab_cross_entropy_frozen_backward>(library)
      .kernel<linear_loss_frozen_backward>();
}

}  // namespace parallel_ext
