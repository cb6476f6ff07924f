// The tokens of a mixture of experts under tensor parallelism: every rank takes its share of those
// that all ranks hold, and what comes of them is joined again.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "base/layout.h"
#include "check.h"
#include "comm/comm.h"
#include "dispatch.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

int64_t first_token(at::IntArrayRef sizes, int64_t rank) { return sum_of(sizes.slice(0, rank)); }

void check_sizes(const char* op, at::IntArrayRef sizes, int64_t rank, int64_t group_size) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == group_size, op, ": ", sizes.size(),
                    " sizes were given for a group of ", group_size, " ranks");
  TORCH_CHECK_VALUE(0 <= rank && rank < group_size, op, ": rank ", rank, " is not in [0, ",
                    group_size, ")");
  sum_of_counts(op, "sizes", sizes);
}

void check_own_rows(const char* op, const char* name, const at::Tensor& rows, at::IntArrayRef sizes,
                    int64_t rank) {
  check_floating(op, name, rows);
  check_dim(op, name, rows, 2);
  TORCH_CHECK_VALUE(rows.size(0) == sizes[rank], op, ": rank ", rank, " must hold ", sizes[rank],
                    " rows of ", name, ", got shape ", rows.sizes());
}

// This rank's rows of each part, which may differ in dtype -> the rows of all ranks of each, by one
// gather of bytes. Messages are of one size, since gloo's gather wants them equal.
std::vector<at::Tensor> gather_rows(const char* op, const std::vector<at::Tensor>& parts,
                                    at::IntArrayRef sizes, int64_t group_size,
                                    const std::string& group_name) {
  std::vector<at::Tensor> wholes;
  if (group_size == 1) {
    for (const auto& part : parts) wholes.push_back(part.clone(at::MemoryFormat::Contiguous));
    return wholes;
  }
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  if (parts.size() == 1 && *least == *most) {
    const at::Tensor all = all_gather(op, as_bytes(parts[0]), group_size, group_name);
    const auto dtype = parts[0].scalar_type();
    return {all.view({-1}).view(dtype).view({sum_of(sizes), parts[0].size(1)})};
  }
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += *most * row_bytes(part);
  const at::Tensor message = at::empty({bytes}, parts[0].options().dtype(at::kByte));
  int64_t offset = 0;
  for (const auto& part : parts) {
    const at::Tensor own = as_bytes(part);
    message.narrow(0, offset, own.numel()).copy_(own);
    offset += *most * row_bytes(part);
  }
  const at::Tensor all = all_gather(op, message, group_size, group_name);
  offset = 0;
  for (const auto& part : parts) {
    wholes.push_back(at::empty({sum_of(sizes), part.size(1)}, part.options()));
    const at::Tensor whole = as_bytes(wholes.back());
    int64_t first = 0;
    for (int64_t peer = 0; peer < group_size; ++peer) {
      const int64_t count = sizes[peer] * row_bytes(part);
      whole.narrow(0, first, count).copy_(all.select(0, peer).narrow(0, offset, count));
      first += count;
    }
    offset += *most * row_bytes(part);
  }
  return wholes;
}

// Kernels: any device whose process group can gather.

TwoTensors moe_take_tokens_kernel(const at::Tensor& input, const at::Tensor& weights,
                                  at::IntArrayRef sizes, int64_t rank, int64_t group_size,
                                  const std::string&) {
  const char* op = "moe_take_tokens";
  check_sizes(op, sizes, rank, group_size);
  check_floating(op, "input", input);
  check_floating(op, "weights", weights);
  check_dim(op, "input", input, 2);
  check_dim(op, "weights", weights, 2);
  TORCH_CHECK_VALUE(input.size(0) == weights.size(0), op, ": input of shape ", input.sizes(),
                    " and weights of shape ", weights.sizes(), " are not of the same tokens");
  TORCH_CHECK_VALUE(input.size(0) == sum_of(sizes), op, ": the sizes ", sizes, " add up to ",
                    sum_of(sizes), ", but there are ", input.size(0), " tokens");
  const auto own = [&](const at::Tensor& rows) {
    return rows.narrow(0, first_token(sizes, rank), sizes[rank])
        .clone(at::MemoryFormat::Contiguous);
  };
  return {own(input), own(weights)};
}

TwoTensors moe_take_tokens_backward_kernel(const at::Tensor& grad_input,
                                           const at::Tensor& grad_weights, at::IntArrayRef sizes,
                                           std::array<bool, 2> needed, int64_t rank,
                                           int64_t group_size, const std::string& group_name) {
  const char* op = "moe_take_tokens_backward";
  check_sizes(op, sizes, rank, group_size);
  check_own_rows(op, "grad_input", grad_input, sizes, rank);
  check_own_rows(op, "grad_weights", grad_weights, sizes, rank);
  TwoTensors none{at::empty({0}, grad_input.options()), at::empty({0}, grad_weights.options())};
  std::vector<at::Tensor> parts;
  if (needed[0]) parts.push_back(grad_input);
  if (needed[1]) parts.push_back(grad_weights);
  if (parts.empty()) return none;
  const auto wholes = gather_rows(op, parts, sizes, group_size, group_name);
  return {needed[0] ? wholes.front() : std::get<0>(none),
          needed[1] ? wholes.back() : std::get<1>(none)};
}

at::Tensor moe_gather_tokens_kernel(const at::Tensor& slice, at::IntArrayRef sizes, int64_t rank,
                                    int64_t group_size, const std::string& group_name) {
  const char* op = "moe_gather_tokens";
  check_sizes(op, sizes, rank, group_size);
  check_own_rows(op, "slice", slice, sizes, rank);
  return gather_rows(op, {slice}, sizes, group_size, group_name)[0];
}

at::Tensor rows_like(const at::Tensor& tensor, int64_t num_rows) {
  return at::empty_symint({num_rows, tensor.sym_size(1)}, tensor.options());
}

TwoTensors moe_take_tokens_meta(const at::Tensor& input, const at::Tensor& weights,
                                at::IntArrayRef sizes, int64_t rank, int64_t group_size,
                                const std::string&) {
  check_sizes("moe_take_tokens", sizes, rank, group_size);
  return {rows_like(input, sizes[rank]), rows_like(weights, sizes[rank])};
}

TwoTensors moe_take_tokens_backward_meta(const at::Tensor& grad_input,
                                         const at::Tensor& grad_weights, at::IntArrayRef sizes,
                                         std::array<bool, 2> needed, int64_t, int64_t,
                                         const std::string&) {
  const auto whole = [&](const at::Tensor& rows, bool is_needed) {
    return is_needed ? rows_like(rows, sum_of(sizes)) : at::empty({0}, rows.options());
  };
  return {whole(grad_input, needed[0]), whole(grad_weights, needed[1])};
}

at::Tensor moe_gather_tokens_meta(const at::Tensor& slice, at::IntArrayRef sizes, int64_t, int64_t,
                                  const std::string&) {
  return rows_like(slice, sum_of(sizes));
}

// Autograd.

class MoeTakeTokens : public torch::autograd::Function<MoeTakeTokens> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& weights, at::IntArrayRef sizes, int64_t rank,
                               int64_t group_size, const std::string& group_name) {
    ctx->saved_data["sizes"] = sizes.vec();
    ctx->saved_data["rank"] = rank;
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["group_name"] = group_name;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [own_input, own_weights] =
        moe_take_tokens(input, weights, sizes, rank, group_size, group_name);
    // Or the layer would compute gradients that nobody asked for.
    variable_list constant;
    if (!input.requires_grad()) constant.push_back(own_input);
    if (!weights.requires_grad()) constant.push_back(own_weights);
    ctx->mark_non_differentiable(constant);
    return {own_input, own_weights};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const std::array<bool, 2> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    auto [grad_input, grad_weights] = moe_take_tokens_backward(
        grad_outputs[0], grad_outputs[1], ctx->saved_data["sizes"].toIntVector(), needed,
        ctx->saved_data["rank"].toInt(), ctx->saved_data["group_size"].toInt(),
        ctx->saved_data["group_name"].toStringRef());
    return {needed[0] ? grad_input : Variable(),
            needed[1] ? grad_weights : Variable(),
            Variable(),
            Variable(),
            Variable(),
            Variable()};
  }
};

class MoeGatherTokens : public torch::autograd::Function<MoeGatherTokens> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& slice, at::IntArrayRef sizes,
                            int64_t rank, int64_t group_size, const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor all = moe_gather_tokens(slice, sizes, rank, group_size, group_name);
    ctx->saved_data["first"] = first_token(sizes, rank);
    ctx->saved_data["size"] = sizes[rank];
    return all;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    // That of the cut below would be this rank's rows of it only.
    refuse_second_derivative("moe_gather_tokens", {grad_outputs[0]});
    return {grad_outputs[0].narrow(0, ctx->saved_data["first"].toInt(),
                                   ctx->saved_data["size"].toInt()),
            Variable(), Variable(), Variable(), Variable()};
  }
};

TwoTensors moe_take_tokens_autograd(const at::Tensor& input, const at::Tensor& weights,
                                    at::IntArrayRef sizes, int64_t rank, int64_t group_size,
                                    const std::string& group_name) {
  const auto own = MoeTakeTokens::apply(input, weights, sizes, rank, group_size, group_name);
  return {own[0], own[1]};
}

TwoTensors moe_take_tokens_backward_autograd(const at::Tensor& grad_input,
                                             const at::Tensor& grad_weights, at::IntArrayRef sizes,
                                             std::array<bool, 2> needed, int64_t rank,
                                             int64_t group_size, const std::string& group_name) {
  refuse_second_derivative("moe_take_tokens", {grad_input, grad_weights});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return moe_take_tokens_backward(grad_input, grad_weights, sizes, needed, rank, group_size,
                                  group_name);
}

at::Tensor moe_gather_tokens_autograd(const at::Tensor& slice, at::IntArrayRef sizes, int64_t rank,
                                      int64_t group_size, const std::string& group_name) {
  return MoeGatherTokens::apply(slice, sizes, rank, group_size, group_name);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> moe_take_tokens(const at::Tensor& input,
                                                   const at::Tensor& weights, at::IntArrayRef sizes,
                                                   int64_t rank, int64_t group_size,
                                                   const std::string& group_name) {
  static auto op = op_handle<decltype(moe_take_tokens)>("parallel_ext::moe_take_tokens");
  return op.call(input, weights, sizes, rank, group_size, group_name);
}

std::tuple<at::Tensor, at::Tensor> moe_take_tokens_backward(
    const at::Tensor& grad_input, const at::Tensor& grad_weights, at::IntArrayRef sizes,
    std::array<bool, 2> needed, int64_t rank, int64_t group_size, const std::string& group_name) {
  static auto op =
      op_handle<decltype(moe_take_tokens_backward)>("parallel_ext::moe_take_tokens_backward");
  return op.call(grad_input, grad_weights, sizes, needed, rank, group_size, group_name);
}

at::Tensor moe_gather_tokens(const at::Tensor& slice, at::IntArrayRef sizes, int64_t rank,
                             int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(moe_gather_tokens)>("parallel_ext::moe_gather_tokens");
  return op.call(slice, sizes, rank, group_size, group_name);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_take_tokens", moe_take_tokens_kernel);
  m.impl("moe_take_tokens_backward", moe_take_tokens_backward_kernel);
  m.impl("moe_gather_tokens", moe_gather_tokens_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("moe_take_tokens", moe_take_tokens_meta);
  m.impl("moe_take_tokens_backward", moe_take_tokens_backward_meta);
  m.impl("moe_gather_tokens", moe_gather_tokens_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("moe_take_tokens", moe_take_tokens_autograd);
  m.impl("moe_take_tokens_backward", moe_take_tokens_backward_autograd);
  m.impl("moe_gather_tokens", moe_gather_tokens_autograd);
}

}  // namespace parallel_ext
