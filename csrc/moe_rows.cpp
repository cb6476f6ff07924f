// Rows of a mixture of experts: copied to where their expert takes them, and summed up again.
// A slot is the place of a (token, choice) among all rows in expert order (moe_route.cpp).
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "dispatch.h"
#include "kernel_choice.h"
#include "number.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kTokensPerTask = 16;

// Every row is the place of exactly one choice; else rows would stay uninitialised or be lost.
void check_slots(const char* op, const at::Tensor& slots) {
  check_int64(op, "slots", slots);
  check_dim(op, "slots", slots, 2);
  if (!slots.is_cpu()) return;
  const at::Tensor contiguous = slots.contiguous();
  const int64_t* slot = contiguous.const_data_ptr<int64_t>();
  std::vector<bool> taken(contiguous.numel(), false);
  for (int64_t i = 0; i < contiguous.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= slot[i] && slot[i] < contiguous.numel() && !taken[slot[i]], op,
                      ": slot ", slot[i], " of token ", i / slots.size(1),
                      " is taken already or outside of [0, ", contiguous.numel(),
                      "); slots are a permutation, as moe_route_plan makes it");
    taken[slot[i]] = true;
  }
}

void check_dispatch(const at::Tensor& input, const at::Tensor& slots) {
  const char* op = "moe_dispatch";
  check_floating(op, "input", input);
  check_dim(op, "input", input, 2);
  check_slots(op, slots);
  TORCH_CHECK_VALUE(slots.size(0) == input.size(0), op, ": slots of shape ", slots.sizes(),
                    " are not for the ", input.size(0), " tokens of the input");
}

void check_combine(const at::Tensor& rows, const at::Tensor& slots,
                   const std::optional<at::Tensor>& weights) {
  const char* op = "moe_combine";
  check_floating(op, "rows", rows);
  check_dim(op, "rows", rows, 2);
  check_slots(op, slots);
  TORCH_CHECK_VALUE(rows.size(0) == slots.numel(), op, ": ", rows.size(0), " rows do not fit the ",
                    slots.numel(), " slots");
  if (!weights) return;
  check_floating(op, "weights", *weights);
  TORCH_CHECK_VALUE(weights->sizes() == slots.sizes(), op, ": weights of shape ", weights->sizes(),
                    " do not fit slots of shape ", slots.sizes());
}

// Dispatch: each source row is read once and written to its top_k places; rows are bytes here.

at::Tensor moe_dispatch_cpu(const at::Tensor& input_in, const at::Tensor& slots_in) {
  check_dispatch(input_in, slots_in);
  const at::Tensor input = input_in.contiguous(), slots = slots_in.contiguous();
  const int64_t top_k = slots.size(1);
  at::Tensor output = at::empty({slots.numel(), input.size(1)}, input.options());
  const size_t row_bytes = input.size(1) * input.element_size();
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const auto* in = static_cast<const char*>(input.const_data_ptr());
  auto* out = static_cast<char*>(output.mutable_data_ptr());
  at::parallel_for(
      0, row_bytes == 0 ? 0 : input.size(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice)
            std::memcpy(out + slot[choice] * row_bytes, in + token * row_bytes, row_bytes);
        }
      });
  return output;
}

at::Tensor moe_dispatch_aten(const at::Tensor& input, const at::Tensor& slots) {
  check_dispatch(input, slots);
  at::Tensor output = at::empty({slots.numel(), input.size(1)}, input.options());
  const at::Tensor rows =
      input.unsqueeze(1).expand({slots.size(0), slots.size(1), input.size(1)}).flatten(0, 1);
  return output.index_copy_(0, slots.flatten(), rows);
}

// Combine: sums in fp32 (or fp64) in the order of the choices, and rounds once.

// total += weight * row
#define PARALLEL_EXT_MOE_LOOPS(scalar_t, wide_t)                                               \
  PARALLEL_EXT_MULTIVERSION void add_row(const scalar_t* row, wide_t weight, int64_t size,     \
                                         wide_t* total) {                                      \
    for (int64_t i = 0; i < size; ++i) total[i] += weight * widen(row[i]);                     \
  }                                                                                            \
  PARALLEL_EXT_MULTIVERSION void store_row(const wide_t* total, int64_t size, scalar_t* out) { \
    for (int64_t i = 0; i < size; ++i) store(total[i], out + i);                               \
  }                                                                                            \
  /* out = weight * grad, and the sum of grad * row in 16 parts whose order is fixed */        \
  PARALLEL_EXT_MULTIVERSION wide_t scale_and_dot(const scalar_t* grad, const scalar_t* row,    \
                                                 wide_t weight, int64_t size, scalar_t* out) { \
    constexpr int64_t kLanes = 16;                                                             \
    wide_t lane[kLanes] = {};                                                                  \
    const int64_t whole = size / kLanes * kLanes;                                              \
    for (int64_t i = 0; i < whole; i += kLanes) {                                              \
      for (int64_t j = 0; j < kLanes; ++j) {                                                   \
        const wide_t g = widen(grad[i + j]);                                                   \
        lane[j] += g * widen(row[i + j]);                                                      \
        store(weight * g, out + i + j);                                                        \
      }                                                                                        \
    }                                                                                          \
    for (int64_t i = whole; i < size; ++i) {                                                   \
      const wide_t g = widen(grad[i]);                                                         \
      lane[i - whole] += g * widen(row[i]);                                                    \
      store(weight * g, out + i);                                                              \
    }                                                                                          \
    wide_t sum = 0;                                                                            \
    for (int64_t j = 0; j < kLanes; ++j) sum += lane[j];                                       \
    return sum;                                                                                \
  }

PARALLEL_EXT_MOE_LOOPS(float, float)
PARALLEL_EXT_MOE_LOOPS(c10::BFloat16, float)
PARALLEL_EXT_MOE_LOOPS(c10::Half, float)
PARALLEL_EXT_MOE_LOOPS(double, double)

template <typename scalar_t>
using wide_of = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// The weights as the loops read them; ones where there are none.
template <typename wide_t>
std::vector<wide_t> wide_weights(const std::optional<at::Tensor>& weights, int64_t size) {
  if (!weights) return std::vector<wide_t>(size, wide_t(1));
  const at::Tensor wide = weights->to(c10::CppTypeToScalarType<wide_t>::value).contiguous();
  const auto* data = wide.template const_data_ptr<wide_t>();
  return {data, data + size};
}

at::Tensor moe_combine_cpu(const at::Tensor& rows_in, const at::Tensor& slots_in,
                           const std::optional<at::Tensor>& weights) {
  check_combine(rows_in, slots_in, weights);
  const at::Tensor rows = rows_in.contiguous(), slots = slots_in.contiguous();
  const int64_t top_k = slots.size(1), hidden = rows.size(1);
  at::Tensor output = at::empty({slots.size(0), hidden}, rows.options());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, rows.scalar_type(), "moe_combine", [&] {
    using wide_t = wide_of<scalar_t>;
    const auto weight = wide_weights<wide_t>(weights, slots.numel());
    const auto* in = rows.const_data_ptr<scalar_t>();
    auto* out = output.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, slots.size(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
      std::vector<wide_t> total(hidden);
      for (int64_t token = begin; token < end; ++token) {
        std::fill(total.begin(), total.end(), wide_t(0));
        for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice)
          add_row(in + slot[choice] * hidden, weight[choice], hidden, total.data());
        store_row(total.data(), hidden, out + token * hidden);
      }
    });
  });
  return output;
}

at::Tensor moe_combine_aten(const at::Tensor& rows, const at::Tensor& slots,
                            const std::optional<at::Tensor>& weights) {
  check_combine(rows, slots, weights);
  const auto wide = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor chosen = rows.index_select(0, slots.flatten())
                          .view({slots.size(0), slots.size(1), rows.size(1)})
                          .to(wide);
  if (weights) chosen = chosen * weights->to(wide).unsqueeze(-1);
  return chosen.sum(1).to(rows.scalar_type());
}

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

TwoTensors moe_combine_backward_cpu(const at::Tensor& grad_output_in, const at::Tensor& rows_in,
                                    const at::Tensor& slots_in, const at::Tensor& weights) {
  const at::Tensor grad_output = grad_output_in.contiguous(), rows = rows_in.contiguous();
  const at::Tensor slots = slots_in.contiguous();
  const int64_t top_k = slots.size(1), hidden = rows.size(1);
  at::Tensor grad_rows = at::empty_like(rows), grad_weights;
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kBFloat16, at::kHalf, rows.scalar_type(), "moe_combine_backward", [&] {
        using wide_t = wide_of<scalar_t>;
        const auto weight = wide_weights<wide_t>(weights, slots.numel());
        at::Tensor dots =
            at::empty(slots.sizes(), rows.options().dtype(c10::CppTypeToScalarType<wide_t>::value));
        auto* dot = dots.mutable_data_ptr<wide_t>();
        const auto* grad = grad_output.const_data_ptr<scalar_t>();
        const auto* in = rows.const_data_ptr<scalar_t>();
        auto* out = grad_rows.mutable_data_ptr<scalar_t>();
        at::parallel_for(0, slots.size(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
          for (int64_t choice = begin * top_k; choice < end * top_k; ++choice) {
            const int64_t row = slot[choice] * hidden;
            dot[choice] = scale_and_dot(grad + choice / top_k * hidden, in + row, weight[choice],
                                        hidden, out + row);
          }
        });
        grad_weights = dots.to(weights.scalar_type());
      });
  return {grad_rows, grad_weights};
}

TwoTensors moe_combine_backward_aten(const at::Tensor& grad_output, const at::Tensor& rows,
                                     const at::Tensor& slots, const at::Tensor& weights) {
  const auto wide = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor grad = grad_output.to(wide).unsqueeze(1);  // [T, 1, H]
  const at::Tensor chosen = rows.index_select(0, slots.flatten())
                                .view({slots.size(0), slots.size(1), rows.size(1)})
                                .to(wide);
  const at::Tensor scaled = (grad * weights.to(wide).unsqueeze(-1)).to(rows.scalar_type());
  at::Tensor grad_rows = at::empty(rows.sizes(), rows.options());
  grad_rows.index_copy_(0, slots.flatten(), scaled.flatten(0, 1));
  return {grad_rows, (chosen * grad).sum(-1).to(weights.scalar_type())};
}

at::Tensor moe_dispatch_cpu_or_aten(const at::Tensor& input, const at::Tensor& slots) {
  return (aten_path_on_cpu() ? moe_dispatch_aten : moe_dispatch_cpu)(input, slots);
}

at::Tensor moe_combine_cpu_or_aten(const at::Tensor& rows, const at::Tensor& slots,
                                   const std::optional<at::Tensor>& weights) {
  return (aten_path_on_cpu() ? moe_combine_aten : moe_combine_cpu)(rows, slots, weights);
}

TwoTensors moe_combine_backward_cpu_or_aten(const at::Tensor& grad_output, const at::Tensor& rows,
                                            const at::Tensor& slots, const at::Tensor& weights) {
  return (aten_path_on_cpu() ? moe_combine_backward_aten : moe_combine_backward_cpu)(
      grad_output, rows, slots, weights);
}

at::Tensor moe_dispatch_meta(const at::Tensor& input, const at::Tensor& slots) {
  return at::empty_symint({slots.sym_numel(), input.sym_size(1)}, input.options());
}

at::Tensor moe_combine_meta(const at::Tensor& rows, const at::Tensor& slots,
                            const std::optional<at::Tensor>&) {
  return at::empty_symint({slots.sym_size(0), rows.sym_size(1)}, rows.options());
}

TwoTensors moe_combine_backward_meta(const at::Tensor&, const at::Tensor& rows,
                                     const at::Tensor& slots, const at::Tensor& weights) {
  return {at::empty_symint(rows.sym_sizes(), rows.options()),
          at::empty_symint(slots.sym_sizes(), weights.options())};
}

// Autograd: each is the other's backward.

class MoeDispatch : public torch::autograd::Function<MoeDispatch> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const at::Tensor& slots) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({slots});
    return moe_dispatch(input, slots);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    return {moe_combine(grad_outputs[0], ctx->get_saved_variables()[0], std::nullopt), Variable()};
  }
};

class MoeCombine : public torch::autograd::Function<MoeCombine> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& slots,
                            const std::optional<at::Tensor>& weights) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (weights) {
      ctx->save_for_backward({slots, rows, *weights});
    } else {
      ctx->save_for_backward({slots});
    }
    return moe_combine(rows, slots, weights);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    if (saved.size() == 1) return {moe_dispatch(grad_outputs[0], saved[0]), Variable(), Variable()};
    auto [grad_rows, grad_weights] =
        moe_combine_backward(grad_outputs[0], saved[1], saved[0], saved[2]);
    return {grad_rows, Variable(), grad_weights};
  }
};

at::Tensor moe_dispatch_autograd(const at::Tensor& input, const at::Tensor& slots) {
  return MoeDispatch::apply(input, slots);
}

at::Tensor moe_combine_autograd(const at::Tensor& rows, const at::Tensor& slots,
                                const std::optional<at::Tensor>& weights) {
  return MoeCombine::apply(rows, slots, weights);
}

TwoTensors moe_combine_backward_autograd(const at::Tensor& grad_output, const at::Tensor& rows,
                                         const at::Tensor& slots, const at::Tensor& weights) {
  refuse_second_derivative("moe_combine", {grad_output, rows, weights});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return moe_combine_backward(grad_output, rows, slots, weights);
}

}  // namespace

at::Tensor moe_dispatch(const at::Tensor& input, const at::Tensor& slots) {
  static auto op = op_handle<decltype(moe_dispatch)>("parallel_ext::moe_dispatch");
  return op.call(input, slots);
}

at::Tensor moe_combine(const at::Tensor& rows, const at::Tensor& slots,
                       const std::optional<at::Tensor>& weights) {
  static auto op = op_handle<decltype(moe_combine)>("parallel_ext::moe_combine");
  return op.call(rows, slots, weights);
}

std::tuple<at::Tensor, at::Tensor> moe_combine_backward(const at::Tensor& grad_output,
                                                        const at::Tensor& rows,
                                                        const at::Tensor& slots,
                                                        const at::Tensor& weights) {
  static auto op = op_handle<decltype(moe_combine_backward)>("parallel_ext::moe_combine_backward");
  return op.call(grad_output, rows, slots, weights);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_dispatch", moe_dispatch_aten);
  m.impl("moe_combine", moe_combine_aten);
  m.impl("moe_combine_backward", moe_combine_backward_aten);
}

TORCH_LIBRARY_IMPL(parallel_ext, CPU, m) {
  m.impl("moe_dispatch", moe_dispatch_cpu_or_aten);
  m.impl("moe_combine", moe_combine_cpu_or_aten);
  m.impl("moe_combine_backward", moe_combine_backward_cpu_or_aten);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("moe_dispatch", moe_dispatch_meta);
  m.impl("moe_combine", moe_combine_meta);
  m.impl("moe_combine_backward", moe_combine_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("moe_dispatch", moe_dispatch_autograd);
  m.impl("moe_combine", moe_combine_autograd);
  m.impl("moe_combine_backward", moe_combine_backward_autograd);
}

}  // namespace parallel_ext
