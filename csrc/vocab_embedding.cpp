// The embedding of a vocabulary whose rows are cut over the ranks.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "check.h"
#include "comm.h"
#include "dispatch.h"
#include "kernel_choice.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

void check_ids(const at::Tensor& ids, int64_t vocab_size) {
  const int64_t* data = ids.const_data_ptr<int64_t>();
  const int64_t* bad = std::find_if(
      data, data + ids.numel(), [vocab_size](int64_t id) { return id < 0 || id >= vocab_size; });
  TORCH_CHECK_INDEX(bad == data + ids.numel(), "vocab_embedding: id ", *bad, " at position ",
                    bad - data, " is outside the vocabulary [0, ", vocab_size, ")");
}

void check_embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                     int64_t vocab_start, std::optional<int64_t> padding_idx) {
  const char* op = "vocab_embedding";
  check_int64(op, "ids", ids);
  check_floating(op, "weight", weight);
  check_dim(op, "weight", weight, 2);
  TORCH_CHECK_VALUE(0 <= vocab_start && vocab_start + weight.size(0) <= vocab_size, op, ": the ",
                    weight.size(0), " rows from ", vocab_start,
                    " on are not inside the vocabulary [0, ", vocab_size,
                    "); pass this rank's rows and the true vocabulary size");
  TORCH_CHECK_VALUE(!padding_idx || (0 <= *padding_idx && *padding_idx < vocab_size), op,
                    ": padding_idx ", *padding_idx, " is outside the vocabulary [0, ", vocab_size,
                    ")");
}

std::vector<int64_t> embedded_shape(const at::Tensor& ids, const at::Tensor& weight) {
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  return shape;
}

// CPU: own rows are copied, the others cleared; a row is bytes here, whatever its dtype.
at::Tensor vocab_embedding_cpu(const at::Tensor& ids_in, const at::Tensor& weight_in,
                               int64_t vocab_size, int64_t vocab_start,
                               std::optional<int64_t> padding_idx, int64_t group_size,
                               const std::string& group_name) {
  check_embedding(ids_in, weight_in, vocab_size, vocab_start, padding_idx);
  const at::Tensor ids = ids_in.contiguous(), weight = weight_in.contiguous();
  check_ids(ids, vocab_size);
  at::Tensor output = at::empty(embedded_shape(ids, weight), weight.options());
  const size_t row_bytes = weight.size(1) * weight.element_size();
  const int64_t num_rows = weight.size(0);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const auto* rows = static_cast<const char*>(weight.const_data_ptr());
  auto* out = static_cast<char*>(output.mutable_data_ptr());
  at::parallel_for(0, row_bytes == 0 ? 0 : ids.numel(), 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t row = id[token] - vocab_start;
      if (0 <= row && row < num_rows) {
        std::memcpy(out + token * row_bytes, rows + row * row_bytes, row_bytes);
      } else {
        std::memset(out + token * row_bytes, 0, row_bytes);
      }
    }
  });
  all_reduce_sum("vocab_embedding", output, group_size, group_name);  // T * H elements, every rank
  return output;
}

// Any device. Off the CPU the ids are not read back, so an id outside [0, V), which no rank owns,
// gives a row of zeros here; the model's agreement check reports it.
at::Tensor vocab_embedding_aten(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                                int64_t vocab_start, std::optional<int64_t> padding_idx,
                                int64_t group_size, const std::string& group_name) {
  check_embedding(ids, weight, vocab_size, vocab_start, padding_idx);
  if (ids.is_cpu()) check_ids(ids.contiguous(), vocab_size);
  at::Tensor output;
  if (weight.size(0) == 0) {
    output = at::zeros(embedded_shape(ids, weight), weight.options());
  } else {
    const at::Tensor row = ids - vocab_start;
    const at::Tensor foreign = (row < 0).logical_or(row >= weight.size(0));
    output = weight.index_select(0, row.masked_fill(foreign, 0).flatten())
                 .view(embedded_shape(ids, weight));
    output.masked_fill_(foreign.unsqueeze(-1), 0);
  }
  all_reduce_sum("vocab_embedding", output, group_size, group_name);  // T * H elements, every rank
  return output;
}

at::Tensor vocab_embedding_meta(const at::Tensor& ids, const at::Tensor& weight, int64_t, int64_t,
                                std::optional<int64_t>, int64_t, const std::string&) {
  auto shape = ids.sym_sizes().vec();
  shape.push_back(weight.sym_size(1));
  return at::empty_symint(shape, weight.options());
}

// CPU backward: the tokens of a row are summed in their order in fp32 (or fp64) and cast once, so
// the bits do not depend on the number of threads; rows without a token are cleared.
template <typename scalar_t>
void sum_rows(const std::vector<int64_t>& first, const std::vector<int64_t>& order,
              const scalar_t* grad_output, int64_t hidden, scalar_t* grad_weight) {
  using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;
  const auto num_rows = static_cast<int64_t>(first.size()) - 1;
  at::parallel_for(0, num_rows, 256, [&](int64_t begin, int64_t end) {
    std::vector<acc_t> sum(hidden);
    for (int64_t row = begin; row < end; ++row) {
      scalar_t* out = grad_weight + row * hidden;
      const int64_t tokens = first[row + 1] - first[row];
      if (tokens == 0) {
        std::fill(out, out + hidden, scalar_t(0));
      } else if (tokens == 1) {
        std::copy_n(grad_output + order[first[row]] * hidden, hidden, out);
      } else {
        std::fill(sum.begin(), sum.end(), acc_t(0));
        for (int64_t i = first[row]; i < first[row + 1]; ++i) {
          const scalar_t* token = grad_output + order[i] * hidden;
          for (int64_t j = 0; j < hidden; ++j) sum[j] += static_cast<acc_t>(token[j]);
        }
        for (int64_t j = 0; j < hidden; ++j) out[j] = static_cast<scalar_t>(sum[j]);
      }
    }
  });
}

at::Tensor vocab_embedding_backward_aten(const at::Tensor& grad_output, const at::Tensor& ids,
                                         int64_t num_rows, int64_t vocab_start,
                                         std::optional<int64_t> padding_idx) {
  const int64_t hidden = grad_output.size(-1);
  const auto sum_type = grad_output.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  // One more row takes what is not ours, so that no size depends on the ids.
  at::Tensor sum = at::zeros({num_rows + 1, hidden}, grad_output.options().dtype(sum_type));
  at::Tensor row = ids.flatten() - vocab_start;
  row = row.masked_fill((row < 0).logical_or(row >= num_rows), num_rows);
  if (padding_idx) row = row.masked_fill(row == *padding_idx - vocab_start, num_rows);
  sum.index_add_(0, row, grad_output.reshape({ids.numel(), hidden}).to(sum_type));
  return sum.narrow(0, 0, num_rows).to(grad_output.scalar_type()).contiguous();
}

at::Tensor vocab_embedding_backward_cpu(const at::Tensor& grad_output_in, const at::Tensor& ids_in,
                                        int64_t num_rows, int64_t vocab_start,
                                        std::optional<int64_t> padding_idx) {
  if (aten_path_on_cpu()) {
    return vocab_embedding_backward_aten(grad_output_in, ids_in, num_rows, vocab_start,
                                         padding_idx);
  }
  const at::Tensor grad_output = grad_output_in.contiguous(), ids = ids_in.contiguous();
  const int64_t hidden = grad_output.size(-1);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const auto row_of = [&](int64_t token) {
    const int64_t row = id[token] - vocab_start;
    return row < 0 || row >= num_rows || id[token] == padding_idx ? int64_t{-1} : row;
  };
  // A stable counting sort of the own tokens by row.
  std::vector<int64_t> first(num_rows + 1, 0);
  for (int64_t token = 0; token < ids.numel(); ++token) {
    if (const int64_t row = row_of(token); row >= 0) ++first[row + 1];
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> order(first.back()), next = first;
  for (int64_t token = 0; token < ids.numel(); ++token) {
    if (const int64_t row = row_of(token); row >= 0) order[next[row]++] = token;
  }
  at::Tensor grad_weight = at::empty({num_rows, hidden}, grad_output.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad_output.scalar_type(),
                                  "vocab_embedding_backward", [&] {
                                    sum_rows(first, order, grad_output.const_data_ptr<scalar_t>(),
                                             hidden, grad_weight.mutable_data_ptr<scalar_t>());
                                  });
  return grad_weight;
}

at::Tensor vocab_embedding_cpu_or_aten(const at::Tensor& ids, const at::Tensor& weight,
                                       int64_t vocab_size, int64_t vocab_start,
                                       std::optional<int64_t> padding_idx, int64_t group_size,
                                       const std::string& group_name) {
  return (aten_path_on_cpu() ? vocab_embedding_aten : vocab_embedding_cpu)(
      ids, weight, vocab_size, vocab_start, padding_idx, group_size, group_name);
}

at::Tensor vocab_embedding_backward_meta(const at::Tensor& grad_output, const at::Tensor&,
                                         c10::SymInt num_rows, int64_t, std::optional<int64_t>) {
  return at::empty_symint({num_rows, grad_output.sym_size(-1)}, grad_output.options());
}

class VocabEmbedding : public torch::autograd::Function<VocabEmbedding> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& ids, const at::Tensor& weight,
                            int64_t vocab_size, int64_t vocab_start,
                            std::optional<int64_t> padding_idx, int64_t group_size,
                            const std::string& group_name) {
    ctx->save_for_backward({ids});
    ctx->saved_data["num_rows"] = weight.sym_size(0);
    ctx->saved_data["vocab_start"] = vocab_start;
    ctx->saved_data["padding_idx"] = padding_idx;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return vocab_embedding(ids, weight, vocab_size, vocab_start, padding_idx, group_size,
                           group_name);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    Variable grad_weight = vocab_embedding_backward(
        grad_outputs[0], ctx->get_saved_variables()[0], ctx->saved_data["num_rows"].toSymInt(),
        ctx->saved_data["vocab_start"].toInt(),
        ctx->saved_data["padding_idx"].toOptional<int64_t>());
    return {Variable(), grad_weight, Variable(), Variable(), Variable(), Variable(), Variable()};
  }
};

at::Tensor vocab_embedding_backward_autograd(const at::Tensor& grad_output, const at::Tensor& ids,
                                             c10::SymInt num_rows, int64_t vocab_start,
                                             std::optional<int64_t> padding_idx) {
  refuse_second_derivative("vocab_embedding", {grad_output});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return vocab_embedding_backward(grad_output, ids, std::move(num_rows), vocab_start, padding_idx);
}

at::Tensor vocab_embedding_autograd(const at::Tensor& ids, const at::Tensor& weight,
                                    int64_t vocab_size, int64_t vocab_start,
                                    std::optional<int64_t> padding_idx, int64_t group_size,
                                    const std::string& group_name) {
  return VocabEmbedding::apply(ids, weight, vocab_size, vocab_start, padding_idx, group_size,
                               group_name);
}

}  // namespace

at::Tensor vocab_embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                           int64_t vocab_start, std::optional<int64_t> padding_idx,
                           int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(vocab_embedding)>("parallel_ext::vocab_embedding");
  return op.call(ids, weight, vocab_size, vocab_start, padding_idx, group_size, group_name);
}

at::Tensor vocab_embedding_backward(const at::Tensor& grad_output, const at::Tensor& ids,
                                    c10::SymInt num_rows, int64_t vocab_start,
                                    std::optional<int64_t> padding_idx) {
  static auto op =
      op_handle<decltype(vocab_embedding_backward)>("parallel_ext::vocab_embedding_backward");
  return op.call(grad_output, ids, std::move(num_rows), vocab_start, padding_idx);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("vocab_embedding", vocab_embedding_aten);
  m.impl("vocab_embedding_backward", vocab_embedding_backward_aten);
}

TORCH_LIBRARY_IMPL(parallel_ext, CPU, m) {
  m.impl("vocab_embedding", vocab_embedding_cpu_or_aten);
  m.impl("vocab_embedding_backward", vocab_embedding_backward_cpu);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("vocab_embedding", vocab_embedding_meta);
  m.impl("vocab_embedding_backward", vocab_embedding_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("vocab_embedding", vocab_embedding_autograd);
  m.impl("vocab_embedding_backward", vocab_embedding_backward_autograd);
}

}  // namespace parallel_ext
