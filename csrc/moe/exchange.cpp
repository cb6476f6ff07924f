#include "moe/exchange.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/kernel_choice.h"
#include "base/layout.h"
#include "base/sum_rows.h"
#include "base/workspace.h"
#include "check.h"
#include "comm/comm.h"

namespace parallel_ext {

ExchangePlan::ExchangePlan(at::IntArrayRef send, at::IntArrayRef receive,
                           at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                           const std::string& group_name)
    : send(send.vec()),
      receive(receive.vec()),
      experts_per_rank(experts_per_rank.vec()),
      rank(rank),
      group{group_size, group_name} {}

ExchangeLayout::ExchangeLayout(const char* op, const ExchangePlan& plan,
                               std::optional<int64_t> num_places)
    : rank(plan.rank), group(plan.group) {
  const at::IntArrayRef send = plan.send, receive = plan.receive;
  const at::IntArrayRef experts_per_rank = plan.experts_per_rank;
  const int64_t group_size = group.size;
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(experts_per_rank.size()) == group_size && 0 <= rank && rank < group_size,
      op, ": experts_per_rank ", experts_per_rank, " and rank ", rank, " do not fit a group of ",
      group_size);
  const int64_t num_experts = num_experts_of(op, experts_per_rank);
  const int64_t own_experts = experts_per_rank[rank];
  if (group_size == 1 && send.empty() && receive.empty() && num_places) {
    send_slots = send_rows = receive_rows = {*num_places};
    places.emplace_back(*num_places);
    std::iota(places[0].begin(), places[0].end(), 0);
    return;
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(send.size()) == num_experts + group_size, op, ": ",
                    send.size(), " numbers in send are not one for each of the ", num_experts,
                    " experts and ", group_size, " ranks");
  TORCH_CHECK_VALUE(static_cast<int64_t>(receive.size()) == group_size * (own_experts + 1), op,
                    ": ", receive.size(), " numbers in receive are not, for each of ", group_size,
                    " ranks, one for each of this rank's ", own_experts, " experts and one more");
  sum_of_counts(op, "send", send);
  int64_t counted = sum_of_counts(op, "receive", receive);
  for (int64_t peer = 0; peer < group_size; ++peer) {  // all numbers but the rows of each rank
    counted -= receive[peer * (own_experts + 1) + own_experts];
  }
  TORCH_CHECK_VALUE(counted == num_places.value_or(counted), op, ": ", *num_places,
                    " rows, but the counts say ", counted);
  const at::IntArrayRef to_itself =
      send.slice(sum_of(experts_per_rank.slice(0, rank)), own_experts);
  const at::IntArrayRef from_itself = receive.slice(rank * (own_experts + 1), own_experts + 1);
  TORCH_CHECK_VALUE(to_itself == from_itself.slice(0, own_experts) &&
                        from_itself[own_experts] == send[num_experts + rank],
                    op, ": rank ", rank, " sends itself ", to_itself, " in ",
                    send[num_experts + rank], " rows, but receives ",
                    from_itself.slice(0, own_experts), " in ", from_itself[own_experts]);
  send_rows = send.slice(num_experts).vec();
  const int64_t* count = send.begin();
  for (const int64_t experts : experts_per_rank) {
    send_slots.push_back(sum_of(at::IntArrayRef(count, experts)));
    count += experts;
  }
  places.resize(group_size);
  int64_t place = 0;
  for (int64_t expert = 0; expert < own_experts; ++expert) {
    for (int64_t peer = 0; peer < group_size; ++peer) {
      const int64_t stop = place + receive[peer * (own_experts + 1) + expert];
      for (; place < stop; ++place) places[peer].push_back(place);
    }
  }
  for (int64_t peer = 0; peer < group_size; ++peer) {
    receive_rows.push_back(receive[peer * (own_experts + 1) + own_experts]);
    const auto of_peer = static_cast<int64_t>(places[peer].size());
    TORCH_CHECK_VALUE(send_rows[peer] <= send_slots[peer] && receive_rows[peer] <= of_peer, op,
                      ": rank ", peer, " gets ", send_rows[peer], " rows for ", send_slots[peer],
                      " choices and sends ", receive_rows[peer], " for ", of_peer,
                      "; there cannot be more rows than choices");
  }
  TORCH_CHECK_VALUE(send_rows[rank] == send_slots[rank], op, ": rank ", rank, " sends itself ",
                    send_rows[rank], " rows for ", send_slots[rank],
                    " choices; to itself it sends one for each");
}

int64_t ExchangeLayout::num_slots() const { return sum_of(send_slots); }
int64_t ExchangeLayout::num_rows() const { return sum_of(send_rows); }
int64_t ExchangeLayout::num_places() const {
  int64_t count = 0;
  for (const auto& of_peer : places) count += static_cast<int64_t>(of_peer.size());
  return count;
}

namespace {

using Spans = std::vector<std::vector<Span>>;

// The exchange of the CPU: rows are copied from their tensor straight to their place in the other
// rank's tensor.
class Exchange {
 public:
  explicit Exchange(const ExchangeLayout& layout)
      : layout_(layout),
        places_(layout.places),
        slots_(layout.send_slots),
        first_slot_(starts_of(layout.send_slots)),
        first_row_(starts_of(layout.send_rows)),
        first_origin_(starts_of(layout.receive_rows)),
        out_(layout.group.size),
        in_(layout.group.size) {}

  AtExperts to_experts(const char* op, const at::Tensor& input, const at::Tensor& weights,
                       const Route& route) {
    AtExperts there;
    const at::Tensor numbers = at::empty({layout_.num_slots()}, input.options().dtype(at::kInt));
    auto* number = numbers.mutable_data_ptr<int32_t>();
    const int64_t* row = route.rows_of_choices.const_data_ptr<int64_t>();
    const int64_t* source = route.sources.const_data_ptr<int64_t>();
    std::vector<std::vector<int32_t>> received(layout_.group.size);
    for_peers([&](int64_t peer) {
      if (layout_.send_rows[peer] < slots_[peer]) {
        for (int64_t slot = first_slot_[peer]; slot < first_slot_[peer + 1]; ++slot)
          number[slot] = static_cast<int32_t>(row[source[slot]] - first_row_[peer]);
        add_span(out_[peer], number + first_slot_[peer], slots_[peer] * sizeof(int32_t));
      }
      if (each_once(peer)) {
        received[peer].resize(places_[peer].size());
        add_span(in_[peer], received[peer].data(), places_[peer].size() * sizeof(int32_t));
      }
    });
    there.weights = at::empty({layout_.num_places()}, weights.options());
    add_numbers(weights, there.weights, true);
    there.rows = add_rows(input, route.tokens);
    swap(op);
    there.origins = at::empty({layout_.num_places()}, route.sources.options());
    auto* origin = there.origins.mutable_data_ptr<int64_t>();
    for (int64_t peer = 0; peer < layout_.group.size; ++peer) {
      for (size_t i = 0; i < places_[peer].size(); ++i) {
        const auto own = static_cast<int64_t>(received[peer].empty() ? i : received[peer][i]);
        TORCH_CHECK(0 <= own && own <= static_cast<int64_t>(i), op, ": rank ", peer,
                    " says that slot ", i, " is row ", own, " of its message");
        origin[places_[peer][i]] = first_origin_[peer] + own;
      }
    }
    expand(there.rows, origin);
    return there;
  }

  at::Tensor to_experts_again(const char* op, const at::Tensor& input, const at::Tensor& tokens,
                              const at::Tensor& origins) {
    const at::Tensor rows = add_rows(input, tokens);
    swap(op);
    expand(rows, origins.const_data_ptr<int64_t>());
    return rows;
  }

  AtTokens back(const char* op, const at::Tensor& rows, const std::optional<at::Tensor>& weights,
                const at::Tensor& origins, const at::Tensor& rows_of_choices) {
    AtTokens here;
    if (weights) {
      here.weights = at::empty({layout_.num_slots()}, weights->options());
      add_numbers(here.weights, *weights, false);
    }
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, rows.scalar_type(), "moe_exchange", [&] {
          here.sums =
              sums_of<scalar_t>(op, rows, origins.const_data_ptr<int64_t>(), rows_of_choices);
        });
    return here;
  }

 private:
  template <typename Use>
  void for_peers(const Use& use) const {
    for (int64_t peer = 0; peer < layout_.group.size; ++peer) {
      if (peer != layout_.rank) use(peer);
    }
  }

  // Whether `peer` sends this rank each token once.
  bool each_once(int64_t peer) const {
    return layout_.receive_rows[peer] < static_cast<int64_t>(places_[peer].size());
  }

  void swap(const char* op) const { swap_bytes(op, out_, in_, layout_.group); }

  // Adds one number for each slot and place to the messages, on the way to the places or back.
  void add_numbers(const at::Tensor& of_slots, const at::Tensor& of_places, bool to_places) {
    Spans &slot_spans = to_places ? out_ : in_, &place_spans = to_places ? in_ : out_;
    const int64_t bytes = of_slots.element_size();
    auto* slot = static_cast<char*>(const_cast<void*>(of_slots.const_data_ptr()));
    auto* place = static_cast<char*>(const_cast<void*>(of_places.const_data_ptr()));
    for_peers([&](int64_t peer) {
      add_span(slot_spans[peer], slot + first_slot_[peer] * bytes, slots_[peer] * bytes);
      for (const int64_t i : places_[peer]) add_span(place_spans[peer], place + i * bytes, bytes);
    });
    for (size_t i = 0; i < places_[layout_.rank].size(); ++i) {
      char* at_slot = slot + (first_slot_[layout_.rank] + i) * bytes;
      char* at_place = place + places_[layout_.rank][i] * bytes;
      std::memcpy(to_places ? at_place : at_slot, to_places ? at_slot : at_place, bytes);
    }
  }

  // Adds the rows of tokens to the messages. The rows of a peer arrive in its first places.
  at::Tensor add_rows(const at::Tensor& input, const at::Tensor& tokens) {
    const int64_t row_bytes = input.size(1) * input.element_size();
    at::Tensor rows = pooled_empty({layout_.num_places(), input.size(1)}, input.options());
    const auto* from = static_cast<const char*>(input.const_data_ptr());
    auto* to = static_cast<char*>(rows.mutable_data_ptr());
    const int64_t* token = tokens.const_data_ptr<int64_t>();
    for_peers([&](int64_t peer) {
      for (int64_t row = first_row_[peer]; row < first_row_[peer + 1]; ++row)
        add_span(out_[peer], from + token[row] * row_bytes, row_bytes);
      for (int64_t i = 0; i < layout_.receive_rows[peer]; ++i)
        add_span(in_[peer], to + places_[peer][i] * row_bytes, row_bytes);
    });
    const auto& own = places_[layout_.rank];
    for (size_t i = 0; i < own.size() && row_bytes > 0; ++i) {
      const char* row = from + token[first_row_[layout_.rank] + i] * row_bytes;
      std::memcpy(to + own[i] * row_bytes, row, row_bytes);
    }
    return rows;
  }

  // Copies the row of each slot to its place. Backwards, since the row has arrived in the place of
  // an earlier slot or in its own.
  void expand(const at::Tensor& rows, const int64_t* origin) const {
    const int64_t row_bytes = rows.size(1) * rows.element_size();
    auto* data = static_cast<char*>(rows.mutable_data_ptr());
    for_peers([&](int64_t peer) {
      if (!each_once(peer)) return;
      const auto& places = places_[peer];
      for (size_t i = places.size(); i-- > 0;) {
        const int64_t from = places[origin[places[i]] - first_origin_[peer]];
        if (from != places[i] && row_bytes > 0)
          std::memcpy(data + places[i] * row_bytes, data + from * row_bytes, row_bytes);
      }
    });
  }

  template <typename scalar_t>
  at::Tensor sums_of(const char* op, const at::Tensor& rows, const int64_t* origin,
                     const at::Tensor& rows_of_choices);

  const ExchangeLayout& layout_;
  const std::vector<std::vector<int64_t>>& places_;
  const std::vector<int64_t>& slots_;
  const std::vector<int64_t> first_slot_, first_row_, first_origin_;
  Spans out_, in_;
};

constexpr int64_t kTokensPerTask = 16;

template <typename scalar_t>
at::Tensor Exchange::sums_of(const char* op, const at::Tensor& rows, const int64_t* origin,
                             const at::Tensor& rows_of_choices) {
  const int64_t hidden = rows.size(1), row_bytes = hidden * rows.element_size();
  const auto* data = rows.const_data_ptr<scalar_t>();
  // For a token that arrived once, the outputs of its experts are summed and sent back once.
  std::vector<at::Tensor> summed;
  for_peers([&](int64_t peer) {
    if (!each_once(peer)) {
      for (const int64_t place : places_[peer])
        add_span(out_[peer], data + place * hidden, row_bytes);
      return;
    }
    std::vector<std::vector<const scalar_t*>> parts(layout_.receive_rows[peer]);
    for (const int64_t place : places_[peer])
      parts[origin[place] - first_origin_[peer]].push_back(data + place * hidden);
    const auto several =
        std::count_if(parts.begin(), parts.end(), [](const auto& part) { return part.size() > 1; });
    summed.push_back(pooled_empty({several, hidden}, rows.options()));
    auto* sum = summed.back().mutable_data_ptr<scalar_t>();
    for (const auto& part : parts) {
      if (part.size() == 1) {
        add_span(out_[peer], part[0], row_bytes);
      } else {
        sum_rows(part.data(), part.size(), hidden, sum);
        add_span(out_[peer], sum, row_bytes);
        sum += hidden;
      }
    }
  });
  const auto& own = places_[layout_.rank];
  const auto foreign = layout_.num_rows() - static_cast<int64_t>(own.size());
  const at::Tensor returned = pooled_empty({foreign, hidden}, rows.options());
  auto* next = returned.mutable_data_ptr<scalar_t>();
  std::vector<const scalar_t*> row_at;  // for each row in the messages, this rank's own included
  for (int64_t peer = 0; peer < layout_.group.size; ++peer) {
    if (peer == layout_.rank) {
      for (const int64_t place : own) row_at.push_back(data + place * hidden);
      continue;
    }
    add_span(in_[peer], next, layout_.send_rows[peer] * row_bytes);
    for (int64_t i = 0; i < layout_.send_rows[peer]; ++i, next += hidden) row_at.push_back(next);
  }
  swap(op);
  const int64_t num_tokens = rows_of_choices.size(0), top_k = rows_of_choices.size(1);
  at::Tensor sums = pooled_empty({num_tokens, hidden}, rows.options());
  const int64_t* choice = rows_of_choices.const_data_ptr<int64_t>();
  auto* sum = sums.mutable_data_ptr<scalar_t>();
  at::parallel_for(0, num_tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
    std::vector<const scalar_t*> parts;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t *first = choice + token * top_k, *last = first + top_k;
      parts.clear();
      for (const int64_t* row = first; row < last; ++row) {
        if (std::find(first, row, *row) == row) parts.push_back(row_at[*row]);
      }
      sum_rows(parts.data(), parts.size(), hidden, sum + token * hidden);
    }
  });
  return sums;
}

}  // namespace

AtExperts bring_to_experts(const char* op, const at::Tensor& input, const at::Tensor& weights,
                           const Route& route, const ExchangeLayout& layout) {
  if (!use_cpu_loops(input)) return bring_to_experts_aten(op, input, weights, route, layout);
  return Exchange(layout).to_experts(op, input, weights, route);
}

at::Tensor bring_to_experts_again(const char* op, const at::Tensor& input, const at::Tensor& tokens,
                                  const at::Tensor& origins, const ExchangeLayout& layout) {
  if (!use_cpu_loops(input)) return bring_to_experts_again_aten(op, input, tokens, origins, layout);
  return Exchange(layout).to_experts_again(op, input, tokens, origins);
}

AtTokens bring_back(const char* op, const at::Tensor& rows,
                    const std::optional<at::Tensor>& weights, const at::Tensor& origins,
                    const at::Tensor& rows_of_choices, const ExchangeLayout& layout) {
  if (!use_cpu_loops(rows)) {
    return bring_back_aten(op, rows, weights, origins, rows_of_choices, layout);
  }
  return Exchange(layout).back(op, rows, weights, origins, rows_of_choices);
}

}  // namespace parallel_ext
