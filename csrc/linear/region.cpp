// The borders of a tensor-parallel region: replicated inputs enter it, partial sums and shards
// leave it.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "check.h"
#include "comm/comm.h"
#include "dispatch.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Kernels: any device whose process group can sum and gather.

at::Tensor reduce_from_region_kernel(const at::Tensor& partial, int64_t group_size,
                                     const std::string& group_name) {
  check_floating("reduce_from_region", "partial", partial);
  at::Tensor total = partial.clone(at::MemoryFormat::Contiguous);
  all_reduce_sum("reduce_from_region", total, group_size,
                 group_name);  // numel(partial), every rank
  return total;
}

at::Tensor copy_to_region_kernel(const at::Tensor& input, int64_t, const std::string&) {
  check_floating("copy_to_region", "input", input);
  return input.clone(at::MemoryFormat::Contiguous);
}

at::Tensor gather_from_region_kernel(const at::Tensor& shard, at::IntArrayRef sizes, int64_t rank,
                                     int64_t group_size, const std::string& group_name) {
  const char* op = "gather_from_region";
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == group_size, op, ": ", sizes.size(),
                    " sizes were given for a group of ", group_size, " ranks");
  TORCH_CHECK_VALUE(0 <= rank && rank < group_size, op, ": rank ", rank, " is not in [0, ",
                    group_size, ")");
  sum_of_counts(op, "sizes", sizes);
  TORCH_CHECK_VALUE(shard.dim() >= 1 && shard.size(-1) == sizes[rank], op, ": rank ", rank,
                    " must hold ", sizes[rank], " columns, got shape ", shard.sizes());
  if (group_size == 1) return shard.clone(at::MemoryFormat::Contiguous);
  // Messages of one size, since gloo's gather wants them equal; the surplus is cut off again.
  std::vector<int64_t> shape = shard.sizes().vec();
  shape.back() = *std::max_element(sizes.begin(), sizes.end());
  at::Tensor message = shard.contiguous();
  if (shape.back() != sizes[rank]) {
    message = at::empty(shape, shard.options());
    message.narrow(-1, 0, sizes[rank]).copy_(shard);
  }
  const at::Tensor all = all_gather(op, message, group_size, group_name);
  std::vector<at::Tensor> parts;
  for (int64_t peer = 0; peer < group_size; ++peer) {
    parts.push_back(all.select(0, peer).narrow(-1, 0, sizes[peer]));
  }
  return at::cat(parts, -1);
}

at::Tensor same_shape_meta(const at::Tensor& input, int64_t, const std::string&) {
  return at::empty_like(input, at::MemoryFormat::Contiguous);
}

at::Tensor gather_from_region_meta(const at::Tensor& shard, at::IntArrayRef sizes, int64_t, int64_t,
                                   const std::string&) {
  auto shape = shard.sym_sizes().vec();
  shape.back() = sum_of_counts("gather_from_region", "sizes", sizes);
  return at::empty_symint(shape, shard.options());
}

// Autograd. reduce_from_region and copy_to_region are each other's backward.

class ReduceFromTp : public torch::autograd::Function<ReduceFromTp> {
 public:
  static at::Tensor forward(AutogradContext*, const at::Tensor& partial, int64_t group_size,
                            const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return reduce_from_region(partial, group_size, group_name);
  }
  static variable_list backward(AutogradContext*, variable_list grad_outputs) {
    return {grad_outputs[0], Variable(), Variable()};
  }
};

class CopyToTp : public torch::autograd::Function<CopyToTp> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, int64_t group_size,
                            const std::string& group_name) {
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["group_name"] = group_name;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return copy_to_region(input, group_size, group_name);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    return {reduce_from_region(grad_outputs[0], ctx->saved_data["group_size"].toInt(),
                               ctx->saved_data["group_name"].toStringRef()),
            Variable(), Variable()};
  }
};

class GatherFromTp : public torch::autograd::Function<GatherFromTp> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& shard, at::IntArrayRef sizes,
                            int64_t rank, int64_t group_size, const std::string& group_name) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor full = gather_from_region(shard, sizes, rank, group_size, group_name);
    ctx->saved_data["start"] = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
    ctx->saved_data["size"] = sizes[rank];
    return full;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const int64_t start = ctx->saved_data["start"].toInt(), size = ctx->saved_data["size"].toInt();
    return {grad_outputs[0].narrow(-1, start, size), Variable(), Variable(), Variable(),
            Variable()};
  }
};

at::Tensor reduce_from_region_autograd(const at::Tensor& partial, int64_t group_size,
                                       const std::string& group_name) {
  return ReduceFromTp::apply(partial, group_size, group_name);
}

at::Tensor copy_to_region_autograd(const at::Tensor& input, int64_t group_size,
                                   const std::string& group_name) {
  return CopyToTp::apply(input, group_size, group_name);
}

at::Tensor gather_from_region_autograd(const at::Tensor& shard, at::IntArrayRef sizes, int64_t rank,
                                       int64_t group_size, const std::string& group_name) {
  return GatherFromTp::apply(shard, sizes, rank, group_size, group_name);
}

}  // namespace

at::Tensor reduce_from_region(const at::Tensor& partial, int64_t group_size,
                              const std::string& group_name) {
  static auto op = op_handle<decltype(reduce_from_region)>("parallel_ext::reduce_from_region");
  return op.call(partial, group_size, group_name);
}

at::Tensor copy_to_region(const at::Tensor& input, int64_t group_size,
                          const std::string& group_name) {
  static auto op = op_handle<decltype(copy_to_region)>("parallel_ext::copy_to_region");
  return op.call(input, group_size, group_name);
}

at::Tensor gather_from_region(const at::Tensor& shard, at::IntArrayRef sizes, int64_t rank,
                              int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(gather_from_region)>("parallel_ext::gather_from_region");
  return op.call(shard, sizes, rank, group_size, group_name);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("reduce_from_region", reduce_from_region_kernel);
  m.impl("copy_to_region", copy_to_region_kernel);
  m.impl("gather_from_region", gather_from_region_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("reduce_from_region", same_shape_meta);
  m.impl("copy_to_region", same_shape_meta);
  m.impl("gather_from_region", gather_from_region_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("reduce_from_region", reduce_from_region_autograd);
  m.impl("copy_to_region", copy_to_region_autograd);
  m.impl("gather_from_region", gather_from_region_autograd);
}

}  // namespace parallel_ext
