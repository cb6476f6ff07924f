// The borders of a parallel region between which each rank of the group keeps its own tokens
// (sequence parallelism): all of them enter the region, and what leaves it is summed for each
// rank's own ones only. A reduce-scatter and an all-gather carry as many bytes as one all-reduce.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <vector>

#include "base/empty.h"
#include "base/kernel_choice.h"
#include "base/layout.h"
#include "base/shares.h"
#include "base/sum_rows.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

// The tokens of each rank of a group in [..., S, H], of which all dimensions in front are one.
class TokenCall {
 public:
  TokenCall(const char* op, const char* name, const at::Tensor& tensor, at::IntArrayRef sizes,
            int64_t rank, const Group& group, bool all)
      : sizes_(sizes), rank_(rank) {
    const int64_t total = check_sizes(op, sizes, rank, group.size);
    starts_ = starts_of(sizes);
    check_rank(op, rank, group);
    const int64_t expected = all ? total : sizes[rank];
    check_floating(op, name, tensor);
    TORCH_CHECK_VALUE(tensor.dim() >= 2 && tensor.size(-2) == expected, op, ": ", name,
                      " must hold ", expected, " tokens in its dimension before the last, got ",
                      "shape ", tensor.sizes());
    shape_ = tensor.sizes().vec();
    hidden_ = shape_.back();
    for (size_t i = 0; i + 2 < shape_.size(); ++i) sequences_ *= shape_[i];
  }

  int64_t own() const { return sizes_[rank_]; }
  int64_t all() const { return starts_.back(); }
  int64_t sequences() const { return sequences_; }
  int64_t hidden() const { return hidden_; }
  // The rows of one rank, of all sequences.
  int64_t rows(int64_t rank) const { return sequences_ * sizes_[rank]; }

  std::vector<int64_t> shape(int64_t tokens) const {
    std::vector<int64_t> shape = shape_;
    shape[shape.size() - 2] = tokens;
    return shape;
  }
  // A rank's part of a tensor that has all tokens.
  at::Tensor part(const at::Tensor& whole, int64_t rank) const {
    return whole.narrow(-2, starts_[rank], sizes_[rank]);
  }
  // The memory of that part of a contiguous tensor.
  std::vector<Span> spans(const at::Tensor& whole, int64_t rank) const {
    std::vector<Span> spans;
    const int64_t row = hidden_ * whole.element_size();
    const auto* data = static_cast<const char*>(whole.const_data_ptr());
    for (int64_t each = 0; each < sequences_; ++each) {
      add_span(spans, data + (each * all() + starts_[rank]) * row, sizes_[rank] * row);
    }
    return spans;
  }

 private:
  const at::IntArrayRef sizes_;
  const int64_t rank_;
  std::vector<int64_t> shape_, starts_;
  int64_t hidden_ = 0, sequences_ = 1;
};

std::vector<Span> spans_of(const at::Tensor& contiguous) {
  std::vector<Span> spans;
  add_span(spans, contiguous.const_data_ptr(), static_cast<int64_t>(contiguous.nbytes()));
  return spans;
}

at::Tensor take_tokens_kernel(const at::Tensor& input, at::IntArrayRef sizes, int64_t rank,
                              const Group& group) {
  const TokenCall tokens("take_tokens", "input", input, sizes, rank, group, true);
  return tokens.part(input, rank).clone(at::MemoryFormat::Contiguous);
}

at::Tensor gather_tokens_kernel(const at::Tensor& shard, at::IntArrayRef sizes, int64_t rank, bool,
                                const Group& group) {
  const char* op = "gather_tokens";
  const TokenCall tokens(op, "shard", shard, sizes, rank, group, false);
  if (group.alone()) return shard.clone(at::MemoryFormat::Contiguous);
  const at::Tensor own = shard.contiguous();
  if (use_cpu_loops(shard)) {
    const at::Tensor output = at::empty(tokens.shape(tokens.all()), shard.options());
    std::vector<std::vector<Span>> outgoing(group.size, spans_of(own)), incoming;
    for (int64_t peer = 0; peer < group.size; ++peer) {
      incoming.push_back(tokens.spans(output, peer));
    }
    swap_bytes(op, outgoing, incoming, group);
    tokens.part(output, rank).copy_(own);
    return output;
  }
  // NCCL gathers messages of equal size only; the surplus is dropped below.
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  at::Tensor message = own;
  if (sizes[rank] < *most) {
    message = at::empty(tokens.shape(*most), shard.options());
    message.narrow(-2, 0, sizes[rank]).copy_(own);
  }
  const at::Tensor all = all_gather(op, message, group);
  if (*least == *most && tokens.sequences() == 1) return all.view(tokens.shape(tokens.all()));
  std::vector<at::Tensor> parts;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    parts.push_back(all[peer].narrow(-2, 0, sizes[peer]));
  }
  return at::cat(parts, -2);
}

at::Tensor sum_tokens_kernel(const at::Tensor& partial, at::IntArrayRef sizes, int64_t rank,
                             const Group& group) {
  const char* op = "sum_tokens";
  const TokenCall tokens(op, "partial", partial, sizes, rank, group, true);
  if (group.alone()) return partial.clone(at::MemoryFormat::Contiguous);
  const auto shape = tokens.shape(tokens.own());
  if (use_cpu_loops(partial)) {
    TORCH_CHECK_TYPE(can_sum_in_rank_order(partial.scalar_type()), op, ": partial is ",
                     partial.scalar_type(), ", which cannot be summed; cast it");
    const at::Tensor whole = partial.contiguous();
    // The sum takes the place of this rank's addend.
    const at::Tensor output = tokens.part(whole, rank).clone(at::MemoryFormat::Contiguous);
    std::vector<at::Tensor> parts;
    std::vector<const void*> addends;
    std::vector<std::vector<Span>> outgoing, incoming;
    for (int64_t peer = 0; peer < group.size; ++peer) {
      parts.push_back(peer == rank ? output : at::empty(shape, partial.options()));
      addends.push_back(parts.back().const_data_ptr());
      outgoing.push_back(tokens.spans(whole, peer));
      incoming.push_back(spans_of(parts.back()));
    }
    swap_bytes(op, outgoing, incoming, group);
    constexpr int64_t kGrain = 1 << 15;
    at::parallel_for(0, output.numel(), kGrain, [&](int64_t begin, int64_t end) {
      sum_in_rank_order(output.scalar_type(), addends, begin, end, output.mutable_data_ptr());
    });
    return output;
  }
  std::vector<at::Tensor> parts;
  std::vector<int64_t> sent;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    sent.push_back(tokens.rows(peer));
    parts.push_back(tokens.part(partial, peer).reshape({sent.back(), tokens.hidden()}));
  }
  const std::vector<int64_t> received(group.size, tokens.rows(rank));
  const at::Tensor all = all_to_all_rows(op, at::cat(parts), sent, received, group);
  std::vector<int64_t> of_ranks = shape;
  of_ranks.insert(of_ranks.begin(), group.size);
  return all.view(of_ranks).sum(0, false, wide_type(partial)).to(partial.scalar_type());
}

template <const auto& op>
at::Tensor own_tokens_meta(const at::Tensor& input, at::IntArrayRef sizes, int64_t rank,
                           const Group& group) {
  check_sizes(op.kShortName, sizes, rank, group.size);
  return empty_with(input, -2, sizes[rank]);
}

at::Tensor gather_tokens_meta(const at::Tensor& shard, at::IntArrayRef sizes) {
  return empty_with(shard, -2, sum_of_counts("gather_tokens", "sizes", sizes));
}

struct TakeTokens : Gradient<TakeTokens, take_tokens, Saved<>> {
  static variable_list rule(const ForwardCall<take_tokens>& forward, const variable_list& grads) {
    const auto [input, sizes, rank, group] = forward.arguments();
    return forward.gradients(gather_tokens(grads[0], sizes, rank, false, group));
  }
};

struct GatherTokens : Gradient<GatherTokens, gather_tokens, Saved<>> {
  static variable_list rule(const ForwardCall<gather_tokens>& forward, const variable_list& grads) {
    const auto [shard, sizes, rank, partial_gradient, group] = forward.arguments();
    return forward.gradients(partial_gradient ? sum_tokens(grads[0], sizes, rank, group)
                                              : take_tokens(grads[0], sizes, rank, group));
  }
};

struct SumTokens : Gradient<SumTokens, sum_tokens, Saved<>> {
  static variable_list rule(const ForwardCall<sum_tokens>& forward, const variable_list& grads) {
    const auto [partial, sizes, rank, group] = forward.arguments();
    return forward.gradients(gather_tokens(grads[0], sizes, rank, true, group));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<take_tokens>(library)
      .kernel<take_tokens_kernel>()
      .meta<own_tokens_meta<take_tokens>>()
      .gradient<TakeTokens>();
  implement<gather_tokens>(library)
      .kernel<gather_tokens_kernel>()
      .meta<gather_tokens_meta>()
      .gradient<GatherTokens>();
  implement<sum_tokens>(library)
      .kernel<sum_tokens_kernel>()
      .meta<own_tokens_meta<sum_tokens>>()
      .gradient<SumTokens>();
}

}  // namespace parallel_ext
