// The rows of a mixture of experts travel to the ranks that hold their experts, and back.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstring>
#include <numeric>
#include <vector>

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

// `count` rows from row `first` on.
struct Chunk {
  int64_t first, count;
};

// chunks[peer]: the rows that this rank and the peer have in common, one chunk for each expert.
using Chunks = std::vector<std::vector<Chunk>>;

int64_t sum_of(at::IntArrayRef values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// This rank's own rows: by global expert, so the experts of one rank lie side by side.
Chunks chunks_by_rank(at::IntArrayRef send_counts, at::IntArrayRef experts_per_rank) {
  Chunks chunks(experts_per_rank.size());
  int64_t first = 0, expert = 0;
  for (size_t peer = 0; peer < chunks.size(); ++peer) {
    for (int64_t i = 0; i < experts_per_rank[peer]; ++i, ++expert) {
      chunks[peer].push_back({first, send_counts[expert]});
      first += send_counts[expert];
    }
  }
  return chunks;
}

// The rows of this rank's experts: by (expert, rank that they come from).
Chunks chunks_by_expert(at::IntArrayRef receive_counts, int64_t num_ranks, int64_t own_experts) {
  Chunks chunks(num_ranks);
  int64_t first = 0;
  for (int64_t expert = 0; expert < own_experts; ++expert) {
    for (int64_t peer = 0; peer < num_ranks; ++peer) {
      const int64_t count = receive_counts[peer * own_experts + expert];
      chunks[peer].push_back({first, count});
      first += count;
    }
  }
  return chunks;
}

void check_exchange(const at::Tensor& rows, at::IntArrayRef send_counts,
                    at::IntArrayRef receive_counts, at::IntArrayRef experts_per_rank,
                    bool to_experts, int64_t rank, int64_t group_size) {
  const char* op = "moe_exchange";
  check_floating(op, "rows", rows);
  check_dim(op, "rows", rows, 2);
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(experts_per_rank.size()) == group_size && 0 <= rank && rank < group_size,
      op, ": experts_per_rank ", experts_per_rank, " and rank ", rank, " do not fit a group of ",
      group_size);
  TORCH_CHECK_VALUE(static_cast<int64_t>(send_counts.size()) == sum_of(experts_per_rank), op, ": ",
                    send_counts.size(), " send_counts are not one for each of the ",
                    sum_of(experts_per_rank), " experts");
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(receive_counts.size()) == group_size * experts_per_rank[rank], op, ": ",
      receive_counts.size(), " receive_counts are not one for each of ", group_size,
      " ranks and this rank's ", experts_per_rank[rank], " experts");
  for (const at::IntArrayRef counts : {send_counts, receive_counts}) {
    for (const int64_t count : counts) {
      TORCH_CHECK_VALUE(count >= 0, op, ": a count is negative: ", counts);
    }
  }
  const int64_t expected = sum_of(to_experts ? send_counts : receive_counts);
  TORCH_CHECK_VALUE(rows.size(0) == expected, op, ": ", rows.size(0), " rows, but the counts say ",
                    expected);
}

// CPU: every chunk goes from its place here to its place there, with nothing in between.
at::Tensor exchange_cpu(const at::Tensor& rows, const Chunks& from, const Chunks& to,
                        int64_t num_rows, int64_t rank, int64_t group_size,
                        const std::string& group_name) {
  const at::Tensor input = rows.contiguous();
  at::Tensor output = at::empty({num_rows, rows.size(1)}, rows.options());
  const int64_t row_bytes = rows.size(1) * rows.element_size();
  auto* in = static_cast<char*>(const_cast<void*>(input.const_data_ptr()));
  auto* out = static_cast<char*>(output.mutable_data_ptr());
  const auto spans = [&](const Chunks& chunks, char* data) {
    std::vector<std::vector<Span>> all(chunks.size());
    for (int64_t peer = 0; peer < group_size; ++peer) {
      if (peer == rank) continue;
      for (const Chunk& chunk : chunks[peer]) {
        const int64_t bytes = chunk.count * row_bytes;
        if (bytes > 0) all[peer].push_back({data + chunk.first * row_bytes, bytes});
      }
    }
    return all;
  };
  for (size_t i = 0; i < from[rank].size(); ++i) {
    const int64_t bytes = from[rank][i].count * row_bytes;
    if (bytes > 0) {
      std::memcpy(out + to[rank][i].first * row_bytes, in + from[rank][i].first * row_bytes, bytes);
    }
  }
  swap_bytes("moe_exchange", spans(from, in), spans(to, out), group_size, group_name);
  return output;
}

at::Tensor gather_chunks(const at::Tensor& rows, const std::vector<Chunk>& chunks) {
  std::vector<at::Tensor> pieces;
  for (const Chunk& chunk : chunks) pieces.push_back(rows.narrow(0, chunk.first, chunk.count));
  return pieces.empty() ? rows.narrow(0, 0, 0) : at::cat(pieces);
}

int64_t rows_in(const std::vector<Chunk>& chunks) {
  int64_t count = 0;
  for (const Chunk& chunk : chunks) count += chunk.count;
  return count;
}

// Any device: one all-to-all of whole ranks, the rows in and out of their order beside it.
at::Tensor exchange_aten(const at::Tensor& rows, const Chunks& from, const Chunks& to,
                         int64_t num_rows, int64_t group_size, const std::string& group_name) {
  std::vector<Chunk> by_rank;
  std::vector<int64_t> sent, received;
  for (const auto& chunks : from) {
    by_rank.insert(by_rank.end(), chunks.begin(), chunks.end());
    sent.push_back(rows_in(chunks));
  }
  for (const auto& chunks : to) received.push_back(rows_in(chunks));
  const at::Tensor arrived = all_to_all_rows("moe_exchange", gather_chunks(rows, by_rank), sent,
                                             received, group_size, group_name);
  at::Tensor output = at::empty({num_rows, rows.size(1)}, rows.options());
  int64_t first = 0;
  for (const auto& chunks : to) {
    for (const Chunk& chunk : chunks) {
      output.narrow(0, chunk.first, chunk.count).copy_(arrived.narrow(0, first, chunk.count));
      first += chunk.count;
    }
  }
  return output;
}

at::Tensor moe_exchange_kernel(const at::Tensor& rows, at::IntArrayRef send_counts,
                               at::IntArrayRef receive_counts, at::IntArrayRef experts_per_rank,
                               bool to_experts, int64_t rank, int64_t group_size,
                               const std::string& group_name) {
  check_exchange(rows, send_counts, receive_counts, experts_per_rank, to_experts, rank, group_size);
  Chunks from = chunks_by_rank(send_counts, experts_per_rank);
  Chunks to = chunks_by_expert(receive_counts, group_size, experts_per_rank[rank]);
  if (!to_experts) std::swap(from, to);
  const int64_t num_rows = sum_of(to_experts ? receive_counts : send_counts);
  if (rows.is_cpu() && !aten_path_on_cpu()) {
    return exchange_cpu(rows, from, to, num_rows, rank, group_size, group_name);
  }
  return exchange_aten(rows, from, to, num_rows, group_size, group_name);
}

at::Tensor moe_exchange_meta(const at::Tensor& rows, at::IntArrayRef send_counts,
                             at::IntArrayRef receive_counts, at::IntArrayRef, bool to_experts,
                             int64_t, int64_t, const std::string&) {
  return at::empty_symint({sum_of(to_experts ? receive_counts : send_counts), rows.sym_size(1)},
                          rows.options());
}

// Autograd: the gradients travel the other way, by the counts of the forward.
class MoeExchange : public torch::autograd::Function<MoeExchange> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows,
                            at::IntArrayRef send_counts, at::IntArrayRef receive_counts,
                            at::IntArrayRef experts_per_rank, bool to_experts, int64_t rank,
                            int64_t group_size, const std::string& group_name) {
    ctx->saved_data["send_counts"] = send_counts.vec();
    ctx->saved_data["receive_counts"] = receive_counts.vec();
    ctx->saved_data["experts_per_rank"] = experts_per_rank.vec();
    ctx->saved_data["to_experts"] = to_experts;
    ctx->saved_data["rank"] = rank;
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["group_name"] = group_name;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return moe_exchange(rows, send_counts, receive_counts, experts_per_rank, to_experts, rank,
                        group_size, group_name);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const Variable grad_rows = moe_exchange(
        grad_outputs[0], ctx->saved_data["send_counts"].toIntVector(),
        ctx->saved_data["receive_counts"].toIntVector(),
        ctx->saved_data["experts_per_rank"].toIntVector(), !ctx->saved_data["to_experts"].toBool(),
        ctx->saved_data["rank"].toInt(), ctx->saved_data["group_size"].toInt(),
        ctx->saved_data["group_name"].toStringRef());
    return {grad_rows,  Variable(), Variable(), Variable(),
            Variable(), Variable(), Variable(), Variable()};
  }
};

at::Tensor moe_exchange_autograd(const at::Tensor& rows, at::IntArrayRef send_counts,
                                 at::IntArrayRef receive_counts, at::IntArrayRef experts_per_rank,
                                 bool to_experts, int64_t rank, int64_t group_size,
                                 const std::string& group_name) {
  return MoeExchange::apply(rows, send_counts, receive_counts, experts_per_rank, to_experts, rank,
                            group_size, group_name);
}

}  // namespace

at::Tensor moe_exchange(const at::Tensor& rows, at::IntArrayRef send_counts,
                        at::IntArrayRef receive_counts, at::IntArrayRef experts_per_rank,
                        bool to_experts, int64_t rank, int64_t group_size,
                        const std::string& group_name) {
  static auto op = op_handle<decltype(moe_exchange)>("parallel_ext::moe_exchange");
  return op.call(rows, send_counts, receive_counts, experts_per_rank, to_experts, rank, group_size,
                 group_name);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_exchange", moe_exchange_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) { m.impl("moe_exchange", moe_exchange_meta); }

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) { m.impl("moe_exchange", moe_exchange_autograd); }

}  // namespace parallel_ext
