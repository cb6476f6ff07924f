// Which experts a token gets, and with which weights. On the CPU the bits are those of torch's own
// softmax and sums in one thread, as of HuggingFace's routers: no loop of ours computes a number.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "base/kernel_choice.h"
#include "check.h"
#include "gradient.h"
#include "moe/expert_ids.h"
#include "moe/ops.h"
#include "moe/router_cuda.h"

namespace parallel_ext {
namespace {

constexpr int64_t kRoutedPerTask = 64;

void check_logits(const char* op, const at::Tensor& logits, int64_t top_k) {
  check_floating(op, "logits", logits);
  check_dim(op, "logits", logits, 2);
  TORCH_CHECK_VALUE(1 <= top_k && top_k <= logits.size(1), op, ": top_k must be in [1, ",
                    logits.size(1), "] for logits of ", logits.size(1), " experts, got ", top_k);
}

// On the CPU the range too, which on a GPU the kernels check.
void check_expert_ids(const char* op, const at::Tensor& ids, const at::Tensor& logits,
                      int64_t top_k) {
  check_int64(op, "expert_ids", ids);
  check_shape(op, "expert_ids", ids, {logits.size(0), top_k});
  if (!ids.is_cpu()) return;
  const auto id = ids.accessor<int64_t, 2>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    check_expert_id(op, id[i / top_k][i % top_k], i, top_k, logits.size(1));
  }
}

// The best so far stay in order: one that comes later stands behind those that equal it. Where one
// probability of a token is NaN all are, and the first experts are chosen.
template <typename wide_t>
void choose(const wide_t* probabilities, int64_t num_experts, int64_t top_k, wide_t* weights,
            int64_t* ids) {
  int64_t found = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const wide_t own = probabilities[expert];
    if (found == top_k && !(own > weights[top_k - 1])) continue;
    int64_t place = found < top_k ? found++ : top_k - 1;
    for (; place > 0 && own > weights[place - 1]; --place) {
      weights[place] = weights[place - 1];
      ids[place] = ids[place - 1];
    }
    weights[place] = own;
    ids[place] = expert;
  }
}

Tensors<2> chosen_by_loop(const at::Tensor& probabilities, int64_t top_k) {
  const int64_t tokens = probabilities.size(0), num_experts = probabilities.size(1);
  at::Tensor weights = at::empty({tokens, top_k}, probabilities.options());
  at::Tensor ids = at::empty({tokens, top_k}, probabilities.options().dtype(at::kLong));
  AT_DISPATCH_FLOATING_TYPES(probabilities.scalar_type(), "moe_router", [&] {
    const auto* row = probabilities.const_data_ptr<scalar_t>();
    auto* weight = weights.mutable_data_ptr<scalar_t>();
    auto* id = ids.mutable_data_ptr<int64_t>();
    at::parallel_for(0, tokens, kRoutedPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        choose(row + token * num_experts, num_experts, top_k, weight + token * top_k,
               id + token * top_k);
      }
    });
  });
  return {weights, ids};
}

Tensors<2> chosen_by_calls(const at::Tensor& probabilities, int64_t top_k) {
  const auto [sorted, ids] = at::sort(probabilities, /*stable=*/true, /*dim=*/1,
                                      /*descending=*/true);
  return {sorted.narrow(1, 0, top_k), ids.narrow(1, 0, top_k)};
}

at::Tensor probabilities_of(const at::Tensor& logits) {
  return at::softmax(logits, 1, wide_type(logits)).contiguous();
}

Tensors<2> moe_router_calls(const at::Tensor& logits, const std::optional<at::Tensor>& expert_ids,
                            int64_t top_k, bool normalized) {
  const at::Tensor probabilities = probabilities_of(logits);
  Tensors<2> chosen;
  if (expert_ids) {
    chosen = {probabilities.gather(1, *expert_ids), expert_ids->clone()};
  } else {
    chosen = (use_cpu_loops(logits) ? chosen_by_loop : chosen_by_calls)(probabilities, top_k);
  }
  auto& [weights, ids] = chosen;
  if (normalized) weights = weights / weights.sum(1, /*keepdim=*/true);
  return {weights.contiguous(), ids.contiguous()};
}

// torch's loop for the CPU rounds otherwise where one thread runs it than where several do, for 9
// to 63 experts that are not a multiple of 8 (torch 2.13, AVX2). Called by each thread for rows of
// its own, it takes itself for the only one. It finishes a row before it writes it.
void softmax_backward_(const at::Tensor& grad, const at::Tensor& probabilities) {
  at::parallel_for(0, grad.size(0), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // in this thread
    at::Tensor rows = grad.narrow(0, begin, end - begin);
    at::_softmax_backward_data_out(rows, rows, probabilities.narrow(0, begin, end - begin), 1,
                                   probabilities.scalar_type());
  });
}

// The calls and the order of terms are autograd's.
at::Tensor moe_router_backward_loop(const at::Tensor& grad_weights, const at::Tensor& logits,
                                    const at::Tensor& ids, bool normalized) {
  const at::Tensor probabilities = probabilities_of(logits);
  at::Tensor grad = grad_weights;
  if (normalized) {
    const at::Tensor chosen = probabilities.gather(1, ids), total = chosen.sum(1, true);
    const at::Tensor grad_total = (-grad * ((chosen / total).div_(total))).sum(1, true);
    grad = (grad / total).add_(grad_total);
  }
  grad = at::zeros_like(probabilities).scatter_add_(1, ids, grad);
  softmax_backward_(grad, probabilities);
  return grad.to(logits.scalar_type());
}

// Normalized weights are a softmax over the chosen logits alone.
at::Tensor moe_router_backward_calls(const at::Tensor& grad_weights, const at::Tensor& logits,
                                     const at::Tensor& ids, bool normalized) {
  const at::Tensor scored = normalized ? logits.gather(1, ids) : logits;
  const at::Tensor probabilities = probabilities_of(scored);
  at::Tensor grad = grad_weights;
  const auto scatter = [&] {
    grad = at::zeros(logits.sizes(), grad.options()).scatter_add_(1, ids, grad);
  };
  if (!normalized) scatter();
  grad = at::_softmax_backward_data(grad, probabilities, 1, probabilities.scalar_type());
  if (normalized) scatter();
  return grad.to(logits.scalar_type());
}

Tensors<2> moe_router_cuda(const at::Tensor& logits_in, const std::optional<at::Tensor>& given,
                           int64_t top_k, bool normalized) {
  const at::Tensor logits = logits_in.contiguous();
  const at::Tensor given_ids = given ? given->contiguous() : at::Tensor();
  const int64_t tokens = logits.size(0);
  at::Tensor weights = at::empty({tokens, top_k}, logits.options().dtype(wide_type(logits)));
  at::Tensor ids = at::empty({tokens, top_k}, logits.options().dtype(at::kLong));
  if constexpr (kWithCudaKernels) {
    const RouterSizes sizes{tokens, logits.size(1), top_k, normalized};
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, logits.scalar_type(), "moe_router", [&] {
          router_on_cuda(sizes, logits.const_data_ptr<scalar_t>(),
                         given ? given_ids.const_data_ptr<int64_t>() : nullptr,
                         weights.mutable_data_ptr<wide_of<scalar_t>>(),
                         ids.mutable_data_ptr<int64_t>(), logits.get_device());
        });
  }
  return {weights, ids};
}

at::Tensor moe_router_backward_cuda(const at::Tensor& grad_in, const at::Tensor& logits_in,
                                    const at::Tensor& ids_in, bool normalized) {
  const at::Tensor grad = grad_in.contiguous(), logits = logits_in.contiguous();
  const at::Tensor ids = ids_in.contiguous();
  at::Tensor grad_logits = at::empty_like(logits);
  if constexpr (kWithCudaKernels) {
    const RouterSizes sizes{logits.size(0), logits.size(1), ids.size(1), normalized};
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, logits.scalar_type(), "moe_router_backward", [&] {
          router_backward_on_cuda(sizes, grad.const_data_ptr<wide_of<scalar_t>>(),
                                  logits.const_data_ptr<scalar_t>(), ids.const_data_ptr<int64_t>(),
                                  grad_logits.mutable_data_ptr<scalar_t>(), logits.get_device());
        });
  }
  return grad_logits;
}

Tensors<2> moe_router_kernel(const at::Tensor& logits, const std::optional<at::Tensor>& expert_ids,
                             int64_t top_k, bool normalized) {
  const char* op = "moe_router";
  check_logits(op, logits, top_k);
  if (expert_ids) check_expert_ids(op, *expert_ids, logits, top_k);
  return (use_cuda_kernel(logits) ? moe_router_cuda : moe_router_calls)(logits, expert_ids, top_k,
                                                                        normalized);
}

at::Tensor moe_router_backward_kernel(const at::Tensor& grad_weights, const at::Tensor& logits,
                                      const at::Tensor& expert_ids, bool normalized) {
  const char* op = "moe_router_backward";
  check_dim(op, "expert_ids", expert_ids, 2);
  const int64_t top_k = expert_ids.size(1);
  check_logits(op, logits, top_k);
  check_expert_ids(op, expert_ids, logits, top_k);
  check_shape(op, "grad_weights", grad_weights, expert_ids.sizes());
  check_wide_dtype(op, "grad_weights", grad_weights, "logits", logits);
  const auto kernel = use_cuda_kernel(logits) ? moe_router_backward_cuda
                      : use_cpu_loops(logits) ? moe_router_backward_loop
                                              : moe_router_backward_calls;
  return kernel(grad_weights, logits, expert_ids, normalized);
}

Tensors<2> moe_router_meta(const at::Tensor& logits, const std::optional<at::Tensor>&,
                           int64_t top_k) {
  const auto shape = {logits.sym_size(0), c10::SymInt(top_k)};
  return {at::empty_symint(shape, logits.options().dtype(wide_type(logits))),
          at::empty_symint(shape, logits.options().dtype(at::kLong))};
}

at::Tensor moe_router_backward_meta(const at::Tensor&, const at::Tensor& logits) {
  return at::empty_symint(logits.sym_sizes(), logits.options());
}

// Keeps the ids that came out, so that backward chooses nothing again; probabilities it computes.
struct MoeRouter : Gradient<MoeRouter, moe_router, Saved<0>, Saved<1>> {
  static variable_list rule(const ForwardCall<moe_router>& forward, const variable_list& grads) {
    const auto [logits, given, top_k, normalized] = forward.arguments();
    return forward.gradients(moe_router_backward(grads[0], logits, forward.output(1), normalized));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<moe_router>(library)
      .kernel<moe_router_kernel>()
      .meta<moe_router_meta>()
      .gradient<MoeRouter>();
  implement<moe_router_backward>(library)
      .kernel<moe_router_backward_kernel>()
      .meta<moe_router_backward_meta>();
}

}  // namespace parallel_ext
