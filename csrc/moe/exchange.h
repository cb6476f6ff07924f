// The rows of a mixture of experts travel from the ranks that have the tokens to those that have
// the experts, and back. A *slot* is the position of a choice among all choices of a rank, in the
// order of (expert, token, choice); a *place* is the position of a row in the input of the experts,
// in the order of (expert, rank that the row comes from, slot). A message to a rank holds either
// one row for each slot, or one for each token, in the order of the token's first slot, and then
// also the number of the row that each slot uses; and the weights of the slots. The loops of the
// CPU and the ATen calls put these parts in different orders.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/comm.h"

namespace parallel_ext {

// How many rows go where, as one rank sees it: the arguments of the ops, as ExchangePlan and Group
// in parallel_ext/ops have them. One rank alone may leave out send and receive: all goes to itself.
struct ExchangePlan {
  std::vector<int64_t> send;     // [E + ranks]: this rank's choices of each expert, its rows for
                                 // each rank
  std::vector<int64_t> receive;  // [ranks * (own experts + 1)]: of each rank, its choices of each
                                 // of this rank's experts, its rows for this rank
  std::vector<int64_t> experts_per_rank;
  int64_t rank;
  Group group;

  ExchangePlan(at::IntArrayRef send, at::IntArrayRef receive, at::IntArrayRef experts_per_rank,
               int64_t rank, int64_t group_size, const std::string& group_name);

  using Fields = std::tuple<at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, int64_t, int64_t,
                            const std::string&>;
  Fields fields() const { return {send, receive, experts_per_rank, rank, group.size, group.name}; }
};

// Where each row of an exchange goes, which follows from the plan.
struct ExchangeLayout {
  // Checks the plan; with `num_places`, also that the experts get so many rows.
  ExchangeLayout(const char* op, const ExchangePlan& plan, std::optional<int64_t> num_places = {});

  std::vector<int64_t> send_slots;    // [ranks]: this rank's choices of the experts of each
  std::vector<int64_t> send_rows;     // [ranks]: rows in the message to each
  std::vector<int64_t> receive_rows;  // [ranks]: rows in the message from each
  // [ranks][choices of the rank for this one's experts]: their places.
  std::vector<std::vector<int64_t>> places;
  int64_t rank;
  Group group;

  int64_t num_slots() const;
  int64_t num_rows() const;  // in all messages, this rank's to itself included
  int64_t num_places() const;
};

// The input of the experts.
struct AtExperts {
  at::Tensor rows;     // [places, H]
  at::Tensor weights;  // [places]: the weight of each row's choice
  at::Tensor origins;  // [places], int64: the number that each row had when it arrived
};

// What moe_route_plan returns (moe/route.cpp): the row that each choice travels in, the choice that
// each slot is, the token that each row is.
struct Route {
  at::Tensor rows_of_choices;  // [T, top_k]
  at::Tensor sources;          // [slots]
  at::Tensor tokens;           // [slots]
};

// The exchanges go through an all-to-all of gloo or NCCL, or through shared memory. All tensors are
// contiguous.

// input [T, H], weights [slots] -> rows and weights at the experts.
AtExperts bring_to_experts(const char* op, const at::Tensor& input, const at::Tensor& weights,
                           const Route& route, const ExchangeLayout& layout);

// input [T, H] -> rows [places, H], by the origins that bring_to_experts has returned.
at::Tensor bring_to_experts_again(const char* op, const at::Tensor& input, const at::Tensor& tokens,
                                  const at::Tensor& origins, const ExchangeLayout& layout);

struct AtTokens {
  at::Tensor sums;     // [T, H]
  at::Tensor weights;  // [slots]; undefined where none were given
};

// rows [places, H] -> the sum over the choices of each token, in fp32 or wider on either side of
// the exchange; weights [places] -> the same numbers in the order of the slots.
AtTokens bring_back(const char* op, const at::Tensor& rows,
                    const std::optional<at::Tensor>& weights, const at::Tensor& origins,
                    const at::Tensor& rows_of_choices, const ExchangeLayout& layout);

// The three exchanges by plain ATen calls, for any device; rows are moved and summed by CUDA
// kernels where the build has them.
AtExperts bring_to_experts_aten(const char* op, const at::Tensor& input, const at::Tensor& weights,
                                const Route& route, const ExchangeLayout& layout);
at::Tensor bring_to_experts_again_aten(const char* op, const at::Tensor& input,
                                       const at::Tensor& tokens, const at::Tensor& origins,
                                       const ExchangeLayout& layout);
AtTokens bring_back_aten(const char* op, const at::Tensor& rows,
                         const std::optional<at::Tensor>& weights, const at::Tensor& origins,
                         const at::Tensor& rows_of_choices, const ExchangeLayout& layout);

}  // namespace parallel_ext
