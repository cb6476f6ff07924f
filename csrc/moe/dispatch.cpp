// Tokens go to the ranks of their experts, and what the experts made of them comes back: each is
// the other's backward.
#include "dispatch.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "check.h"
#include "moe/exchange.h"
#include "ops.h"

namespace parallel_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_length(const char* op, const char* name, const at::Tensor& tensor, int64_t length,
                  const char* what) {
  check_int64(op, name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == length, op, ": ", name, " of shape ",
                    tensor.sizes(), " are not one for each of the ", length, " ", what);
}

// The loops follow these maps without looking.
void check_inside(const char* op, const char* name, const at::Tensor& map, int64_t length,
                  int64_t end) {
  if (!map.is_cpu()) return;
  const at::Tensor whole = map.contiguous();
  const int64_t* value = whole.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < length; ++i) {
    TORCH_CHECK_INDEX(0 <= value[i] && value[i] < end, op, ": ", name, " has ", value[i], " at ", i,
                      ", outside of [0, ", end, "); pass it as moe_route_plan makes it");
  }
}

void check_rows_of_choices(const char* op, const at::Tensor& rows_of_choices,
                           const ExchangePlan& plan) {
  check_int64(op, "rows_of_choices", rows_of_choices);
  check_dim(op, "rows_of_choices", rows_of_choices, 2);
  TORCH_CHECK_VALUE(rows_of_choices.numel() == plan.num_slots(), op, ": the counts to send are of ",
                    plan.num_slots(), " choices, but rows_of_choices has the shape ",
                    rows_of_choices.sizes());
  check_inside(op, "rows_of_choices", rows_of_choices, plan.num_slots(), plan.num_rows());
}

void check_tokens(const char* op, const at::Tensor& tokens, int64_t num_tokens,
                  const ExchangePlan& plan) {
  check_length(op, "tokens", tokens, plan.num_slots(), "choices");
  check_inside(op, "tokens", tokens, plan.num_rows(), num_tokens);
}

void check_maps(const char* op, const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                const ExchangePlan& plan) {
  check_rows_of_choices(op, rows_of_choices, plan);
  check_tokens(op, tokens, rows_of_choices.size(0), plan);
}

// As the loops need it: of each rank the rows in the order of their first slots, none left out.
void check_origins(const char* op, const at::Tensor& origins, const ExchangePlan& plan) {
  check_length(op, "origins", origins, plan.num_places(), "rows");
  if (!origins.is_cpu()) return;
  const at::Tensor whole = origins.contiguous();
  const int64_t* value = whole.const_data_ptr<int64_t>();
  int64_t next = 0;
  for (int64_t peer = 0; peer < plan.group_size; ++peer) {
    const int64_t first = next, end = first + plan.receive_rows[peer];
    for (const int64_t place : plan.places[peer]) {
      const int64_t row = value[place];
      TORCH_CHECK_INDEX(first <= row && row <= next && row < end, op, ": origins has ", row, " at ",
                        place, " where rank ", peer, " has sent [", first, ", ", end,
                        "); pass them as moe_dispatch returns them");
      next += row == next;
    }
    TORCH_CHECK_INDEX(next == end, op, ": origins leave out row ", next, " of rank ", peer);
  }
}

void check_dispatch(const at::Tensor& input, const at::Tensor& weights, const Route& route,
                    const ExchangePlan& plan) {
  const char* op = "moe_dispatch";
  check_floating(op, "input", input);
  check_dim(op, "input", input, 2);
  check_floating(op, "weights", weights);
  check_maps(op, route.rows_of_choices, route.tokens, plan);
  const at::Tensor& choices = route.rows_of_choices;
  TORCH_CHECK_VALUE(choices.size(0) == input.size(0) && weights.sizes() == choices.sizes(), op,
                    ": input of shape ", input.sizes(), ", weights of shape ", weights.sizes(),
                    " and rows_of_choices of shape ", choices.sizes(),
                    " are not of the same tokens and choices");
  check_length(op, "sources", route.sources, plan.num_slots(), "choices");
  check_inside(op, "sources", route.sources, plan.num_slots(), plan.num_slots());
}

// Kernels; on the CPU loops, elsewhere ATen (moe/exchange.h).

ThreeTensors moe_dispatch_kernel(const at::Tensor& input, const at::Tensor& weights,
                                 const at::Tensor& rows_of_choices, const at::Tensor& sources,
                                 const at::Tensor& tokens, at::IntArrayRef send,
                                 at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                 int64_t rank, int64_t group_size, const std::string& group_name) {
  const auto plan = ExchangePlan::of("moe_dispatch", send, receive, experts_per_rank, rank,
                                     group_size, group_name);
  const Route route{rows_of_choices.contiguous(), sources.contiguous(), tokens.contiguous()};
  check_dispatch(input, weights, route, plan);
  const at::Tensor of_slots = weights.to(wide_type(input)).flatten().index_select(0, sources);
  AtExperts there = bring_to_experts("moe_dispatch", input.contiguous(), of_slots, route, plan);
  return {there.rows, there.weights, there.origins};
}

TwoTensors moe_dispatch_backward_kernel(const at::Tensor& grad_rows, const at::Tensor& grad_weights,
                                        const at::Tensor& rows_of_choices,
                                        const at::Tensor& sources, const at::Tensor& origins,
                                        at::ScalarType weights_dtype, std::array<bool, 2> needed,
                                        at::IntArrayRef send, at::IntArrayRef receive,
                                        at::IntArrayRef experts_per_rank, int64_t rank,
                                        int64_t group_size, const std::string& group_name) {
  const char* op = "moe_dispatch_backward";
  check_floating(op, "grad_rows", grad_rows);
  check_dim(op, "grad_rows", grad_rows, 2);
  const auto plan = ExchangePlan::of(op, send, receive, experts_per_rank, rank, group_size,
                                     group_name, grad_rows.size(0));
  check_shape(op, "grad_weights", grad_weights, {grad_rows.size(0)});
  TORCH_CHECK_TYPE(grad_weights.scalar_type() == wide_type(grad_rows), op,
                   ": grad_weights must be ", wide_type(grad_rows), " for grad_rows in ",
                   grad_rows.scalar_type(), ", got ", grad_weights.scalar_type());
  check_origins(op, origins, plan);
  check_rows_of_choices(op, rows_of_choices, plan);
  check_length(op, "sources", sources, plan.num_slots(), "choices");
  std::optional<at::Tensor> weights;
  if (needed[1]) weights = grad_weights.contiguous();
  const AtTokens here = bring_back(op, grad_rows.contiguous(), weights, origins.contiguous(),
                                   rows_of_choices.contiguous(), plan);
  at::Tensor of_choices = at::empty({0}, grad_rows.options().dtype(weights_dtype));
  if (needed[1]) {
    of_choices = at::empty({rows_of_choices.numel()}, here.weights.options())
                     .index_copy_(0, sources, here.weights)
                     .view(rows_of_choices.sizes())
                     .to(weights_dtype);
  }
  return {here.sums, of_choices};
}

at::Tensor moe_combine_kernel(const at::Tensor& rows, const at::Tensor& origins,
                              const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                              at::IntArrayRef send, at::IntArrayRef receive,
                              at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                              const std::string& group_name) {
  const char* op = "moe_combine";
  check_floating(op, "rows", rows);
  check_dim(op, "rows", rows, 2);
  const auto plan = ExchangePlan::of(op, send, receive, experts_per_rank, rank, group_size,
                                     group_name, rows.size(0));
  check_origins(op, origins, plan);
  check_maps(op, rows_of_choices, tokens, plan);
  return bring_back(op, rows.contiguous(), {}, origins.contiguous(), rows_of_choices.contiguous(),
                    plan)
      .sums;
}

at::Tensor moe_combine_backward_kernel(const at::Tensor& grad_output, const at::Tensor& origins,
                                       const at::Tensor& tokens, at::IntArrayRef send,
                                       at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                       int64_t rank, int64_t group_size,
                                       const std::string& group_name) {
  const char* op = "moe_combine_backward";
  check_floating(op, "grad_output", grad_output);
  check_dim(op, "grad_output", grad_output, 2);
  const auto plan = ExchangePlan::of(op, send, receive, experts_per_rank, rank, group_size,
                                     group_name, origins.numel());
  check_origins(op, origins, plan);
  check_tokens(op, tokens, grad_output.size(0), plan);
  return bring_to_experts_again(op, grad_output.contiguous(), tokens.contiguous(),
                                origins.contiguous(), plan);
}

// Meta: only shapes and dtypes.

ThreeTensors moe_dispatch_meta(const at::Tensor& input, const at::Tensor&, const at::Tensor&,
                               const at::Tensor& sources, const at::Tensor&, at::IntArrayRef send,
                               at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                               int64_t rank, int64_t group_size, const std::string& group_name) {
  const int64_t places = ExchangePlan::of("moe_dispatch", send, receive, experts_per_rank, rank,
                                          group_size, group_name)
                             .num_places();
  return {at::empty_symint({places, input.sym_size(1)}, input.options()),
          at::empty({places}, input.options().dtype(wide_type(input))),
          at::empty({places}, sources.options())};
}

TwoTensors moe_dispatch_backward_meta(const at::Tensor& grad_rows, const at::Tensor&,
                                      const at::Tensor& rows_of_choices, const at::Tensor&,
                                      const at::Tensor&, at::ScalarType weights_dtype,
                                      std::array<bool, 2> needed, at::IntArrayRef, at::IntArrayRef,
                                      at::IntArrayRef, int64_t, int64_t, const std::string&) {
  const auto options = grad_rows.options();
  return {at::empty_symint({rows_of_choices.sym_size(0), grad_rows.sym_size(1)}, options),
          needed[1] ? at::empty_symint(rows_of_choices.sym_sizes(), options.dtype(weights_dtype))
                    : at::empty({0}, options.dtype(weights_dtype))};
}

at::Tensor moe_combine_meta(const at::Tensor& rows, const at::Tensor&,
                            const at::Tensor& rows_of_choices, const at::Tensor&, at::IntArrayRef,
                            at::IntArrayRef, at::IntArrayRef, int64_t, int64_t,
                            const std::string&) {
  return at::empty_symint({rows_of_choices.sym_size(0), rows.sym_size(1)}, rows.options());
}

at::Tensor moe_combine_backward_meta(const at::Tensor& grad_output, const at::Tensor& origins,
                                     const at::Tensor&, at::IntArrayRef, at::IntArrayRef,
                                     at::IntArrayRef, int64_t, int64_t, const std::string&) {
  return at::empty_symint({origins.sym_size(0), grad_output.sym_size(1)}, grad_output.options());
}

// Autograd: the gradients travel the other way, by the plan of the forward.

// The arguments of a plan, from forward to backward.
void save_plan(AutogradContext* ctx, at::IntArrayRef send, at::IntArrayRef receive,
               at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
               const std::string& group_name) {
  ctx->saved_data["send"] = send.vec();
  ctx->saved_data["receive"] = receive.vec();
  ctx->saved_data["experts_per_rank"] = experts_per_rank.vec();
  ctx->saved_data["rank"] = rank;
  ctx->saved_data["group_size"] = group_size;
  ctx->saved_data["group_name"] = group_name;
}

struct SavedPlan {
  explicit SavedPlan(AutogradContext* ctx)
      : send(ctx->saved_data["send"].toIntVector()),
        receive(ctx->saved_data["receive"].toIntVector()),
        experts_per_rank(ctx->saved_data["experts_per_rank"].toIntVector()),
        rank(ctx->saved_data["rank"].toInt()),
        group_size(ctx->saved_data["group_size"].toInt()),
        group_name(ctx->saved_data["group_name"].toStringRef()) {}

  std::vector<int64_t> send, receive, experts_per_rank;
  int64_t rank, group_size;
  std::string group_name;
};

class MoeDispatch : public torch::autograd::Function<MoeDispatch> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& input,
                               const at::Tensor& weights, const at::Tensor& rows_of_choices,
                               const at::Tensor& sources, const at::Tensor& tokens,
                               at::IntArrayRef send, at::IntArrayRef receive,
                               at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                               const std::string& group_name) {
    save_plan(ctx, send, receive, experts_per_rank, rank, group_size, group_name);
    ctx->saved_data["weights_dtype"] = weights.scalar_type();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [rows, row_weights, origins] =
        moe_dispatch(input, weights, rows_of_choices, sources, tokens, send, receive,
                     experts_per_rank, rank, group_size, group_name);
    ctx->save_for_backward({rows_of_choices, sources, origins});
    ctx->mark_non_differentiable({origins});
    return {rows, row_weights, origins};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const SavedPlan plan(ctx);
    const std::array<bool, 2> needed{ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    auto [grad_input, grad_weights] = moe_dispatch_backward(
        grad_outputs[0], grad_outputs[1], saved[0], saved[1], saved[2],
        ctx->saved_data["weights_dtype"].toScalarType(), needed, plan.send, plan.receive,
        plan.experts_per_rank, plan.rank, plan.group_size, plan.group_name);
    variable_list gradients(11);
    if (needed[0]) gradients[0] = grad_input;
    if (needed[1]) gradients[1] = grad_weights;
    return gradients;
  }
};

class MoeCombine : public torch::autograd::Function<MoeCombine> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& origins,
                            const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                            at::IntArrayRef send, at::IntArrayRef receive,
                            at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                            const std::string& group_name) {
    save_plan(ctx, send, receive, experts_per_rank, rank, group_size, group_name);
    ctx->save_for_backward({origins, tokens});
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return moe_combine(rows, origins, rows_of_choices, tokens, send, receive, experts_per_rank,
                       rank, group_size, group_name);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const SavedPlan plan(ctx);
    variable_list gradients(10);
    gradients[0] =
        moe_combine_backward(grad_outputs[0], saved[0], saved[1], plan.send, plan.receive,
                             plan.experts_per_rank, plan.rank, plan.group_size, plan.group_name);
    return gradients;
  }
};

ThreeTensors moe_dispatch_autograd(const at::Tensor& input, const at::Tensor& weights,
                                   const at::Tensor& rows_of_choices, const at::Tensor& sources,
                                   const at::Tensor& tokens, at::IntArrayRef send,
                                   at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                   int64_t rank, int64_t group_size,
                                   const std::string& group_name) {
  const variable_list out =
      MoeDispatch::apply(input, weights, rows_of_choices, sources, tokens, send, receive,
                         experts_per_rank, rank, group_size, group_name);
  return {out[0], out[1], out[2]};
}

at::Tensor moe_combine_autograd(const at::Tensor& rows, const at::Tensor& origins,
                                const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                                at::IntArrayRef send, at::IntArrayRef receive,
                                at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                                const std::string& group_name) {
  return MoeCombine::apply(rows, origins, rows_of_choices, tokens, send, receive, experts_per_rank,
                           rank, group_size, group_name);
}

TwoTensors moe_dispatch_backward_autograd(const at::Tensor& grad_rows,
                                          const at::Tensor& grad_weights,
                                          const at::Tensor& rows_of_choices,
                                          const at::Tensor& sources, const at::Tensor& origins,
                                          at::ScalarType weights_dtype, std::array<bool, 2> needed,
                                          at::IntArrayRef send, at::IntArrayRef receive,
                                          at::IntArrayRef experts_per_rank, int64_t rank,
                                          int64_t group_size, const std::string& group_name) {
  refuse_second_derivative("moe_dispatch", {grad_rows, grad_weights});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return moe_dispatch_backward(grad_rows, grad_weights, rows_of_choices, sources, origins,
                               weights_dtype, needed, send, receive, experts_per_rank, rank,
                               group_size, group_name);
}

at::Tensor moe_combine_backward_autograd(const at::Tensor& grad_output, const at::Tensor& origins,
                                         const at::Tensor& tokens, at::IntArrayRef send,
                                         at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                         int64_t rank, int64_t group_size,
                                         const std::string& group_name) {
  refuse_second_derivative("moe_combine", {grad_output});
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return moe_combine_backward(grad_output, origins, tokens, send, receive, experts_per_rank, rank,
                              group_size, group_name);
}

}  // namespace

ThreeTensors moe_dispatch(const at::Tensor& input, const at::Tensor& weights,
                          const at::Tensor& rows_of_choices, const at::Tensor& sources,
                          const at::Tensor& tokens, at::IntArrayRef send, at::IntArrayRef receive,
                          at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                          const std::string& group_name) {
  static auto op = op_handle<decltype(moe_dispatch)>("parallel_ext::moe_dispatch");
  return op.call(input, weights, rows_of_choices, sources, tokens, send, receive, experts_per_rank,
                 rank, group_size, group_name);
}

TwoTensors moe_dispatch_backward(const at::Tensor& grad_rows, const at::Tensor& grad_weights,
                                 const at::Tensor& rows_of_choices, const at::Tensor& sources,
                                 const at::Tensor& origins, at::ScalarType weights_dtype,
                                 std::array<bool, 2> needed, at::IntArrayRef send,
                                 at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                 int64_t rank, int64_t group_size, const std::string& group_name) {
  static auto op =
      op_handle<decltype(moe_dispatch_backward)>("parallel_ext::moe_dispatch_backward");
  return op.call(grad_rows, grad_weights, rows_of_choices, sources, origins, weights_dtype, needed,
                 send, receive, experts_per_rank, rank, group_size, group_name);
}

at::Tensor moe_combine(const at::Tensor& rows, const at::Tensor& origins,
                       const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                       at::IntArrayRef send, at::IntArrayRef receive,
                       at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                       const std::string& group_name) {
  static auto op = op_handle<decltype(moe_combine)>("parallel_ext::moe_combine");
  return op.call(rows, origins, rows_of_choices, tokens, send, receive, experts_per_rank, rank,
                 group_size, group_name);
}

at::Tensor moe_combine_backward(const at::Tensor& grad_output, const at::Tensor& origins,
                                const at::Tensor& tokens, at::IntArrayRef send,
                                at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
                                int64_t rank, int64_t group_size, const std::string& group_name) {
  static auto op = op_handle<decltype(moe_combine_backward)>("parallel_ext::moe_combine_backward");
  return op.call(grad_output, origins, tokens, send, receive, experts_per_rank, rank, group_size,
                 group_name);
}

TORCH_LIBRARY_IMPL(parallel_ext, CompositeExplicitAutograd, m) {
  m.impl("moe_dispatch", moe_dispatch_kernel);
  m.impl("moe_dispatch_backward", moe_dispatch_backward_kernel);
  m.impl("moe_combine", moe_combine_kernel);
  m.impl("moe_combine_backward", moe_combine_backward_kernel);
}

TORCH_LIBRARY_IMPL(parallel_ext, Meta, m) {
  m.impl("moe_dispatch", moe_dispatch_meta);
  m.impl("moe_dispatch_backward", moe_dispatch_backward_meta);
  m.impl("moe_combine", moe_combine_meta);
  m.impl("moe_combine_backward", moe_combine_backward_meta);
}

TORCH_LIBRARY_IMPL(parallel_ext, Autograd, m) {
  m.impl("moe_dispatch", moe_dispatch_autograd);
  m.impl("moe_dispatch_backward", moe_dispatch_backward_autograd);
  m.impl("moe_combine", moe_combine_autograd);
  m.impl("moe_combine_backward", moe_combine_backward_autograd);
}

}  // namespace parallel_ext
