// Where the rows of a mixture of experts go: a stable counting sort of the chosen experts.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "kernel_choice.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_plan(const at::Tensor& expert_ids, int64_t num_experts) {
  const char* op = "moe_route_plan";
  check_int64(op, "expert_ids", expert_ids);
  check_dim(op, "expert_ids", expert_ids, 2);
  TORCH_CHECK_VALUE(num_experts >= 1, op, ": num_experts must be at least 1, got ", num_experts);
}

[[noreturn]] void refuse_id(int64_t id, int64_t position, int64_t top_k, int64_t num_experts) {
  TORCH_CHECK_INDEX(false, "moe_route_plan: choice ", position % top_k, " of token ",
                    position / top_k, " is expert ", id, ", outside of [0, ", num_experts, ")");
}

// CPU: two passes over the ids, no comparison and no [T, E] map.
ThreeTensors moe_route_plan_cpu(const at::Tensor& ids_in, int64_t num_experts) {
  check_plan(ids_in, num_experts);
  const at::Tensor ids = ids_in.contiguous();
  const int64_t size = ids.numel();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  at::Tensor counts = at::empty({num_experts}, ids.options());
  at::Tensor slots = at::empty(ids.sizes(), ids.options()),
             sources = at::empty({size}, ids.options());
  auto* count = counts.mutable_data_ptr<int64_t>();
  auto* slot = slots.mutable_data_ptr<int64_t>();
  auto* source = sources.mutable_data_ptr<int64_t>();
  std::fill_n(count, num_experts, 0);
  for (int64_t i = 0; i < size; ++i) {
    if (id[i] < 0 || id[i] >= num_experts) refuse_id(id[i], i, ids.size(1), num_experts);
    ++count[id[i]];
  }
  std::vector<int64_t> next(num_experts, 0);
  for (int64_t expert = 1; expert < num_experts; ++expert) {
    next[expert] = next[expert - 1] + count[expert - 1];
  }
  for (int64_t i = 0; i < size; ++i) {
    slot[i] = next[id[i]]++;
    source[slot[i]] = i;
  }
  return {counts, slots, sources};
}

// Any device. Off the CPU the ids are not read back; one outside of [0, E) fails in bincount.
ThreeTensors moe_route_plan_aten(const at::Tensor& ids, int64_t num_experts) {
  check_plan(ids, num_experts);
  const at::Tensor flat = ids.flatten();
  const at::Tensor sources = at::argsort(flat, /*stable=*/true, /*dim=*/0);
  at::Tensor slots = at::empty_like(flat);
  slots.scatter_(0, sources, at::arange(flat.numel(), flat.options()));
  const at::Tensor counts = at::bincount(flat, {}, num_experts);
  TORCH_CHECK_INDEX(counts.numel() == num_experts, "moe_route_plan: a token chose expert ",
                    counts.numel() - 1, ", outside of [0, ", num_experts, ")");
  return {counts, slots.view(ids.sizes()), sources};
}

ThreeTensors moe_route_plan_cpu_or_aten(const at::Tensor& ids, int64_t num_experts) {
  return (aten_path_on_cpu() ? moe_route_plan_aten : moe_route_plan_cpu)(ids, num_experts);
}

ThreeTensors moe_route_plan_meta(const at::Tensor& ids, int64_t num_experts) {
  return {at::empty({num_experts}, ids.options()), at::empty_symint(ids.sym_sizes(), ids.options()),
          at::empty_symint({ids.sym_numel()}, ids.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_route_plan", moe_route_plan_aten);
}

TORCH_LIBRARY_IMPL(parallel_ext, CPU, m) { m.impl("moe_route_plan", moe_route_plan_cpu_or_aten); }

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) { m.impl("moe_route_plan", moe_route_plan_meta); }

}  // namespace parallel_ext
