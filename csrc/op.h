// The templates that spare an op its frame: the call through the dispatcher, the registration and
// the autocast kernels all follow from the op's signature in <room>/ops.h; in gradient.h its
// autograd node does.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <tuple>
#include <type_traits>
#include <utility>

namespace parallel_ext {

using torch::autograd::variable_list;

template <size_t>
using TensorAt = at::Tensor;
template <size_t... i>
std::tuple<TensorAt<i>...> tuple_of_tensors(std::index_sequence<i...>);
template <size_t n>
using Tensors = decltype(tuple_of_tensors(std::make_index_sequence<n>()));

// --- Arguments ---

// A struct may stand for several arguments of a schema, as a group does for its size and its name:
// it has their types as `Fields`, a tuple, returns them from `fields()`, and is built from them.
template <typename Arg, typename = void>
struct SchemaArguments {
  using Fields = std::tuple<Arg>;
  static Fields split(Arg& arg) { return Fields(static_cast<Arg&&>(arg)); }
  static Arg join(Arg& field) { return static_cast<Arg&&>(field); }
};

template <typename Arg>
struct SchemaArguments<Arg, std::void_t<typename std::decay_t<Arg>::Fields>> {
  using Struct = std::decay_t<Arg>;
  using Fields = typename Struct::Fields;
  static Fields split(const Struct& arg) { return arg.fields(); }
  template <typename... Field>
  static Struct join(Field&... fields) {
    return Struct{static_cast<Field&&>(fields)...};
  }
};

// --- Calls ---

// An op as a function. A call goes through the dispatcher, so that autograd, Meta, autocast and
// profilers see it.
template <typename Name, typename Signature>
class Op;

template <typename Name, typename Returned, typename... Args>
class Op<Name, Returned(Args...)> {
 public:
  using Result = Returned;
  using Fields =
      decltype(std::tuple_cat(std::declval<typename SchemaArguments<Args>::Fields>()...));
  static constexpr const char* kName = Name::kName;
  static constexpr const char* kShortName = Name::kShortName;  // as errors say it

  Result operator()(Args... args) const {
    return call(std::tuple_cat(SchemaArguments<Args>::split(args)...));
  }

 private:
  template <typename... Field>
  static Result call(std::tuple<Field...> fields) {
    static const auto handle = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow(kName, "")
                                   .template typed<Result(Field...)>();
    return std::apply([](Field&... field) { return handle.call(static_cast<Field&&>(field)...); },
                      fields);
  }
};

// Declares an op by its name and its signature in C++, which has the arguments of the schema in
// register.cpp in the same order.
#define PARALLEL_EXT_OP(name, ...)                               \
  struct name##_name {                                           \
    static constexpr const char* kName = "parallel_ext::" #name; \
    static constexpr const char* kShortName = #name;             \
  };                                                             \
  inline constexpr Op<name##_name, __VA_ARGS__> name {}

// Numbers and types of the arguments that a function or an op takes.
template <typename Function>
struct Taken;
template <typename Result, typename... Args>
struct Taken<Result (*)(Args...)> : std::index_sequence_for<Args...> {
  using Types = std::tuple<Args...>;
};
template <typename Name, typename Result, typename... Args>
struct Taken<Op<Name, Result(Args...)>> : Taken<Result (*)(Args...)> {};

// Calls `function` with the first of `args`, as many as it takes.
template <typename Function, size_t... i, typename... Args>
auto call_with_first(const Function& function, std::index_sequence<i...>,
                     const std::tuple<Args...>& args) {
  return function(std::get<i>(args)...);
}
template <typename Function, typename... Args>
auto call_with_first(const Function& function, const std::tuple<Args...>& args) {
  return call_with_first(function, Taken<Function>(), args);
}

// The outputs of an op as a list; and the outputs of an op that returns the first of such a list.
inline variable_list as_list(const at::Tensor& output) { return {output}; }
template <typename... Each>
variable_list as_list(const std::tuple<Each...>& outputs) {
  return std::apply([](const auto&... each) { return variable_list{each...}; }, outputs);
}
template <typename Result>
Result from_list(const variable_list& list) {
  if constexpr (std::is_same_v<Result, at::Tensor>) {
    return list[0];
  } else {
    Result outputs;
    size_t i = 0;
    std::apply([&](auto&... each) { ((each = list[i++]), ...); }, outputs);
    return outputs;
  }
}

template <typename Result>
inline constexpr size_t kNumOutputs = 1;
template <typename... Each>
inline constexpr size_t kNumOutputs<std::tuple<Each...>> = sizeof...(Each);

// --- Kernels ---

// `function`, which takes the op's arguments or the first of them, as the dispatcher calls it.
template <typename TheOp, auto function, typename Fields = typename TheOp::Fields>
struct Kernel;

template <typename Name, typename Result, typename... Args, auto function, typename... Field>
struct Kernel<Op<Name, Result(Args...)>, function, std::tuple<Field...>> {
  static Result call(Field... fields) {
    return call_with(std::tuple<Field&...>(fields...), Taken<decltype(function)>());
  }

 private:
  template <size_t... i>
  static Result call_with(std::tuple<Field&...> fields, std::index_sequence<i...>) {
    using First = std::tuple<std::tuple_element_t<i, std::tuple<Args...>>...>;
    static_assert(std::is_same_v<typename Taken<decltype(function)>::Types, First>,
                  "the parameters of a kernel are not the first arguments of its op");
    return function(argument<i>(fields)...);
  }

  template <size_t i>
  static decltype(auto) argument(std::tuple<Field&...>& fields) {
    using Arg = std::tuple_element_t<i, std::tuple<Args...>>;
    constexpr size_t kSize = std::tuple_size_v<typename SchemaArguments<Arg>::Fields>;
    return join<Arg, first_field(i)>(fields, std::make_index_sequence<kSize>());
  }

  template <typename Arg, size_t first, size_t... i>
  static decltype(auto) join(std::tuple<Field&...>& fields, std::index_sequence<i...>) {
    return SchemaArguments<Arg>::join(std::get<first + i>(fields)...);
  }

  static constexpr size_t first_field(size_t argument) {
    constexpr size_t kSizes[] = {std::tuple_size_v<typename SchemaArguments<Args>::Fields>...};
    size_t first = 0;
    for (size_t i = 0; i < argument; ++i) first += kSizes[i];
    return first;
  }
};

// The leading outputs of another op, which takes the first of this op's arguments.
template <typename TheOp, typename Other>
struct LeadingOutputs;

template <typename Name, typename Result, typename... Args, typename Other>
struct LeadingOutputs<Op<Name, Result(Args...)>, Other> {
  static Result call(Args... args) {
    return from_list<Result>(as_list(call_with_first(Other(), std::tuple<Args&...>(args...))));
  }
};

inline constexpr c10::DispatchKeySet kAutocastKeys =
    c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

// As torch.nn.functional.linear under autocast: the arguments with the numbers `cast` are cast to
// the lower precision, in which the op then runs.
template <typename TheOp, c10::DeviceType device, typename Cast>
struct Autocast;

template <typename Name, typename Result, typename... Args, c10::DeviceType device, size_t... cast>
struct Autocast<Op<Name, Result(Args...)>, device, std::index_sequence<cast...>> {
  static Result call(Args... args) {
    return call_with(std::tuple<Args&...>(args...), std::index_sequence_for<Args...>());
  }

 private:
  template <size_t... i>
  static Result call_with(std::tuple<Args&...> args, std::index_sequence<i...>) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
    const auto dtype = at::autocast::get_autocast_dtype(device);
    return Op<Name, Result(Args...)>()(argument<i>(std::get<i>(args), dtype)...);
  }

  template <size_t i, typename Arg>
  static decltype(auto) argument(Arg& arg, at::ScalarType dtype) {
    if constexpr (((i == cast) || ...)) {
      return at::autocast::cached_cast(dtype, arg, device);
    } else {
      return (arg);
    }
  }
};

// --- Registration ---

// Registers the kernels of an op, inside TORCH_LIBRARY_FRAGMENT(parallel_ext, library). A kernel
// takes the op's arguments or the first of them.
template <typename TheOp>
class Registration {
 public:
  explicit Registration(torch::Library& library) : library_(library) {}

  template <auto function>
  const Registration& on(c10::DispatchKey key) const {
    library_.impl(TheOp::kName, torch::dispatch(key, &Kernel<TheOp, function>::call));
    return *this;
  }

  // For every device that has no kernel of its own.
  template <auto function>
  const Registration& kernel() const {
    return on<function>(c10::DispatchKey::CompositeExplicitAutograd);
  }

  // The kernel that returns the leading outputs of another op.
  template <const auto& other>
  const Registration& kernel_by() const {
    return kernel<&LeadingOutputs<TheOp, std::decay_t<decltype(other)>>::call>();
  }

  template <auto function>
  const Registration& meta() const {
    return on<function>(c10::DispatchKey::Meta);
  }

  template <typename Rule>
  const Registration& gradient() const {
    return on<&Rule::call>(c10::DispatchKey::Autograd);
  }

  template <size_t... cast>
  const Registration& autocast() const {
    using Cast = std::index_sequence<cast...>;
    on<&Autocast<TheOp, c10::kCPU, Cast>::call>(c10::DispatchKey::AutocastCPU);
    return on<&Autocast<TheOp, c10::kCUDA, Cast>::call>(c10::DispatchKey::AutocastCUDA);
  }

 private:
  torch::Library& library_;
};

template <const auto& op>
Registration<std::decay_t<decltype(op)>> implement(torch::Library& library) {
  return Registration<std::decay_t<decltype(op)>>(library);
}

}  // namespace parallel_ext
