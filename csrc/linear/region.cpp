// The borders of a parallel region: replicated inputs enter it, partial sums and shards leave it.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <numeric>

#include "base/empty.h"
#include "base/shares.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

// Kernels: any device whose process group can sum and gather.

at::Tensor reduce_from_region_kernel(const at::Tensor& partial, const Group& group) {
  check_floating("reduce_from_region", "partial", partial);
  at::Tensor total = partial.clone(at::MemoryFormat::Contiguous);
  all_reduce_sum("reduce_from_region", total, group);  // numel(partial), every rank
  return total;
}

at::Tensor copy_to_region_kernel(const at::Tensor& input) {
  check_floating("copy_to_region", "input", input);
  return input.clone(at::MemoryFormat::Contiguous);
}

at::Tensor gather_from_region_kernel(const at::Tensor& shard, at::IntArrayRef sizes, int64_t rank,
                                     const Group& group) {
  const char* op = "gather_from_region";
  check_sizes(op, sizes, rank, group.size);
  check_rank(op, rank, group);
  TORCH_CHECK_VALUE(shard.dim() >= 1 && shard.size(-1) == sizes[rank], op, ": rank ", rank,
                    " must hold ", sizes[rank], " columns, got shape ", shard.sizes());
  if (group.alone()) return shard.clone(at::MemoryFormat::Contiguous);
  // gloo gathers messages of equal size only; the surplus is dropped below.
  std::vector<int64_t> shape = shard.sizes().vec();
  shape.back() = *std::max_element(sizes.begin(), sizes.end());
  at::Tensor message = shard.contiguous();
  if (shape.back() != sizes[rank]) {
    message = at::empty(shape, shard.options());
    message.narrow(-1, 0, sizes[rank]).copy_(shard);
  }
  const at::Tensor all = all_gather(op, message, group);
  std::vector<at::Tensor> parts;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    parts.push_back(all.select(0, peer).narrow(-1, 0, sizes[peer]));
  }
  return at::cat(parts, -1);
}

at::Tensor gather_from_region_meta(const at::Tensor& shard, at::IntArrayRef sizes) {
  return empty_with(shard, -1, sum_of_counts("gather_from_region", "sizes", sizes));
}

// reduce_from_region and copy_to_region are each other's backward.

struct ReduceFromRegion : Gradient<ReduceFromRegion, reduce_from_region, Saved<>> {
  static variable_list rule(const ForwardCall<reduce_from_region>& forward,
                            const variable_list& grads) {
    return forward.gradients(grads[0]);
  }
};

struct CopyToRegion : Gradient<CopyToRegion, copy_to_region, Saved<>> {
  static variable_list rule(const ForwardCall<copy_to_region>& forward,
                            const variable_list& grads) {
    const auto [input, group] = forward.arguments();
    return forward.gradients(reduce_from_region(grads[0], group));
  }
};

struct GatherFromRegion : Gradient<GatherFromRegion, gather_from_region, Saved<>> {
  static variable_list rule(const ForwardCall<gather_from_region>& forward,
                            const variable_list& grads) {
    const auto [shard, sizes, rank, group] = forward.arguments();
    const int64_t start = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
    return forward.gradients(grads[0].narrow(-1, start, sizes[rank]));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<reduce_from_region>(library)
      .kernel<reduce_from_region_kernel>()
      .meta<same_shape_meta>()
      .gradient<ReduceFromRegion>();
  implement<copy_to_region>(library)
      .kernel<copy_to_region_kernel>()
      .meta<same_shape_meta>()
      .gradient<CopyToRegion>();
  implement<gather_from_region>(library)
      .kernel<gather_from_region_kernel>()
      .meta<gather_from_region_meta>()
      .gradient<GatherFromRegion>();
}

}  // namespace parallel_ext
