// The tokens of a mixture of experts under tensor parallelism: every rank takes its share of the
// replicated tokens. gather_tokens (linear/tokens.cpp) joins the outputs for all shares again.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "base/layout.h"
#include "base/shares.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "moe/ops.h"

namespace parallel_ext {
namespace {

int64_t first_token(at::IntArrayRef sizes, int64_t rank) { return sum_of(sizes.slice(0, rank)); }

void check_own_rows(const char* op, const char* name, const at::Tensor& rows, at::IntArrayRef sizes,
                    int64_t rank) {
  check_floating(op, name, rows);
  check_dim(op, name, rows, 2);
  TORCH_CHECK_VALUE(rows.size(0) == sizes[rank], op, ": rank ", rank, " must hold ", sizes[rank],
                    " rows of ", name, ", got shape ", rows.sizes());
}

// This rank's rows of each part, which may differ in dtype -> the rows of all ranks of each part,
// by one all-gather of bytes. All messages have the same size, which gloo requires.
std::vector<at::Tensor> gather_rows(const char* op, const std::vector<at::Tensor>& parts,
                                    at::IntArrayRef sizes, const Group& group) {
  std::vector<at::Tensor> wholes;
  if (group.alone()) {
    for (const auto& part : parts) wholes.push_back(part.clone(at::MemoryFormat::Contiguous));
    return wholes;
  }
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  if (parts.size() == 1 && *least == *most) {
    const at::Tensor all = all_gather(op, as_bytes(parts[0]), group);
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
  const at::Tensor all = all_gather(op, message, group);
  offset = 0;
  for (const auto& part : parts) {
    wholes.push_back(at::empty({sum_of(sizes), part.size(1)}, part.options()));
    const at::Tensor whole = as_bytes(wholes.back());
    int64_t first = 0;
    for (int64_t peer = 0; peer < group.size; ++peer) {
      const int64_t count = sizes[peer] * row_bytes(part);
      whole.narrow(0, first, count).copy_(all.select(0, peer).narrow(0, offset, count));
      first += count;
    }
    offset += *most * row_bytes(part);
  }
  return wholes;
}

Tensors<2> moe_take_tokens_kernel(const at::Tensor& input, const at::Tensor& weights,
                                  at::IntArrayRef sizes, int64_t rank, const Group& group) {
  const char* op = "moe_take_tokens";
  check_sizes(op, sizes, rank, group.size);
  check_rank(op, rank, group);
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

Tensors<2> moe_take_tokens_backward_kernel(const at::Tensor& grad_input,
                                           const at::Tensor& grad_weights, at::IntArrayRef sizes,
                                           std::array<bool, 2> needed, int64_t rank,
                                           const Group& group) {
  const char* op = "moe_take_tokens_backward";
  check_sizes(op, sizes, rank, group.size);
  check_rank(op, rank, group);
  check_own_rows(op, "grad_input", grad_input, sizes, rank);
  check_own_rows(op, "grad_weights", grad_weights, sizes, rank);
  Tensors<2> none{at::empty({0}, grad_input.options()), at::empty({0}, grad_weights.options())};
  std::vector<at::Tensor> parts;
  if (needed[0]) parts.push_back(grad_input);
  if (needed[1]) parts.push_back(grad_weights);
  if (parts.empty()) return none;
  const auto wholes = gather_rows(op, parts, sizes, group);
  return {needed[0] ? wholes.front() : std::get<0>(none),
          needed[1] ? wholes.back() : std::get<1>(none)};
}

at::Tensor rows_like(const at::Tensor& tensor, int64_t num_rows) {
  return at::empty_symint({num_rows, tensor.sym_size(1)}, tensor.options());
}

Tensors<2> moe_take_tokens_meta(const at::Tensor& input, const at::Tensor& weights,
                                at::IntArrayRef sizes, int64_t rank, const Group& group) {
  check_sizes("moe_take_tokens", sizes, rank, group.size);
  return {rows_like(input, sizes[rank]), rows_like(weights, sizes[rank])};
}

Tensors<2> moe_take_tokens_backward_meta(const at::Tensor& grad_input,
                                         const at::Tensor& grad_weights, at::IntArrayRef sizes,
                                         std::array<bool, 2> needed) {
  const auto whole = [&](const at::Tensor& rows, bool is_needed) {
    return is_needed ? rows_like(rows, sum_of(sizes)) : at::empty({0}, rows.options());
  };
  return {whole(grad_input, needed[0]), whole(grad_weights, needed[1])};
}

struct MoeTakeTokens : Gradient<MoeTakeTokens, moe_take_tokens, Saved<>> {
  static constexpr int output_of(size_t argument) { return static_cast<int>(argument); }

  static variable_list rule(const ForwardCall<moe_take_tokens>& forward,
                            const variable_list& grads) {
    const auto [input, weights, sizes, rank, group] = forward.arguments();
    return forward.gradients(
        moe_take_tokens_backward(grads[0], grads[1], sizes, forward.needed<2>(), rank, group));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<moe_take_tokens>(library)
      .kernel<moe_take_tokens_kernel>()
      .meta<moe_take_tokens_meta>()
      .gradient<MoeTakeTokens>();
  implement<moe_take_tokens_backward>(library)
      .kernel<moe_take_tokens_backward_kernel>()
      .meta<moe_take_tokens_backward_meta>();
}

}  // namespace parallel_ext
