// The schemas of all ops: tensors first, then numbers, then the group, and last the options of the
// loss; the same names in C++ and Python.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "vocab/loss.h"

namespace {

// Without the suffix of an op that users know by another's name, which calls it.
std::string short_name(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  name.erase(0, name.rfind(':') + 1);
  for (const std::string_view suffix : {"_forward", "_of_tokens", "_on_device"}) {
    const auto rest = name.size() - std::min(name.size(), suffix.size());
    if (name.compare(rest, std::string::npos, suffix) == 0) name.erase(rest);
  }
  return name;
}

// Checks what every op needs: that its tensors, also those of lists, are given, dense and on one
// device. It runs below autograd and before the kernel of a device is chosen: a tensor on meta
// would choose the kernel that computes nothing.
void check_tensors(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const std::string name = short_name(op);
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  struct Place {
    size_t argument;
    std::optional<size_t> in_list;
  };
  const auto name_of = [&](const Place& place) {
    const std::string& argument = arguments[place.argument].name();
    return place.in_list ? argument + "[" + std::to_string(*place.in_list) + "]" : argument;
  };
  at::Tensor first;
  Place place_of_first{};
  const auto check = [&](const Place& place, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(tensor.defined(), name, ": ", name_of(place), " must be a tensor, got None");
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": ", name_of(place),
                     " must be a dense tensor, got one with the layout ", tensor.layout(),
                     "; pass its to_dense()");
    if (!first.defined()) {
      first = tensor;
      place_of_first = place;
    }
    TORCH_CHECK_VALUE(tensor.device() == first.device(), name, ": ", name_of(place), " is on ",
                      tensor.device(), " but ", name_of(place_of_first), " is on ", first.device(),
                      "; move one of them");
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool must_be_given = arguments[i].type()->kind() == c10::TypeKind::TensorType;
    if (values[i].isTensorList()) {
      size_t number = 0;
      for (const at::Tensor& each : values[i].toTensorVector()) check({i, number++}, each);
    } else if (must_be_given || (values[i].isTensor() && values[i].toTensor().defined())) {
      check({i, {}}, values[i].isTensor() ? values[i].toTensor() : at::Tensor());
    }
  }
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  op.redispatchBoxed(keys & below, stack);
}

// The autograd kernel of every op that is a backward. Its own derivative is not implemented: an
// error is better than zeros.
void refuse_second_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                              torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!values[i].isTensor() || !values[i].toTensor().defined()) continue;
    const at::Tensor& tensor = values[i].toTensor();
    const bool has_tangent = tensor._fw_grad(0).defined();
    if ((at::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent) {
      const std::string name = short_name(op);
      TORCH_CHECK_NOT_IMPLEMENTED(false, name.substr(0, name.find("_backward")),
                                  parallel_ext::kNoSecondDerivative);
    }
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written.push_back(tensor);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  // Whoever else has saved these tensors must not use them any more.
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY(parallel_ext, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const auto def = [&](const std::string& schema) {
    const std::string name = schema.substr(0, schema.find('('));
    library.def(schema.c_str(), tags);
    library.impl(name.c_str(), c10::DispatchKey::BackendSelect,
                 torch::CppFunction::makeFromBoxedFunction<&check_tensors>());
    if (name.find("_backward") != std::string::npos) {
      library.impl(name.c_str(), c10::DispatchKey::Autograd,
                   torch::CppFunction::makeFromBoxedFunction<&refuse_second_derivative>());
    }
  };
  def("reduce_from_region(Tensor partial, int group_size, str group_name) -> Tensor");
  def("copy_to_region(Tensor input, int group_size, str group_name) -> Tensor");
  def("gather_from_region(Tensor shard, int[] sizes, int rank, int group_size, str group_name) -> "
      "Tensor");
  def("take_tokens(Tensor input, int[] sizes, int rank, int group_size, str group_name) -> Tensor");
  def("gather_tokens(Tensor shard, int[] sizes, int rank, bool partial_gradient, int group_size, "
      "str group_name) -> Tensor");
  def("sum_tokens(Tensor partial, int[] sizes, int rank, int group_size, str group_name) -> "
      "Tensor");
  def("column_linear(Tensor input, Tensor weight, Tensor? bias, int row_stride, int group_size, "
      "str group_name) -> Tensor");
  def("column_linear_backward(Tensor grad_output, Tensor input, Tensor weight, bool[3] needed, "
      "int group_size, str group_name) -> (Tensor, Tensor, Tensor)");
  def("column_linears(Tensor input, Tensor weight, Tensor second, Tensor third, Tensor? bias, "
      "Tensor? second_bias, Tensor? third_bias, int group_size, str group_name) -> "
      "(Tensor, Tensor, Tensor)");
  def("column_linears_backward(Tensor grad_output, Tensor grad_second, Tensor grad_third, "
      "Tensor input, Tensor weight, Tensor second, Tensor third, bool[7] needed, int group_size, "
      "str group_name) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("row_linear(Tensor input, Tensor weight, Tensor? bias, int group_size, str group_name) -> "
      "Tensor");
  def("block_linears(Tensor input, Tensor weight, Tensor second, Tensor third, int[] blocks, "
      "int copies, int num_blocks, int group_size, str group_name) -> (Tensor, Tensor, Tensor)");
  def("block_linears_backward(Tensor grad_output, Tensor grad_second, Tensor grad_third, "
      "Tensor input, Tensor weight, Tensor second, Tensor third, int[] blocks, int copies, "
      "int num_blocks, bool[4] needed, int group_size, str group_name) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  def("block_row_linear(Tensor input, Tensor weight, Tensor? bias, int[] blocks, int num_blocks, "
      "int group_size, str group_name) -> Tensor");
  def("block_row_linear_backward(Tensor grad_output, Tensor input, Tensor weight, int[] blocks, "
      "bool[3] needed) -> (Tensor, Tensor, Tensor)");
  def("repeat_heads(Tensor input, int head_dim, int times) -> Tensor");
  def("repeat_heads_backward(Tensor grad_output, int head_dim, int times) -> Tensor");
  def("block_bias(Tensor input, Tensor bias, int[] blocks, int copies, int num_blocks, "
      "int group_size, str group_name) -> Tensor");
  def("block_bias_backward(Tensor grad_output, Tensor bias, int[] blocks, int copies, "
      "int num_blocks, int group_size, str group_name) -> Tensor");
  def("block_scale(Tensor input, Tensor weight, int[] blocks, int num_blocks, int group_size, "
      "str group_name) -> Tensor");
  def("block_scale_backward(Tensor grad_output, Tensor input, Tensor weight, int[] blocks, "
      "int num_blocks, bool[2] needed, int group_size, str group_name) -> (Tensor, Tensor)");
  def("sum_leaves(Tensor[] values, int[] nodes, ScalarType dtype) -> Tensor");
  def("fixed_sigmoid(Tensor input) -> Tensor");
  def("fixed_sigmoid_backward(Tensor grad_output, Tensor input) -> Tensor");
  def("fixed_silu(Tensor input) -> Tensor");
  def("fixed_silu_backward(Tensor grad_output, Tensor input) -> Tensor");
  def("fixed_gelu(Tensor input) -> Tensor");
  def("fixed_gelu_backward(Tensor grad_output, Tensor input) -> Tensor");
  def("seeded_dropout(Tensor input, float dropout, int[] dropout_counter) -> Tensor");
  def("seeded_dropout_backward(Tensor grad_output, float dropout, int[] dropout_counter) -> "
      "Tensor");
  def("lora_linear(Tensor input, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor? bias, "
      "float scale, float dropout, int[] dropout_counter, int group_size, str group_name) -> "
      "Tensor");
  def("lora_linear_forward(Tensor input, Tensor weight, Tensor lora_a, Tensor lora_b, "
      "Tensor? bias, float scale, float dropout, int[] dropout_counter, int group_size, "
      "str group_name) -> (Tensor, Tensor)");
  def("lora_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor lora_a, "
      "Tensor lora_b, Tensor lora_a_out, float scale, float dropout, int[] dropout_counter, "
      "bool[5] needed) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("vocab_embedding(Tensor ids, Tensor weight, int vocab_size, int vocab_start, "
      "int? padding_idx, int[] sizes, int group_size, str group_name) -> Tensor");
  def("vocab_embedding_backward(Tensor grad_output, Tensor ids, SymInt num_rows, int vocab_start, "
      "int? padding_idx) -> Tensor");
  def("vocab_embedding_of_tokens(Tensor ids, Tensor weight, int vocab_size, int vocab_start, "
      "int? padding_idx, int[] sizes, int[] tokens, int rank, int group_size, str group_name) -> "
      "Tensor");
  def("vocab_embedding_of_tokens_backward(Tensor grad_output, Tensor ids, SymInt num_rows, "
      "int vocab_size, int vocab_start, int? padding_idx, int[] sizes, int[] tokens, int rank, "
      "int group_size, str group_name) -> Tensor");
  const auto def_with_loss = [&](const std::string& arguments, const std::string& outputs) {
    const std::string schema =
        arguments + ", " + parallel_ext::VocabLoss::kSchema + ") -> " + outputs;
    def(schema);
  };
  def_with_loss(
      "vocab_cross_entropy(Tensor logits, Tensor labels, bool[3] wanted, bool consume_logits, "
      "int group_size, str group_name",
      "(Tensor, Tensor, Tensor, Tensor)");
  def_with_loss(
      "vocab_cross_entropy_forward(Tensor logits, Tensor labels, bool[3] wanted, int group_size, "
      "str group_name",
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  def_with_loss(
      "vocab_cross_entropy_backward(Tensor? grad_loss, Tensor? grad_log_sum_exp, "
      "Tensor? grad_entropy, Tensor logits, Tensor labels, Tensor normalizer",
      "Tensor");
  def_with_loss(
      "vocab_cross_entropy_backward_(Tensor? grad_loss, Tensor? grad_log_sum_exp, "
      "Tensor? grad_entropy, Tensor(a!) logits, Tensor labels, Tensor normalizer",
      "()");
  def_with_loss(
      "linear_vocab_cross_entropy(Tensor input, Tensor head_weight, Tensor? head_bias, "
      "Tensor labels, bool[3] wanted, int[] sizes, int rank, int group_size, str group_name",
      "(Tensor, Tensor, Tensor, Tensor)");
  def_with_loss(
      "linear_vocab_cross_entropy_forward(Tensor input, Tensor head_weight, Tensor? head_bias, "
      "Tensor labels, bool[3] wanted, bool[3] needed, int group_size, str group_name",
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def_with_loss(
      "linear_vocab_cross_entropy_backward(Tensor? grad_loss, Tensor? grad_log_sum_exp, "
      "Tensor? grad_entropy, Tensor input, Tensor head_weight, Tensor? head_bias, Tensor labels, "
      "Tensor normalizer, bool[3] needed",
      "(Tensor, Tensor, Tensor)");
  def_with_loss(
      "linear_vocab_cross_entropy_frozen_backward(Tensor? grad_loss, Tensor? grad_log_sum_exp, "
      "Tensor expected_rows, Tensor head_weight, Tensor labels, Tensor normalizer",
      "Tensor");
  def_with_loss(
      "block_linear_cross_entropy(Tensor input, Tensor head_weight, Tensor lora_a_out, "
      "Tensor lora_b, Tensor labels, int[] blocks, int num_blocks, int group_size, str group_name",
      "Tensor");
  def_with_loss(
      "block_linear_cross_entropy_forward(Tensor input, Tensor head_weight, Tensor lora_a_out, "
      "Tensor lora_b, Tensor labels, int[] blocks, int num_blocks, bool[4] needed, "
      "int group_size, str group_name",
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("vocab_argmax(Tensor logits, int vocab_size, int vocab_start, int vocab_stop, "
      "int group_size, str group_name) -> Tensor");
  def("vocab_sample(Tensor logits, int vocab_size, int vocab_start, int vocab_stop, "
      "float temperature, int top_k, float top_p, float min_p, int seed, int step, "
      "int group_size, str group_name) -> Tensor");
  def("moe_router(Tensor logits, Tensor? expert_ids, int top_k, bool normalized) -> "
      "(Tensor, Tensor)");
  def("moe_router_backward(Tensor grad_weights, Tensor logits, Tensor expert_ids, "
      "bool normalized) -> Tensor");
  def("moe_route_plan(Tensor expert_ids, int[] experts_per_rank, int row_bytes, int rank) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("moe_dispatch(Tensor input, Tensor weights, Tensor rows_of_choices, Tensor sources, "
      "Tensor tokens, int[] send, int[] receive, int[] experts_per_rank, int rank, "
      "int group_size, str group_name) -> (Tensor, Tensor, Tensor)");
  def("moe_dispatch_backward(Tensor grad_rows, Tensor grad_weights, Tensor rows_of_choices, "
      "Tensor sources, Tensor origins, ScalarType weights_dtype, bool[2] needed, int[] send, "
      "int[] receive, int[] experts_per_rank, int rank, int group_size, str group_name) -> "
      "(Tensor, Tensor)");
  def("moe_combine(Tensor rows, Tensor origins, Tensor rows_of_choices, Tensor tokens, "
      "int[] send, int[] receive, int[] experts_per_rank, int rank, int group_size, "
      "str group_name) -> Tensor");
  def("moe_combine_backward(Tensor grad_output, Tensor origins, Tensor tokens, int[] send, "
      "int[] receive, int[] experts_per_rank, int rank, int group_size, str group_name) -> Tensor");
  def("moe_gated_silu(Tensor gate_up, Tensor weights) -> Tensor");
  def("moe_gated_silu_backward(Tensor grad_output, Tensor gate_up, Tensor weights) -> "
      "(Tensor, Tensor)");
  def("moe_linear(Tensor rows, Tensor weight, int[] counts, float weight_grad_scale=1.0) -> "
      "Tensor");
  def("moe_linear_backward(Tensor grad_output, Tensor rows, Tensor weight, int[] counts, "
      "bool[2] needed, float weight_grad_scale) -> (Tensor, Tensor)");
  def("moe_linear_on_device(Tensor rows, Tensor weight, Tensor counts, "
      "float weight_grad_scale=1.0) -> Tensor");
  def("moe_linear_on_device_backward(Tensor grad_output, Tensor rows, Tensor weight, "
      "Tensor counts, bool[2] needed, float weight_grad_scale) -> (Tensor, Tensor)");
  def("block_experts(Tensor rows, Tensor weight, int[] counts) -> Tensor");
  def("block_experts_backward(Tensor grad_output, Tensor rows, Tensor weight, int[] counts, "
      "bool[2] needed) -> (Tensor, Tensor)");
  def("moe_lora_linear(Tensor rows, Tensor weight, Tensor lora_a, Tensor lora_b, int[] counts, "
      "float scale, float weight_grad_scale=1.0) -> Tensor");
  def("moe_lora_linear_forward(Tensor rows, Tensor weight, Tensor lora_a, Tensor lora_b, "
      "int[] counts, float scale) -> (Tensor, Tensor)");
  def("moe_lora_linear_backward(Tensor grad_output, Tensor rows, Tensor weight, Tensor lora_a, "
      "Tensor lora_b, Tensor lora_a_out, int[] counts, float scale, bool[4] needed, "
      "float weight_grad_scale) -> (Tensor, Tensor, Tensor, Tensor)");
  def("moe_take_tokens(Tensor input, Tensor weights, int[] sizes, int rank, int group_size, "
      "str group_name) -> (Tensor, Tensor)");
  def("moe_take_tokens_backward(Tensor grad_input, Tensor grad_weights, int[] sizes, "
      "bool[2] needed, int rank, int group_size, str group_name) -> (Tensor, Tensor)");
}
