// The schemas of all ops. Tensors first, then numbers, then the group, and last the options of the
// loss; the same names in C++ and Python.
#include <torch/library.h>

#include <string>

#include "vocab_loss_op.h"

TORCH_LIBRARY(parallel_ext, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("reduce_from_tp(Tensor partial, int group_size, str group_name) -> Tensor", tags);
  m.def("copy_to_tp(Tensor input, int group_size, str group_name) -> Tensor", tags);
  m.def(
      "gather_from_tp(Tensor shard, int[] sizes, int rank, int group_size, str group_name) -> "
      "Tensor",
      tags);
  m.def(
      "column_linear(Tensor input, Tensor weight, Tensor? bias, int row_stride, int group_size, "
      "str group_name) -> Tensor",
      tags);
  m.def(
      "column_linear_backward(Tensor grad_output, Tensor input, Tensor weight, bool[3] needed, "
      "int group_size, str group_name) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "row_linear(Tensor input, Tensor weight, Tensor? bias, int group_size, str group_name) -> "
      "Tensor",
      tags);
  m.def(
      "lora_linear(Tensor input, Tensor weight, Tensor lora_a, Tensor lora_b, Tensor? bias, "
      "float scale, float dropout, int[] dropout_counter, int group_size, str group_name) -> "
      "Tensor",
      tags);
  m.def(
      "lora_linear_forward(Tensor input, Tensor weight, Tensor lora_a, Tensor lora_b, "
      "Tensor? bias, float scale, float dropout, int[] dropout_counter, int group_size, "
      "str group_name) -> (Tensor, Tensor)",
      tags);
  m.def(
      "lora_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor lora_a, "
      "Tensor lora_b, Tensor low, float scale, float dropout, int[] dropout_counter, "
      "bool[5] needed) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "vocab_embedding(Tensor ids, Tensor weight, int vocab_size, int vocab_start, "
      "int? padding_idx, int[] sizes, int group_size, str group_name) -> Tensor",
      tags);
  m.def(
      "vocab_embedding_backward(Tensor grad_output, Tensor ids, SymInt num_rows, int vocab_start, "
      "int? padding_idx) -> Tensor",
      tags);
  const auto def_with_loss = [&](const std::string& arguments, const std::string& outputs) {
    const std::string schema =
        arguments + ", " + parallel_ext::kVocabLossSchema + ") -> " + outputs;
    m.def(schema.c_str(), tags);
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
      "Tensor labels, bool[3] wanted, int group_size, str group_name",
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
  m.def(
      "vocab_argmax(Tensor logits, int vocab_size, int vocab_start, int vocab_stop, "
      "int group_size, str group_name) -> Tensor",
      tags);
  m.def(
      "vocab_sample(Tensor logits, int vocab_size, int vocab_start, int vocab_stop, "
      "float temperature, int top_k, float top_p, float min_p, int seed, int step, "
      "int group_size, str group_name) -> Tensor",
      tags);
  m.def(
      "moe_route_plan(Tensor expert_ids, int[] experts_per_rank, int row_bytes, int rank) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "moe_dispatch(Tensor input, Tensor weights, Tensor rows_of_choices, Tensor sources, "
      "Tensor tokens, int[] send, int[] receive, int[] experts_per_rank, int rank, "
      "int group_size, str group_name) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "moe_dispatch_backward(Tensor grad_rows, Tensor grad_weights, Tensor rows_of_choices, "
      "Tensor sources, Tensor origins, ScalarType weights_dtype, bool[2] needed, int[] send, "
      "int[] receive, int[] experts_per_rank, int rank, int group_size, str group_name) -> "
      "(Tensor, Tensor)",
      tags);
  m.def(
      "moe_combine(Tensor rows, Tensor origins, Tensor rows_of_choices, Tensor tokens, "
      "int[] send, int[] receive, int[] experts_per_rank, int rank, int group_size, "
      "str group_name) -> Tensor",
      tags);
  m.def(
      "moe_combine_backward(Tensor grad_output, Tensor origins, Tensor tokens, int[] send, "
      "int[] receive, int[] experts_per_rank, int rank, int group_size, str group_name) -> Tensor",
      tags);
  m.def("moe_gated_silu(Tensor gate_up, Tensor weights) -> Tensor", tags);
  m.def(
      "moe_gated_silu_backward(Tensor grad_output, Tensor gate_up, Tensor weights) -> "
      "(Tensor, Tensor)",
      tags);
  m.def(
      "moe_linear(Tensor rows, Tensor weight, int[] counts, float weight_grad_scale=1.0) -> "
      "Tensor",
      tags);
  m.def(
      "moe_linear_backward(Tensor grad_output, Tensor rows, Tensor weight, int[] counts, "
      "bool[2] needed, float weight_grad_scale) -> (Tensor, Tensor)",
      tags);
  m.def(
      "moe_lora_linear(Tensor rows, Tensor weight, Tensor lora_a, Tensor lora_b, int[] counts, "
      "float scale, float weight_grad_scale=1.0) -> Tensor",
      tags);
  m.def(
      "moe_lora_linear_forward(Tensor rows, Tensor weight, Tensor lora_a, Tensor lora_b, "
      "int[] counts, float scale) -> (Tensor, Tensor)",
      tags);
  m.def(
      "moe_lora_linear_backward(Tensor grad_output, Tensor rows, Tensor weight, Tensor lora_a, "
      "Tensor lora_b, Tensor low, int[] counts, float scale, bool[4] needed, "
      "float weight_grad_scale) -> (Tensor, Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "moe_take_tokens(Tensor input, Tensor weights, int[] sizes, int rank, int group_size, "
      "str group_name) -> (Tensor, Tensor)",
      tags);
  m.def(
      "moe_take_tokens_backward(Tensor grad_input, Tensor grad_weights, int[] sizes, "
      "bool[2] needed, int rank, int group_size, str group_name) -> (Tensor, Tensor)",
      tags);
  m.def(
      "moe_gather_tokens(Tensor slice, int[] sizes, int rank, int group_size, str group_name) -> "
      "Tensor",
      tags);
}
