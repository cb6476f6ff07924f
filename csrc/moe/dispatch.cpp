// Dispatch sends the rows of tokens to the ranks of their experts, and combine brings the outputs
// of the experts back. Each is the backward of the other.
#include <ATen/ops/empty.h>

#include "base/empty.h"
#include "check.h"
#include "gradient.h"
#include "moe/exchange.h"
#include "moe/ops.h"

namespace parallel_ext {
namespace {

void check_length(const char* op, const char* name, const at::Tensor& tensor, int64_t length,
                  const char* what) {
  check_int64(op, name, tensor);
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.size(0) == length, op, ": ", name, " of shape ",
                    tensor.sizes(), " are not one for each of the ", length, " ", what);
}

// The loops use these indices without a check of their own.
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
                           const ExchangeLayout& layout) {
  check_int64(op, "rows_of_choices", rows_of_choices);
  check_dim(op, "rows_of_choices", rows_of_choices, 2);
  TORCH_CHECK_VALUE(rows_of_choices.numel() == layout.num_slots(), op,
                    ": the counts to send are of ", layout.num_slots(),
                    " choices, but rows_of_choices has the shape ", rows_of_choices.sizes());
  check_inside(op, "rows_of_choices", rows_of_choices, layout.num_slots(), layout.num_rows());
}

void check_tokens(const char* op, const at::Tensor& tokens, int64_t num_tokens,
                  const ExchangeLayout& layout) {
  check_length(op, "tokens", tokens, layout.num_slots(), "choices");
  check_inside(op, "tokens", tokens, layout.num_rows(), num_tokens);
}

void check_maps(const char* op, const at::Tensor& rows_of_choices, const at::Tensor& tokens,
                const ExchangeLayout& layout) {
  check_rows_of_choices(op, rows_of_choices, layout);
  check_tokens(op, tokens, rows_of_choices.size(0), layout);
}

// Checks what the loops rely on: the rows of each rank come in the order of their first slots, and
// none is left out.
void check_origins(const char* op, const at::Tensor& origins, const ExchangeLayout& layout) {
  check_length(op, "origins", origins, layout.num_places(), "rows");
  if (!origins.is_cpu()) return;
  const at::Tensor whole = origins.contiguous();
  const int64_t* value = whole.const_data_ptr<int64_t>();
  // Counted from the first row of a rank: of one number that runs through all ranks, -O2 of
  // g++ 13.3 makes a check that refuses right origins.
  int64_t first = 0;
  for (int64_t peer = 0; peer < layout.group.size; ++peer) {
    const int64_t sent = layout.receive_rows[peer];
    int64_t seen = 0;  // rows whose first slot has come
    for (const int64_t place : layout.places[peer]) {
      const int64_t row = value[place] - first;
      TORCH_CHECK_INDEX(0 <= row && row <= seen && row < sent, op, ": origins has ", value[place],
                        " at ", place, " where rank ", peer, " has sent [", first, ", ",
                        first + sent, "); pass them as moe_dispatch returns them");
      if (row == seen) ++seen;
    }
    TORCH_CHECK_INDEX(seen == sent, op, ": origins leave out row ", first + seen, " of rank ",
                      peer);
    first += sent;
  }
}

void check_dispatch(const at::Tensor& input, const at::Tensor& weights, const Route& route,
                    const ExchangeLayout& layout) {
  const char* op = "moe_dispatch";
  check_floating(op, "input", input);
  check_dim(op, "input", input, 2);
  check_floating(op, "weights", weights);
  check_maps(op, route.rows_of_choices, route.tokens, layout);
  const at::Tensor& choices = route.rows_of_choices;
  TORCH_CHECK_VALUE(choices.size(0) == input.size(0) && weights.sizes() == choices.sizes(), op,
                    ": input of shape ", input.sizes(), ", weights of shape ", weights.sizes(),
                    " and rows_of_choices of shape ", choices.sizes(),
                    " are not of the same tokens and choices");
  check_length(op, "sources", route.sources, layout.num_slots(), "choices");
  check_inside(op, "sources", route.sources, layout.num_slots(), layout.num_slots());
}

// Returns the layout of a plan for a kernel; a Meta kernel makes it without looking for the group.
ExchangeLayout layout_of(const char* op, const ExchangePlan& plan,
                         std::optional<int64_t> num_places) {
  check_rank(op, plan.rank, plan.group);
  return ExchangeLayout(op, plan, num_places);
}

// How many rows a plan without numbers is of.
std::optional<int64_t> num_places_of(const ExchangePlan& plan, const at::Tensor& rows_of_choices) {
  return plan.send.empty() ? std::optional(rows_of_choices.numel()) : std::nullopt;
}

Tensors<3> moe_dispatch_kernel(const at::Tensor& input, const at::Tensor& weights,
                               const at::Tensor& rows_of_choices, const at::Tensor& sources,
                               const at::Tensor& tokens, const ExchangePlan& plan) {
  const ExchangeLayout layout =
      layout_of("moe_dispatch", plan, num_places_of(plan, rows_of_choices));
  const Route route{rows_of_choices.contiguous(), sources.contiguous(), tokens.contiguous()};
  check_dispatch(input, weights, route, layout);
  const at::Tensor of_slots = weights.to(wide_type(input)).flatten().index_select(0, sources);
  AtExperts there = bring_to_experts("moe_dispatch", input.contiguous(), of_slots, route, layout);
  return {there.rows, there.weights, there.origins};
}

Tensors<2> moe_dispatch_backward_kernel(const at::Tensor& grad_rows, const at::Tensor& grad_weights,
                                        const at::Tensor& rows_of_choices,
                                        const at::Tensor& sources, const at::Tensor& origins,
                                        at::ScalarType weights_dtype, std::array<bool, 2> needed,
                                        const ExchangePlan& plan) {
  const char* op = "moe_dispatch_backward";
  check_floating(op, "grad_rows", grad_rows);
  check_dim(op, "grad_rows", grad_rows, 2);
  const ExchangeLayout layout = layout_of(op, plan, grad_rows.size(0));
  check_shape(op, "grad_weights", grad_weights, {grad_rows.size(0)});
  check_wide_dtype(op, "grad_weights", grad_weights, "grad_rows", grad_rows);
  check_origins(op, origins, layout);
  check_rows_of_choices(op, rows_of_choices, layout);
  check_length(op, "sources", sources, layout.num_slots(), "choices");
  // The rows travel whether this rank needs them or not: of a frozen embedding only ranks with an
  // image may, and all must exchange the same.
  std::optional<at::Tensor> weights;
  if (needed[1]) weights = grad_weights.contiguous();
  const AtTokens here = bring_back(op, grad_rows.contiguous(), weights, origins.contiguous(),
                                   rows_of_choices.contiguous(), layout);
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
                              const ExchangePlan& plan) {
  const char* op = "moe_combine";
  check_floating(op, "rows", rows);
  check_dim(op, "rows", rows, 2);
  const ExchangeLayout layout = layout_of(op, plan, rows.size(0));
  check_origins(op, origins, layout);
  check_maps(op, rows_of_choices, tokens, layout);
  return bring_back(op, rows.contiguous(), {}, origins.contiguous(), rows_of_choices.contiguous(),
                    layout)
      .sums;
}

at::Tensor moe_combine_backward_kernel(const at::Tensor& grad_output, const at::Tensor& origins,
                                       const at::Tensor& tokens, const ExchangePlan& plan) {
  const char* op = "moe_combine_backward";
  check_floating(op, "grad_output", grad_output);
  check_dim(op, "grad_output", grad_output, 2);
  const ExchangeLayout layout = layout_of(op, plan, origins.numel());
  check_origins(op, origins, layout);
  check_tokens(op, tokens, grad_output.size(0), layout);
  return bring_to_experts_again(op, grad_output.contiguous(), tokens.contiguous(),
                                origins.contiguous(), layout);
}

Tensors<3> moe_dispatch_meta(const at::Tensor& input, const at::Tensor&,
                             const at::Tensor& rows_of_choices, const at::Tensor& sources,
                             const at::Tensor&, const ExchangePlan& plan) {
  const ExchangeLayout layout("moe_dispatch", plan, num_places_of(plan, rows_of_choices));
  const int64_t places = layout.num_places();
  return {at::empty_symint({places, input.sym_size(1)}, input.options()),
          at::empty({places}, input.options().dtype(wide_type(input))),
          at::empty({places}, sources.options())};
}

Tensors<2> moe_dispatch_backward_meta(const at::Tensor& grad_rows, const at::Tensor&,
                                      const at::Tensor& rows_of_choices, const at::Tensor&,
                                      const at::Tensor&, at::ScalarType weights_dtype,
                                      std::array<bool, 2> needed) {
  const auto options = grad_rows.options();
  return {at::empty_symint({rows_of_choices.sym_size(0), grad_rows.sym_size(1)}, options),
          empty_if(needed[1], rows_of_choices.sym_sizes(), options.dtype(weights_dtype))};
}

at::Tensor moe_combine_meta(const at::Tensor& rows, const at::Tensor&,
                            const at::Tensor& rows_of_choices) {
  return at::empty_symint({rows_of_choices.sym_size(0), rows.sym_size(1)}, rows.options());
}

at::Tensor moe_combine_backward_meta(const at::Tensor& grad_output, const at::Tensor& origins) {
  return at::empty_symint({origins.sym_size(0), grad_output.sym_size(1)}, grad_output.options());
}

struct MoeDispatch : Gradient<MoeDispatch, moe_dispatch, Saved<2, 3>, Saved<2>, moe_dispatch> {
  static variable_list rule(const ForwardCall<moe_dispatch>& forward, const variable_list& grads) {
    const auto [input, weights, rows_of_choices, sources, tokens, plan] = forward.arguments();
    return forward.gradients(moe_dispatch_backward(grads[0], grads[1], rows_of_choices, sources,
                                                   forward.output(2), forward.info<1>().dtype,
                                                   forward.needed<2>(), plan));
  }
};

struct MoeCombine : Gradient<MoeCombine, moe_combine, Saved<1, 3>> {
  static variable_list rule(const ForwardCall<moe_combine>& forward, const variable_list& grads) {
    const auto [rows, origins, rows_of_choices, tokens, plan] = forward.arguments();
    return forward.gradients(moe_combine_backward(grads[0], origins, tokens, plan));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<moe_dispatch>(library)
      .kernel<moe_dispatch_kernel>()
      .meta<moe_dispatch_meta>()
      .gradient<MoeDispatch>();
  implement<moe_dispatch_backward>(library)
      .kernel<moe_dispatch_backward_kernel>()
      .meta<moe_dispatch_backward_meta>();
  implement<moe_combine>(library)
      .kernel<moe_combine_kernel>()
      .meta<moe_combine_meta>()
      .gradient<MoeCombine>();
  implement<moe_combine_backward>(library)
      .kernel<moe_combine_backward_kernel>()
      .meta<moe_combine_backward_meta>();
}

}  // namespace parallel_ext
