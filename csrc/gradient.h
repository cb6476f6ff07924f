// The autograd node of an op, which follows from its signature and a rule for the gradients.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "op.h"

namespace parallel_ext {

using torch::autograd::AutogradContext;

// What a gradient may ask about a tensor that was not saved.
struct TensorInfo {
  std::vector<c10::SymInt> sizes;
  at::ScalarType dtype;
};

// An argument in the form in which the graph keeps it; saved tensors are kept apart.
inline TensorInfo kept(const at::Tensor& arg) { return {arg.sym_sizes().vec(), arg.scalar_type()}; }
inline std::optional<TensorInfo> kept(const std::optional<at::Tensor>& arg) {
  return arg ? std::optional(kept(*arg)) : std::nullopt;
}
inline std::vector<int64_t> kept(at::IntArrayRef arg) { return arg.vec(); }
template <typename Arg>
Arg kept(const Arg& arg) {
  return arg;
}

inline bool needs_gradient(const at::Tensor& arg) { return arg.requires_grad(); }
inline bool needs_gradient(const std::optional<at::Tensor>& arg) {
  return arg && arg->requires_grad();
}
template <typename Arg>
bool needs_gradient(const Arg&) {
  return false;
}

// Any value in the node of a graph.
template <typename Value>
struct InGraph : torch::CustomClassHolder {
  explicit InGraph(Value value) : value(std::move(value)) {}
  Value value;
};
template <typename Value>
void keep_in_graph(AutogradContext* ctx, Value value) {
  ctx->saved_data["kept"] =
      c10::IValue::make_capsule(c10::make_intrusive<InGraph<Value>>(std::move(value)));
}
template <typename Value>
const Value& kept_in_graph(AutogradContext* ctx) {
  return static_cast<const InGraph<Value>&>(*ctx->saved_data["kept"].toCapsule()).value;
}

// A call of an op, as its gradient finds it.
template <typename TheOp>
class ForwardCallOf;
template <const auto& op>
using ForwardCall = ForwardCallOf<std::decay_t<decltype(op)>>;

template <typename Name, typename Result, typename... Args>
class ForwardCallOf<Op<Name, Result(Args...)>> {
 public:
  using Kept = std::tuple<decltype(kept(std::declval<Args>()))...>;

  explicit ForwardCallOf(AutogradContext* ctx)
      : ctx_(ctx), kept_(kept_in_graph<Kept>(ctx)), saved_(ctx->get_saved_variables()) {}

  // The arguments; a tensor that was not saved is undefined.
  auto arguments() const { return arguments(std::index_sequence_for<Args...>()); }

  // Lets the first argument, if it was not saved, be a tensor of its shape that takes no memory.
  void shape_input(at::Device device) {
    if (saved_[0].defined()) return;
    const auto options = at::TensorOptions().dtype(info<0>().dtype).device(device);
    saved_[0] = at::empty({}, options).expand_symint(info<0>().sizes);
  }

  // The output with this number, if it was saved.
  const at::Tensor& output(size_t number) const { return saved_[sizeof...(Args) + number]; }

  // Shape and dtype of the tensor that was the argument with this number.
  template <size_t i>
  const TensorInfo& info() const {
    return std::get<i>(kept_);
  }

  // Which of the first arguments need a gradient.
  template <size_t n = sizeof...(Args)>
  std::array<bool, n> needed() const {
    const auto given =
        std::apply([](const auto&... each) { return std::array{is_tensor(each)...}; }, kept_);
    std::array<bool, n> needed{};
    for (size_t i = 0, number = 0; i < n; ++i) {  // torch numbers the tensors that were given
      if (given[i]) needed[i] = ctx_->needs_input_grad(number++);
    }
    return needed;
  }

  // What a backward returns: gradients of the first arguments, where they are needed.
  template <typename Gradients>
  variable_list gradients(const Gradients& of_first_arguments) const {
    variable_list list = as_list(of_first_arguments);
    list.resize(sizeof...(Args));
    const auto is_needed = needed();
    for (size_t i = 0; i < list.size(); ++i) {
      if (!is_needed[i]) list[i] = at::Tensor();
    }
    return list;
  }

 private:
  static bool is_tensor(const TensorInfo&) { return true; }
  static bool is_tensor(const std::optional<TensorInfo>& info) { return info.has_value(); }
  template <typename Arg>
  static bool is_tensor(const Arg&) {
    return false;
  }

  static at::Tensor argument(const TensorInfo&, const at::Tensor& saved) { return saved; }
  static std::optional<at::Tensor> argument(const std::optional<TensorInfo>& info,
                                            const at::Tensor& saved) {
    return info ? std::optional(saved) : std::nullopt;
  }
  template <typename Arg>
  static const Arg& argument(const Arg& arg, const at::Tensor&) {
    return arg;
  }

  template <size_t... i>
  auto arguments(std::index_sequence<i...>) const {
    return std::tuple<decltype(argument(std::get<i>(kept_), saved_[i]))...>(
        argument(std::get<i>(kept_), saved_[i])...);
  }

  AutogradContext* ctx_;
  const Kept& kept_;
  variable_list saved_;  // a place for each argument, then for each output
};

// Numbers of arguments or outputs.
template <size_t... numbers>
using Saved = std::index_sequence<numbers...>;

// The autograd node of an op. `Rule`, a struct that derives from Gradient<Rule, op, ...>, is what
// torch shows as the name of the node; demangling it is part of every backward, so it is short. Its
// rule(ForwardCall<op>, gradients of the outputs) returns the gradients of the arguments. The
// forward calls `below`, the op itself or another one that takes the first of its arguments and
// whose first outputs are the op's, and saves the tensors with the numbers `inputs` and `outputs`.
template <typename Rule, typename TheOp, typename Below, typename Inputs, typename Outputs>
struct GradientOf;

template <typename Rule, typename Name, typename Result, typename... Args, typename Below,
          size_t... inputs, size_t... outputs>
struct GradientOf<Rule, Op<Name, Result(Args...)>, Below, Saved<inputs...>, Saved<outputs...>>
    : torch::autograd::Function<Rule> {
  using Call = ForwardCallOf<Op<Name, Result(Args...)>>;

  static variable_list forward(AutogradContext* ctx, Args... args) {
    const std::tuple<Args&...> all(args...);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list results = as_list(call_with_first(Below(), all));
    keep_in_graph(ctx, typename Call::Kept(kept(args)...));
    const std::array<bool, sizeof...(Args)> needs{needs_gradient(args)...};
    variable_list saved(sizeof...(Args) + results.size());
    ((saved[inputs] = std::get<inputs>(all)), ...);
    if (!reads_input(typename Rule::InputFor(), needs)) saved[0] = at::Tensor();
    ((saved[sizeof...(Args) + outputs] = results[outputs]), ...);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    results.resize(kNumOutputs<Result>);
    mark_constants(ctx, results, needs);
    return results;
  }

  // The arguments for whose gradients the rule reads the numbers of the first argument; none stands
  // for always. Where no such argument needs one it is not saved, and the rule gets its shape only.
  using InputFor = Saved<>;

  template <size_t... of>
  static bool reads_input(Saved<of...>, const std::array<bool, sizeof...(Args)>& needs_gradient) {
    return sizeof...(of) == 0 || (needs_gradient[of] || ...);
  }

  // The one output that the gradient of the argument with this number comes from; -1 for several.
  static constexpr int output_of(size_t) { return -1; }

  // An output of constant arguments is constant too, as it would be if each output had its own op.
  static void mark_constants(AutogradContext* ctx, const variable_list& results,
                             const std::array<bool, sizeof...(Args)>& needs_gradient) {
    std::array<bool, kNumOutputs<Result>> depends{};
    for (size_t i = 0; i < needs_gradient.size(); ++i) {
      const int output = Rule::output_of(i);
      if (needs_gradient[i] && output < 0) return;
      if (needs_gradient[i]) depends[output] = true;
    }
    if (std::none_of(depends.begin(), depends.end(), [](bool each) { return each; })) return;
    variable_list constants;
    for (size_t output = 0; output < depends.size(); ++output) {
      if (!depends[output]) constants.push_back(results[output]);
    }
    ctx->mark_non_differentiable(constants);
  }

  // As in torch's own nodes, an argument that no output with a gradient depends on gets none. Which
  // outputs have one follows from the graph alone. All ranks have built the same graph, so all of
  // them leave out the exchange of a backward, or none; a hook that cuts the graph must do it on
  // all ranks. The rule gets zeros for an output without a gradient, but nothing for one that can
  // have none, such as ids.
  static variable_list backward(AutogradContext* ctx, const variable_list& grad_outputs) {
    const auto is_defined = [](const at::Tensor& grad) { return grad.defined(); };
    const auto first = grad_outputs.begin(), end = grad_outputs.end();
    if (std::none_of(first, end, is_defined)) return variable_list(sizeof...(Args));
    Call forward(ctx);
    if (Rule::InputFor::size() > 0) {
      forward.shape_input(std::find_if(first, end, is_defined)->device());
    }
    if (std::all_of(first, end, is_defined)) return Rule::rule(forward, grad_outputs);
    const auto node = torch::autograd::get_current_node();
    const auto& infos = static_cast<torch::autograd::CppNode<Rule>&>(*node).output_info_;
    at::OptionalDeviceGuard guard;
    variable_list with_zeros = grad_outputs;
    bool complete = true;
    for (size_t i = 0; i < with_zeros.size(); ++i) {
      const bool can_have_one = torch::autograd::isDifferentiableType(infos[i].scalar_type);
      if (with_zeros[i].defined() || !can_have_one) continue;
      with_zeros[i] = infos[i].zeros(guard);
      complete = false;
    }
    variable_list gradients = Rule::rule(forward, with_zeros);
    if (complete) return gradients;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;  // not of a tensor, or not needed
      const int output = Rule::output_of(i);
      if (output >= 0 && !grad_outputs[output].defined()) gradients[i] = at::Tensor();
    }
    return gradients;
  }

  static Result call(Args... args) { return from_list<Result>(Rule::apply(args...)); }
};

template <typename Rule, const auto& op, typename Inputs, typename Outputs = Saved<>,
          const auto& below = op>
using Gradient =
    GradientOf<Rule, std::decay_t<decltype(op)>, std::decay_t<decltype(below)>, Inputs, Outputs>;

// For a backward whose own derivative nobody wrote: better an error than zeros. register.cpp does
// the same for every op that is a backward.
inline void refuse_second_derivative(const char* op, const variable_list& tensors) {
  if (!at::GradMode::is_enabled()) return;
  for (const auto& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || !tensor.requires_grad(), op,
                                kNoSecondDerivative);
  }
}

}  // namespace parallel_ext
