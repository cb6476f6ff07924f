// Where the rows of a mixture of experts go: a stable counting sort of the chosen experts, and the
// rows that each rank must get for them.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "base/kernel_choice.h"
#include "check.h"
#include "moe/expert_ids.h"
#include "moe/ops.h"
#include "moe/rows_cuda.h"

namespace parallel_ext {
namespace {

// A choice's row in its message costs this many bytes beside the rows.
constexpr int64_t kRowNumberBytes = 4;

// A rank that gets each token's row once also gets, for each choice, the number of its row.
bool saves_bytes(int64_t choices, int64_t tokens, int64_t row_bytes) {
  return (choices - tokens) * row_bytes > choices * kRowNumberBytes;
}

// Returns the number of experts.
int64_t check_plan(const at::Tensor& expert_ids, at::IntArrayRef experts_per_rank,
                   int64_t row_bytes, int64_t rank) {
  const char* op = "moe_route_plan";
  check_int64(op, "expert_ids", expert_ids);
  check_dim(op, "expert_ids", expert_ids, 2);
  constexpr int64_t kLongestRow = int64_t{1} << 31;  // choices times bytes fit into an int64
  TORCH_CHECK_VALUE(0 <= row_bytes && row_bytes <= kLongestRow, op, ": row_bytes must be in [0, ",
                    kLongestRow, "], got ", row_bytes);
  const auto ranks = static_cast<int64_t>(experts_per_rank.size());
  TORCH_CHECK_VALUE(0 <= rank && rank < ranks, op, ": rank ", rank, " is not one of ", ranks);
  return num_experts_of(op, experts_per_rank);
}

// CPU: a few passes over the ids, no comparison sort and no [T, E] map.
Tensors<5> moe_route_plan_cpu(const at::Tensor& ids_in, at::IntArrayRef experts_per_rank,
                              int64_t row_bytes, int64_t rank) {
  const int64_t num_experts = check_plan(ids_in, experts_per_rank, row_bytes, rank);
  const at::Tensor ids = ids_in.contiguous();
  const int64_t size = ids.numel(), top_k = ids.size(1);
  const auto num_ranks = static_cast<int64_t>(experts_per_rank.size());
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const auto options = ids.options();
  at::Tensor counts = at::zeros({num_experts}, options),
             rows_per_rank = at::zeros({num_ranks}, options);
  at::Tensor rows = at::empty(ids.sizes(), options), sources = at::empty({size}, options);
  at::Tensor tokens = at::zeros({size}, options);
  auto* count = counts.mutable_data_ptr<int64_t>();
  auto* rows_of_rank = rows_per_rank.mutable_data_ptr<int64_t>();
  auto* row = rows.mutable_data_ptr<int64_t>();
  auto* source = sources.mutable_data_ptr<int64_t>();
  auto* token = tokens.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < size; ++i) {
    check_expert_id("moe_route_plan", id[i], i, top_k, num_experts);
    ++count[id[i]];
  }
  std::vector<int64_t> next(num_experts, 0);
  for (int64_t expert = 1; expert < num_experts; ++expert) {
    next[expert] = next[expert - 1] + count[expert - 1];
  }
  for (int64_t i = 0; i < size; ++i) source[next[id[i]]++] = i;
  // For each token its row in the message to `peer`; rows below first_row are of earlier peers.
  std::vector<int64_t> row_of_token(ids.size(0), -1);
  int64_t begin = 0, expert = 0, num_rows = 0;
  for (int64_t peer = 0; peer < num_ranks; ++peer) {
    int64_t end = begin;
    for (const int64_t last = expert + experts_per_rank[peer]; expert < last; ++expert) {
      end += count[expert];
    }
    const int64_t first_row = num_rows;
    int64_t num_tokens = 0;
    for (int64_t slot = begin; slot < end; ++slot) {
      int64_t& own = row_of_token[source[slot] / top_k];
      if (own < first_row) own = first_row + num_tokens++;
    }
    const bool once = peer != rank && saves_bytes(end - begin, num_tokens, row_bytes);
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t of_token = source[slot] / top_k;
      const int64_t own = once ? row_of_token[of_token] : first_row + slot - begin;
      row[source[slot]] = own;
      token[own] = of_token;
    }
    rows_of_rank[peer] = once ? num_tokens : end - begin;
    num_rows += rows_of_rank[peer];
    begin = end;
  }
  return {counts, rows_per_rank, rows, sources, tokens};
}

// ids [size] -> how many there are of each expert [E]; their positions, stably sorted; and the slot
// of each position. An id that is out of range is not counted, which the caller sees where it reads
// the counts.
Tensors<3> sorted_on_cuda(const at::Tensor& ids, int64_t num_experts) {
  const int64_t size = ids.numel();
  const at::Tensor counts = at::empty({num_experts}, ids.options());
  const at::Tensor sources = at::empty_like(ids), slots = at::empty_like(ids);
  if constexpr (kWithCudaKernels) {
    const at::Tensor workspace = at::empty({sort_workspace(size, num_experts)}, ids.options());
    sort_ids_on_cuda(ids.const_data_ptr<int64_t>(), size, num_experts,
                     workspace.mutable_data_ptr<int64_t>(), counts.mutable_data_ptr<int64_t>(),
                     sources.mutable_data_ptr<int64_t>(), slots.mutable_data_ptr<int64_t>(),
                     ids.get_device());
  }
  return {counts, sources, slots};
}

Tensors<3> sorted(const at::Tensor& ids, int64_t num_experts) {
  if (use_cuda_kernel(ids)) return sorted_on_cuda(ids.contiguous(), num_experts);
  const at::Tensor counts = at::bincount(ids, {}, num_experts);
  TORCH_CHECK_INDEX(counts.numel() == num_experts, "moe_route_plan: a token chose expert ",
                    counts.numel() - 1, ", outside of [0, ", num_experts, ")");
  const at::Tensor sources = at::argsort(ids, /*stable=*/true, /*dim=*/0);
  const at::Tensor positions = at::arange(ids.numel(), ids.options());
  return {counts, sources, at::zeros_like(ids).scatter_(0, sources, positions)};
}

// For any device. Without a kernel for the device, bincount refuses an id below zero.
Tensors<5> moe_route_plan_aten(const at::Tensor& ids, at::IntArrayRef experts_per_rank,
                               int64_t row_bytes, int64_t rank) {
  const int64_t num_experts = check_plan(ids, experts_per_rank, row_bytes, rank);
  const int64_t top_k = ids.size(1), size = ids.numel();
  const auto num_ranks = static_cast<int64_t>(experts_per_rank.size());
  const at::Tensor flat = ids.flatten();
  const auto [counts, sources, slot_of] = sorted(flat, num_experts);
  const at::Tensor slots = slot_of.view(ids.sizes());
  const at::Tensor of_slot = top_k > 0 ? at::div(sources, top_k, "floor") : at::empty_like(sources);
  if (num_ranks == 1) {  // each choice is a row, and the host may never read the counts
    if (use_cuda_kernel(ids)) {
      at::_assert_async(counts.sum() == size, "moe_route_plan: an id is of no expert");
    }
    return {counts, at::full({1}, size, flat.options()), slots, sources, of_slot};
  }
  std::vector<int64_t> rank_of_expert;
  for (int64_t peer = 0; peer < num_ranks; ++peer) {
    rank_of_expert.insert(rank_of_expert.end(), experts_per_rank[peer], peer);
  }
  const at::Tensor there = at::tensor(rank_of_expert).to(flat.device(), /*non_blocking=*/true);
  const at::Tensor in_range = flat.clamp(0, num_experts - 1);  // what is not is refused later
  const at::Tensor ranks = there.index_select(0, in_range).view(ids.sizes());
  // The lowest slot among a token's choices of experts on the same rank leads the others: they
  // share its row.
  at::Tensor leads = slots;
  for (int64_t other = 0; other < top_k; ++other) {
    const at::Tensor beside = ranks == ranks.narrow(1, other, 1);
    leads = at::where(beside, at::minimum(leads, slots.narrow(1, other, 1)), leads);
  }
  const auto by_rank = [&](const at::Tensor& chosen) {
    return at::zeros({num_ranks}, flat.options())
        .scatter_add_(0, ranks.flatten(), chosen.flatten().to(at::kLong));
  };
  const at::Tensor choices = by_rank(at::ones_like(ids)), tokens_of = by_rank(leads == slots);
  at::Tensor once = (choices - tokens_of) * row_bytes > choices * kRowNumberBytes;
  once.narrow(0, rank, 1).fill_(false);
  leads = at::where(once.index_select(0, ranks.flatten()).view(ids.sizes()), leads, slots);
  const at::Tensor makes_row = (leads == slots).flatten();
  const at::Tensor in_order = makes_row.index_select(0, sources).to(at::kLong);
  const at::Tensor number = in_order.cumsum(0) - 1;  // of the row that a slot makes
  const at::Tensor rows = number.index_select(0, leads.flatten()).view(ids.sizes());
  // Slots that make no row write to one more element, which is dropped.
  const at::Tensor target = at::where(in_order == 1, number, at::full_like(number, size));
  const at::Tensor tokens =
      at::zeros({size + 1}, flat.options()).scatter_(0, target, of_slot).narrow(0, 0, size).clone();
  return {counts, by_rank(makes_row), rows, sources, tokens};
}

Tensors<5> moe_route_plan_cpu_or_aten(const at::Tensor& ids, at::IntArrayRef experts_per_rank,
                                      int64_t row_bytes, int64_t rank) {
  return (use_cpu_loops(ids) ? moe_route_plan_cpu : moe_route_plan_aten)(ids, experts_per_rank,
                                                                         row_bytes, rank);
}

Tensors<5> moe_route_plan_meta(const at::Tensor& ids, at::IntArrayRef experts_per_rank) {
  const auto options = ids.options();
  return {at::empty({num_experts_of("moe_route_plan", experts_per_rank)}, options),
          at::empty({static_cast<int64_t>(experts_per_rank.size())}, options),
          at::empty_symint(ids.sym_sizes(), options), at::empty_symint({ids.sym_numel()}, options),
          at::empty_symint({ids.sym_numel()}, options)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<moe_route_plan>(library)
      .kernel<moe_route_plan_aten>()
      .on<moe_route_plan_cpu_or_aten>(c10::DispatchKey::CPU)
      .meta<moe_route_plan_meta>();
}

}  // namespace parallel_ext
