// The rows of a mixture of experts travel from the ranks that have the tokens to those that have
// the experts, and back. A *slot* is the place of a choice among all choices of a rank, in the
// order of (expert, token, choice); a *place* is where a row lies before its expert, in the order
// of (expert, rank that it comes from, slot). A message to a rank holds either one row for each
// slot, or one for each token, in the order of its first slot, and then says which row each slot
// means.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace parallel_ext {

// How many rows go where, as one rank sees it.
struct ExchangePlan {
  // Of the arguments of moe_dispatch, which it checks. The rows that lie before the experts, where
  // they are there already, are `num_places`.
  static ExchangePlan of(const char* op, at::IntArrayRef send, at::IntArrayRef receive,
                         at::IntArrayRef experts_per_rank, int64_t rank, int64_t group_size,
                         const std::string& group_name, std::optional<int64_t> num_places = {});

  std::vector<int64_t> send_slots;    // [ranks]: this rank's choices of the experts of each
  std::vector<int64_t> send_rows;     // [ranks]: rows in the message to each
  std::vector<int64_t> receive_rows;  // [ranks]: rows in the message from each
  // [ranks][choices of the rank for this one's experts]: their places.
  std::vector<std::vector<int64_t>> places;
  int64_t rank, group_size;
  std::string group_name;

  int64_t num_slots() const;
  int64_t num_rows() const;  // that are sent, those that stay included
  int64_t num_places() const;
};

// What lies before the experts.
struct AtExperts {
  at::Tensor rows;     // [places, H]
  at::Tensor weights;  // [places], those of the slots
  at::Tensor origins;  // [places], int64: which of the rows that arrived this is
};

// Of the plan of a rank: rows_of_choices [T, top_k], sources [slots] and tokens [slots] say which
// row each choice travels in, which choice a slot is, and which token a row is (moe/route.cpp).
struct Route {
  at::Tensor rows_of_choices, sources, tokens;
};

// Which travels by gloo's or NCCL's all-to-all, or straight through shared memory. All tensors are
// contiguous.

// input [T, H], weights [slots] -> rows and weights at the experts.
AtExperts bring_to_experts(const char* op, const at::Tensor& input, const at::Tensor& weights,
                           const Route& route, const ExchangePlan& plan);

// input [T, H] -> rows [places, H], once more by known origins.
at::Tensor bring_to_experts_again(const char* op, const at::Tensor& input, const at::Tensor& tokens,
                                  const at::Tensor& origins, const ExchangePlan& plan);

// What lies before the experts -> [T, H], the sum over the choices of each token, in fp32 or wider
// on either side of the exchange; and [slots] numbers of those in `weights` [places], if given.
struct AtTokens {
  at::Tensor sums, weights;
};
AtTokens bring_back(const char* op, const at::Tensor& rows,
                    const std::optional<at::Tensor>& weights, const at::Tensor& origins,
                    const at::Tensor& rows_of_choices, const ExchangePlan& plan);

}  // namespace parallel_ext
