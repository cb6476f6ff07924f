// The embedding of a vocabulary whose rows are sharded over the ranks. On the CPU every rank reads
// all ids, so each row travels once, from the one rank that has it (vocab/embedding_cpu.cpp). On
// other devices, where reading the ids would mean to wait for them, and where few ranks have most
// of the rows, the ranks sum rows and zeros instead.
#include "vocab/embedding.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "base/kernel_choice.h"
#include "base/layout.h"
#include "check.h"
#include "comm/comm.h"
#include "gradient.h"
#include "vocab/embedding_cuda.h"
#include "vocab/ops.h"

namespace parallel_ext {

void check_ids(const at::Tensor& ids, int64_t vocab_size) {
  const int64_t* data = ids.const_data_ptr<int64_t>();
  const int64_t* bad = std::find_if(
      data, data + ids.numel(), [vocab_size](int64_t id) { return id < 0 || id >= vocab_size; });
  TORCH_CHECK_INDEX(bad == data + ids.numel(), kEmbedding, ": id ", *bad, " at position ",
                    bad - data, " is outside the vocabulary [0, ", vocab_size, ")");
}

std::vector<int64_t> bounds_of(at::IntArrayRef sizes, int64_t num_rows, int64_t vocab_size,
                               int64_t vocab_start, const Group& group) {
  if (group.alone()) return {};
  const int64_t rank = rank_in_group(kEmbedding, group);  // refuses a group that does not exist
  std::vector<int64_t> bounds;
  if (sizes.empty()) {
    bounds = split(vocab_size, group.size, 1);
  } else {
    const bool fit = static_cast<int64_t>(sizes.size()) == group.size &&
                     sum_of_counts(kEmbedding, "sizes", sizes) == vocab_size;
    TORCH_CHECK_VALUE(fit, kEmbedding, ": sizes ", sizes, " are not the rows of each of ",
                      group.size, " ranks, of ", vocab_size, " in all");
    bounds = starts_of(sizes);
  }
  TORCH_CHECK_VALUE(bounds[rank] == vocab_start && bounds[rank + 1] == vocab_start + num_rows,
                    kEmbedding, ": the ", num_rows, " rows from ", vocab_start,
                    " on are not this rank's, of ranks whose boundaries are ",
                    at::IntArrayRef(bounds), "; pass the rows of each rank as sizes");
  return bounds;
}

void check_embedding(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                     int64_t vocab_start, std::optional<int64_t> padding_idx) {
  check_int64(kEmbedding, "ids", ids);
  check_floating(kEmbedding, "weight", weight);
  check_dim(kEmbedding, "weight", weight, 2);
  TORCH_CHECK_VALUE(0 <= vocab_start && vocab_start <= vocab_size - weight.size(0), kEmbedding,
                    ": the ", weight.size(0), " rows from ", vocab_start,
                    " on are not inside the vocabulary [0, ", vocab_size,
                    "); pass this rank's rows and the true vocabulary size");
  TORCH_CHECK_VALUE(!padding_idx || (0 <= *padding_idx && *padding_idx < vocab_size), kEmbedding,
                    ": padding_idx ", *padding_idx, " is outside the vocabulary [0, ", vocab_size,
                    ")");
}

namespace {

at::Tensor own_rows_on_cuda(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_start,
                            at::IntArrayRef shape) {
  at::Tensor output = at::empty(shape, weight.options());
  if constexpr (kWithCudaKernels) {
    lookup_rows_on_cuda({ids.const_data_ptr<int64_t>(), ids.numel(), vocab_start, weight.size(0)},
                        row_bytes(weight), weight.const_data_ptr(), output.mutable_data_ptr(),
                        weight.get_device());
  }
  return output;
}

// Any device. Off the CPU the ids are not read back, so an id outside [0, V), which no rank owns,
// gives a row of zeros here; the model's agreement check reports it.
at::Tensor vocab_embedding_aten(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_size,
                                int64_t vocab_start, std::optional<int64_t> padding_idx,
                                at::IntArrayRef sizes, const Group& group) {
  check_embedding(ids, weight, vocab_size, vocab_start, padding_idx);
  if (ids.is_cpu()) check_ids(ids.contiguous(), vocab_size);
  bounds_of(sizes, weight.size(0), vocab_size, vocab_start, group);
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  at::Tensor output;
  if (use_cuda_kernel(weight)) {
    output = own_rows_on_cuda(ids.contiguous(), weight.contiguous(), vocab_start, shape);
  } else if (weight.size(0) == 0) {
    output = at::zeros(shape, weight.options());
  } else {
    const at::Tensor row = ids - vocab_start;
    const at::Tensor foreign = (row < 0).logical_or(row >= weight.size(0));
    output = weight.index_select(0, row.masked_fill(foreign, 0).flatten()).view(shape);
    output.masked_fill_(foreign.unsqueeze(-1), 0);
  }
  or_rows(output, group);  // T * H elements, every rank
  return output;
}

at::Tensor vocab_embedding_cpu(const at::Tensor& ids_in, const at::Tensor& weight,
                               int64_t vocab_size, int64_t vocab_start,
                               std::optional<int64_t> padding_idx, at::IntArrayRef sizes,
                               const Group& group) {
  if (aten_path_on_cpu()) {
    return vocab_embedding_aten(ids_in, weight, vocab_size, vocab_start, padding_idx, sizes, group);
  }
  check_embedding(ids_in, weight, vocab_size, vocab_start, padding_idx);
  const at::Tensor ids = ids_in.contiguous();
  check_ids(ids, vocab_size);
  const auto bounds = bounds_of(sizes, weight.size(0), vocab_size, vocab_start, group);
  return vocab_embedding_loops(ids, weight.contiguous(), vocab_start, bounds, group);
}

at::Tensor vocab_embedding_meta(const at::Tensor& ids, const at::Tensor& weight) {
  auto shape = ids.sym_sizes().vec();
  shape.push_back(weight.sym_size(1));
  return at::empty_symint(shape, weight.options());
}

at::Tensor sums_on_cuda(const at::Tensor& grad_output, const at::Tensor& ids, int64_t num_rows,
                        int64_t vocab_start, std::optional<int64_t> padding_idx) {
  const int64_t hidden = grad_output.size(-1);
  at::Tensor sums = at::zeros({num_rows, hidden}, grad_output.options());
  if constexpr (kWithCudaKernels) {
    TORCH_CHECK_VALUE(num_rows < std::numeric_limits<int32_t>::max(),
                      "vocab_embedding_backward: too many rows for a GPU: ", num_rows);
    const int device = sums.get_device();
    at::Tensor rows = at::empty({ids.numel()}, ids.options().dtype(at::kInt));
    find_rows_on_cuda({ids.const_data_ptr<int64_t>(), ids.numel(), vocab_start, num_rows},
                      padding_idx, rows.mutable_data_ptr<int32_t>(), device);
    const auto [in_order, order] = rows.sort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    const SortedRows sorted{in_order.const_data_ptr<int32_t>(), order.const_data_ptr<int64_t>(),
                            ids.numel(), num_rows};
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, sums.scalar_type(), "vocab_embedding_backward", [&] {
          using wide_t = wide_of<scalar_t>;
          at::Tensor parts =
              at::empty({sorted.num_parts(), hidden},
                        sums.options().dtype(c10::CppTypeToScalarType<wide_t>::value));
          sum_rows_of_ids_on_cuda(sorted, hidden, grad_output.const_data_ptr<scalar_t>(),
                                  parts.mutable_data_ptr<wide_t>(),
                                  sums.mutable_data_ptr<scalar_t>(), device);
        });
  }
  return sums;
}

void check_backward(const at::Tensor& grad_output, const at::Tensor& ids, int64_t num_rows) {
  const char* op = "vocab_embedding_backward";
  check_int64(op, "ids", ids);
  check_floating(op, "grad_output", grad_output);
  TORCH_CHECK_VALUE(num_rows >= 0, op, ": num_rows must be at least 0, got ", num_rows);
  TORCH_CHECK_VALUE(
      grad_output.dim() == ids.dim() + 1 && grad_output.sizes().slice(0, ids.dim()) == ids.sizes(),
      op, ": grad_output of shape ", grad_output.sizes(), " is not one row for each of ids ",
      ids.sizes());
}

at::Tensor vocab_embedding_backward_aten(const at::Tensor& grad_output, const at::Tensor& ids,
                                         c10::SymInt num_rows_in, int64_t vocab_start,
                                         std::optional<int64_t> padding_idx) {
  const int64_t num_rows = num_rows_in.expect_int();
  check_backward(grad_output, ids, num_rows);
  if (use_cuda_kernel(grad_output)) {
    return sums_on_cuda(grad_output.contiguous(), ids.contiguous(), num_rows, vocab_start,
                        padding_idx);
  }
  at::Tensor row = ids.flatten() - vocab_start;
  // One more row takes the tokens of other ranks' rows, so that no size depends on the ids.
  row = row.masked_fill((row < 0).logical_or(row >= num_rows), num_rows);
  if (padding_idx) row = row.masked_fill(row == *padding_idx - vocab_start, num_rows);
  const int64_t hidden = grad_output.size(-1);
  const auto sum_type = wide_type(grad_output);
  at::Tensor sum = at::zeros({num_rows + 1, hidden}, grad_output.options().dtype(sum_type));
  sum.index_add_(0, row, grad_output.reshape({ids.numel(), hidden}).to(sum_type));
  return sum.narrow(0, 0, num_rows).to(grad_output.scalar_type()).contiguous();
}

at::Tensor vocab_embedding_backward_cpu(const at::Tensor& grad_output_in, const at::Tensor& ids_in,
                                        c10::SymInt num_rows_in, int64_t vocab_start,
                                        std::optional<int64_t> padding_idx) {
  if (aten_path_on_cpu()) {
    return vocab_embedding_backward_aten(grad_output_in, ids_in, std::move(num_rows_in),
                                         vocab_start, padding_idx);
  }
  const int64_t num_rows = num_rows_in.expect_int();
  check_backward(grad_output_in, ids_in, num_rows);
  return vocab_embedding_backward_loops(grad_output_in.contiguous(), ids_in.contiguous(), num_rows,
                                        vocab_start, padding_idx);
}

struct VocabEmbedding : Gradient<VocabEmbedding, vocab_embedding, Saved<0>> {
  static variable_list rule(const ForwardCall<vocab_embedding>& forward,
                            const variable_list& grads) {
    const auto [ids, weight, vocab_size, vocab_start, padding_idx, sizes, group] =
        forward.arguments();
    const at::Tensor grad_weight = vocab_embedding_backward(
        grads[0], ids, forward.info<1>().sizes[0], vocab_start, padding_idx);
    return forward.gradients(Tensors<2>{at::Tensor(), grad_weight});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<vocab_embedding>(library)
      .kernel<vocab_embedding_aten>()
      .on<vocab_embedding_cpu>(c10::DispatchKey::CPU)
      .meta<vocab_embedding_meta>()
      .gradient<VocabEmbedding>();
  implement<vocab_embedding_backward>(library)
      .kernel<vocab_embedding_backward_aten>()
      .on<vocab_embedding_backward_cpu>(c10::DispatchKey::CPU)
      .meta<embedding_backward_meta>();
}

}  // namespace parallel_ext
