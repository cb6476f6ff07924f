#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "base/kernel_choice.h"
#include "base/layout.h"
#include "check.h"
#include "comm/comm.h"
#include "moe/exchange.h"
#include "moe/rows_cuda.h"

namespace parallel_ext {
namespace {

// The places of the slots of all ranks, one rank after the other.
at::Tensor all_places(const ExchangeLayout& layout, const at::Tensor& like) {
  std::vector<int64_t> all;
  for (const auto& places : layout.places) {
    all.insert(all.end(), places.begin(), places.end());
  }
  return at::tensor(all, at::kLong).to(like.device(), /*non_blocking=*/true);
}

// The inverse of as_bytes; a copy, whose storage is aligned for the dtype.
at::Tensor from_bytes(const at::Tensor& bytes, at::ScalarType dtype, at::IntArrayRef sizes) {
  if (bytes.numel() == 0) return at::empty(sizes, bytes.options().dtype(dtype));
  return bytes.clone().view(dtype).view(sizes);
}

// The parts of the message to or from each rank, as bytes: messages[rank][part].
using Messages = std::vector<std::vector<at::Tensor>>;

// One all-to-all: parts[rank] for each rank -> the message from each rank, split into parts of
// sizes[rank].
Messages all_to_all(const char* op, const Messages& parts,
                    const std::vector<std::vector<int64_t>>& sizes, const at::Tensor& like,
                    const ExchangeLayout& layout) {
  std::vector<at::Tensor> all{at::empty({0}, like.options().dtype(at::kByte))};
  std::vector<int64_t> sent, received;
  for (int64_t peer = 0; peer < layout.group.size; ++peer) {
    int64_t bytes = 0;
    for (const at::Tensor& part : parts[peer]) {
      bytes += part.numel();
      all.push_back(part);
    }
    sent.push_back(bytes);
    received.push_back(sum_of(sizes[peer]));
  }
  const at::Tensor arrived =
      all_to_all_rows(op, at::cat(all).unsqueeze(1), sent, received, layout.group).squeeze(1);
  Messages messages;
  int64_t first = 0;
  for (const auto& pieces : sizes) {
    messages.emplace_back();
    for (const int64_t bytes : pieces) {
      messages.back().push_back(arrived.narrow(0, first, bytes));
      first += bytes;
    }
  }
  return messages;
}

// The check of a map that CUDA kernels follow unchecked; ATen calls check it themselves.
void check_same_device(const at::Tensor& map, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(map.device() == rows.device(), "moe_exchange: a map of the layout is on ",
                    map.device(), " but the rows are on ", rows.device(), "; move one of them");
}

at::Tensor rows_at_on_cuda(const at::Tensor& rows, const at::Tensor& index) {
  check_same_device(index, rows);
  at::Tensor picked = at::empty({index.numel(), rows.size(1)}, rows.options());
  if constexpr (kWithCudaKernels) {
    gather_rows_on_cuda({index.const_data_ptr<int64_t>(), index.numel(), 1, rows.size(0)},
                        row_bytes(rows), rows.const_data_ptr(), picked.mutable_data_ptr(),
                        rows.get_device());
  }
  return picked;
}

// rows [M, H], index [N] -> rows[index] [N, H].
at::Tensor rows_at(const at::Tensor& rows, const at::Tensor& index) {
  if (use_cuda_kernel(rows)) return rows_at_on_cuda(rows.contiguous(), index.contiguous());
  return rows.index_select(0, index);
}

at::Tensor sums_on_cuda(const at::Tensor& rows, const at::Tensor& parts, int64_t num_sums) {
  check_same_device(parts, rows);
  at::Tensor sums = at::empty({num_sums, rows.size(1)}, rows.options());
  if constexpr (kWithCudaKernels) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, rows.scalar_type(), "moe_exchange", [&] {
          sum_rows_on_cuda({parts.const_data_ptr<int64_t>(), num_sums, parts.size(1), rows.size(0)},
                           rows.size(1), rows.const_data_ptr<scalar_t>(),
                           sums.mutable_data_ptr<scalar_t>(), rows.get_device());
        });
  }
  return sums;
}

// rows [M, H], parts [num_sums, most] -> the sum of the rows that parts[i] names, for each i; made
// in fp32 or wider. The number M stands for no row.
at::Tensor sums_of_rows(const at::Tensor& rows, const at::Tensor& parts, int64_t num_sums) {
  if (use_cuda_kernel(rows)) return sums_on_cuda(rows.contiguous(), parts.contiguous(), num_sums);
  const auto wide = wide_type(rows);
  const at::Tensor padded = at::cat({rows, at::zeros({1, rows.size(1)}, rows.options())});
  at::Tensor sums = at::zeros({num_sums, rows.size(1)}, rows.options().dtype(wide));
  for (int64_t i = 0; i < parts.size(1); ++i) {
    sums.add_(padded.index_select(0, parts.select(1, i)));
  }
  return sums.to(rows.scalar_type());
}

// origins [places] -> [num_rows, most]: the places of each row that arrived, padded with the number
// of places.
at::Tensor places_of_rows(const at::Tensor& origins, int64_t num_rows, int64_t most) {
  const int64_t num_places = origins.numel();
  const at::Tensor order = at::argsort(origins, /*stable=*/true, /*dim=*/0);
  const at::Tensor sorted = origins.index_select(0, order);
  const at::Tensor begin = at::searchsorted(sorted, at::arange(num_rows, origins.options()));
  const at::Tensor number =
      at::arange(num_places, origins.options()) - begin.index_select(0, sorted);
  at::Tensor places = at::full({num_rows * most}, num_places, origins.options());
  return places.scatter_(0, sorted * most + number, order).view({num_rows, most});
}

}  // namespace

AtExperts bring_to_experts_aten(const char* op, const at::Tensor& input, const at::Tensor& weights,
                                const Route& route, const ExchangeLayout& layout) {
  const std::vector<int64_t>& slots = layout.send_slots;
  const auto& places = layout.places;
  const at::Tensor rows = rows_at(input, route.tokens.narrow(0, 0, layout.num_rows()));
  if (layout.group.alone()) {  // each choice is a row, in its place
    return {rows, weights, at::arange(layout.num_places(), route.sources.options())};
  }
  const at::Tensor numbers = route.rows_of_choices.flatten().index_select(0, route.sources);
  Messages parts;
  std::vector<std::vector<int64_t>> sizes;
  int64_t slot = 0, row = 0;
  for (int64_t peer = 0; peer < layout.group.size; ++peer) {
    const int64_t num_slots = slots[peer], num_rows = layout.send_rows[peer];
    const auto num_places = static_cast<int64_t>(places[peer].size());
    parts.push_back(
        {as_bytes(rows.narrow(0, row, num_rows)), as_bytes(weights.narrow(0, slot, num_slots))});
    sizes.push_back({layout.receive_rows[peer] * row_bytes(input),
                     num_places * static_cast<int64_t>(weights.element_size())});
    if (num_rows < num_slots) {
      parts.back().push_back(as_bytes((numbers.narrow(0, slot, num_slots) - row).to(at::kInt)));
    }
    if (layout.receive_rows[peer] < num_places) sizes.back().push_back(num_places * 4);
    slot += num_slots;
    row += num_rows;
  }
  const Messages messages = all_to_all(op, parts, sizes, input, layout);
  std::vector<at::Tensor> arrived, their_weights, origins;
  int64_t first = 0;
  for (int64_t peer = 0; peer < layout.group.size; ++peer) {
    const auto& message = messages[peer];
    const auto num_places = static_cast<int64_t>(places[peer].size());
    arrived.push_back(message[0]);
    their_weights.push_back(message[1]);
    const auto options = route.sources.options();
    const at::Tensor own = message.size() < 3
                               ? at::arange(num_places, options)
                               : from_bytes(message[2], at::kInt, {num_places}).to(at::kLong);
    origins.push_back(own + first);
    first += layout.receive_rows[peer];
  }
  const at::Tensor of_slots = all_places(layout, input);
  AtExperts there;
  there.weights = at::empty({layout.num_places()}, weights.options());
  there.weights.index_copy_(
      0, of_slots,
      from_bytes(at::cat(their_weights), weights.scalar_type(), {layout.num_places()}));
  there.origins = at::empty({layout.num_places()}, route.sources.options());
  there.origins.index_copy_(0, of_slots, at::cat(origins));
  there.rows = rows_at(from_bytes(at::cat(arrived), input.scalar_type(), {first, input.size(1)}),
                       there.origins);
  return there;
}

at::Tensor bring_to_experts_again_aten(const char* op, const at::Tensor& input,
                                       const at::Tensor& tokens, const at::Tensor& origins,
                                       const ExchangeLayout& layout) {
  const at::Tensor rows = rows_at(input, tokens.narrow(0, 0, layout.num_rows()));
  if (layout.group.alone()) return rows;
  return rows_at(all_to_all_rows(op, rows, layout.send_rows, layout.receive_rows, layout.group),
                 origins);
}

AtTokens bring_back_aten(const char* op, const at::Tensor& rows,
                         const std::optional<at::Tensor>& weights, const at::Tensor& origins,
                         const at::Tensor& rows_of_choices, const ExchangeLayout& layout) {
  if (layout.group.alone()) {  // each choice has come as a row
    return {sums_of_rows(rows, rows_of_choices, rows_of_choices.size(0)),
            weights.value_or(at::Tensor())};
  }
  const int64_t num_arrived = sum_of(layout.receive_rows), top_k = rows_of_choices.size(1);
  const at::Tensor sums =
      sums_of_rows(rows, places_of_rows(origins, num_arrived, top_k), num_arrived);
  const std::vector<int64_t>& slots = layout.send_slots;
  const auto& places = layout.places;
  const at::Tensor in_slots =
      weights ? weights->index_select(0, all_places(layout, rows)) : at::Tensor();
  Messages parts;
  std::vector<std::vector<int64_t>> sizes;
  int64_t row = 0, slot = 0;
  for (int64_t peer = 0; peer < layout.group.size; ++peer) {
    const auto num_places = static_cast<int64_t>(places[peer].size());
    parts.push_back({as_bytes(sums.narrow(0, row, layout.receive_rows[peer]))});
    sizes.push_back({layout.send_rows[peer] * row_bytes(rows)});
    if (weights) {
      parts.back().push_back(as_bytes(in_slots.narrow(0, slot, num_places)));
      sizes.back().push_back(slots[peer] * static_cast<int64_t>(weights->element_size()));
    }
    row += layout.receive_rows[peer];
    slot += num_places;
  }
  std::vector<at::Tensor> returned, their_weights;
  for (const auto& message : all_to_all(op, parts, sizes, rows, layout)) {
    returned.push_back(message[0]);
    if (weights) their_weights.push_back(message[1]);
  }
  AtTokens here;
  if (weights) {
    here.weights = from_bytes(at::cat(their_weights), weights->scalar_type(), {layout.num_slots()});
  }
  const at::Tensor all =
      from_bytes(at::cat(returned), rows.scalar_type(), {layout.num_rows(), rows.size(1)});
  // A row that serves several choices of a token is added once.
  std::vector<at::Tensor> parts_of_tokens;
  for (int64_t i = 0; i < top_k; ++i) {
    at::Tensor own = rows_of_choices.select(1, i);
    for (int64_t j = 0; j < i; ++j) {
      own = at::where(rows_of_choices.select(1, j) == own, layout.num_rows(), own);
    }
    parts_of_tokens.push_back(own);
  }
  const int64_t num_tokens = rows_of_choices.size(0);
  const at::Tensor parts_of = top_k == 0 ? at::empty({num_tokens, 0}, rows_of_choices.options())
                                         : at::stack(parts_of_tokens, 1);
  here.sums = sums_of_rows(all, parts_of, num_tokens);
  return here;
}

}  // namespace parallel_ext
