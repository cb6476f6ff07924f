// The embedding's CPU loops. They copy rows as bytes; only the sums of the backward look at
// numbers.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/sum_rows.h"
#include "base/workspace.h"
#include "comm/comm.h"
#include "vocab/embedding.h"

namespace parallel_ext {
namespace {

constexpr int64_t kTokensPerTask = 64, kRowsPerTask = 256;

// For each token the first token that has the same id.
std::vector<int64_t> first_tokens(const int64_t* ids, int64_t num_tokens) {
  int bits = 1;
  while ((int64_t{1} << bits) < 2 * num_tokens) ++bits;
  std::vector<int64_t> table(int64_t{1} << bits, -1), first(num_tokens);
  for (int64_t token = 0; token < num_tokens; ++token) {
    // Fibonacci hashing, then the next free place.
    size_t place = static_cast<uint64_t>(ids[token]) * 0x9E3779B97F4A7C15u >> (64 - bits);
    while (table[place] >= 0 && ids[table[place]] != ids[token]) {
      place = (place + 1) % table.size();
    }
    if (table[place] < 0) table[place] = token;
    first[token] = table[place];
  }
  return first;
}

// The rank that has the row of each id in the input, which every rank computes for itself.
struct Owners {
  std::vector<int64_t> first;                // [T]: as first_tokens returns it
  std::vector<std::vector<int64_t>> tokens;  // [ranks]: the first tokens whose rows the rank has

  Owners(const int64_t* ids, int64_t num_tokens, const std::vector<int64_t>& bounds)
      : first(first_tokens(ids, num_tokens)), tokens(bounds.size() - 1) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      if (first[token] != token) continue;
      const auto next = std::upper_bound(bounds.begin(), bounds.end(), ids[token]);
      tokens[next - bounds.begin() - 1].push_back(token);
    }
  }

  // Whether sending its rows to the p - 1 others costs no rank more than a ring all-reduce, which
  // sends 2 (p - 1) / p of the rows of all tokens. True for any input on two ranks.
  bool send_less_than_all_reduce() const {
    size_t busiest = 0;
    for (const auto& own : tokens) busiest = std::max(busiest, own.size());
    return busiest * tokens.size() <= 2 * first.size();
  }
};

}  // namespace

at::Tensor vocab_embedding_loops(const at::Tensor& ids, const at::Tensor& weight,
                                 int64_t vocab_start, const std::vector<int64_t>& bounds,
                                 const Group& group) {
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  at::Tensor output = pooled_empty(shape, weight.options());
  const int64_t bytes = row_bytes(weight), num_rows = weight.size(0), num_tokens = ids.numel();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const auto* rows = static_cast<const char*>(weight.const_data_ptr());
  auto* out = static_cast<char*>(output.mutable_data_ptr());
  const auto is_own = [&](int64_t token) {
    return vocab_start <= id[token] && id[token] < vocab_start + num_rows;
  };
  const auto row_of = [&](int64_t token) { return rows + (id[token] - vocab_start) * bytes; };
  const auto for_tokens = [&](const auto& use) {
    at::parallel_for(0, bytes == 0 ? 0 : num_tokens, kTokensPerTask, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) use(i);
    });
  };
  for_tokens([&](int64_t token) {
    if (is_own(token)) std::memcpy(out + token * bytes, row_of(token), bytes);
  });
  const auto clear_others = [&] {
    for_tokens([&](int64_t token) {
      if (!is_own(token)) std::memset(out + token * bytes, 0, bytes);
    });
  };
  if (group.alone()) {
    clear_others();
    return output;
  }
  const Owners owners(id, num_tokens, bounds);
  if (!owners.send_less_than_all_reduce()) {
    clear_others();
    or_rows(output, group);
    return output;
  }
  std::vector<Span> own;
  std::vector<std::vector<Span>> incoming(group.size);
  for (int64_t rank = 0; rank < group.size; ++rank) {
    for (const int64_t token : owners.tokens[rank]) {
      if (is_own(token)) add_span(own, row_of(token), bytes);
      add_span(incoming[rank], out + token * bytes, bytes);  // unused where it is this rank
    }
  }
  const std::vector<std::vector<Span>> outgoing(group.size, own);
  swap_bytes(kEmbedding, outgoing, incoming, group);
  for_tokens([&](int64_t token) {
    const int64_t first = owners.first[token];
    if (first != token && !is_own(token)) {
      std::memcpy(out + token * bytes, out + first * bytes, bytes);
    }
  });
  return output;
}

namespace {

// The gradient of a row is the sum over the tokens order[first[row]], ...,
// order[first[row + 1] - 1] in this order, so that its bits do not depend on the number of threads.
template <typename scalar_t>
void sum_rows_of_ids(const std::vector<int64_t>& first, const std::vector<int64_t>& order,
                     const scalar_t* grad_output, int64_t hidden, scalar_t* grad_weight) {
  const auto num_rows = static_cast<int64_t>(first.size()) - 1;
  const int64_t bytes = hidden * static_cast<int64_t>(sizeof(scalar_t));
  at::parallel_for(0, bytes == 0 ? 0 : num_rows, kRowsPerTask, [&](int64_t row, int64_t end) {
    std::vector<const scalar_t*> tokens;
    for (; row < end; ++row) {
      scalar_t* out = grad_weight + row * hidden;
      tokens.clear();
      for (int64_t i = first[row]; i < first[row + 1]; ++i) {
        tokens.push_back(grad_output + order[i] * hidden);
      }
      if (tokens.empty()) {
        std::memset(out, 0, bytes);
      } else if (tokens.size() == 1) {
        std::memcpy(out, tokens[0], bytes);
      } else {
        sum_rows(tokens.data(), static_cast<int64_t>(tokens.size()), hidden, out);
      }
    }
  });
}

}  // namespace

at::Tensor vocab_embedding_backward_loops(const at::Tensor& grad_output, const at::Tensor& ids,
                                          int64_t num_rows, int64_t vocab_start,
                                          std::optional<int64_t> padding_idx) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const auto row_of = [&](int64_t token) {
    const int64_t row = id[token] - vocab_start;
    return row < 0 || row >= num_rows || id[token] == padding_idx ? int64_t{-1} : row;
  };
  // A stable counting sort by row of the tokens whose rows this rank has.
  std::vector<int64_t> first(num_rows + 1, 0);
  for (int64_t token = 0; token < ids.numel(); ++token) {
    if (const int64_t row = row_of(token); row >= 0) ++first[row + 1];
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> order(first.back()), next = first;
  for (int64_t token = 0; token < ids.numel(); ++token) {
    if (const int64_t row = row_of(token); row >= 0) order[next[row]++] = token;
  }
  at::Tensor grad_weight = pooled_empty({num_rows, grad_output.size(-1)}, grad_output.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, grad_output.scalar_type(), "vocab_embedding_backward", [&] {
        sum_rows_of_ids(first, order, grad_output.const_data_ptr<scalar_t>(), grad_output.size(-1),
                        grad_weight.mutable_data_ptr<scalar_t>());
      });
  return grad_weight;
}

at::Tensor rows_of_own_tokens(const at::Tensor& ids, const at::Tensor& weight, int64_t vocab_start,
                              const std::vector<int64_t>& bounds, const TokensOfRanks& tokens,
                              const Group& group) {
  const auto ids_of = [&](int64_t rank) {
    std::vector<int64_t> of_rank;
    tokens.for_each(rank, [&](int64_t i) { of_rank.push_back(ids.const_data_ptr<int64_t>()[i]); });
    return of_rank;
  };
  const int64_t bytes = row_bytes(weight), rank = tokens.rank;
  const auto* rows = static_cast<const char*>(weight.const_data_ptr());
  const auto row_of = [&](int64_t id) { return rows + (id - vocab_start) * bytes; };
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.back() = tokens.starts[rank + 1] - tokens.starts[rank];
  shape.push_back(weight.size(1));
  at::Tensor output = pooled_empty(shape, weight.options());
  auto* out = static_cast<char*>(output.mutable_data_ptr());

  const std::vector<int64_t> own = ids_of(rank);
  const auto num_own = static_cast<int64_t>(own.size());
  const Owners owners(own.data(), num_own, bounds);
  std::vector<std::vector<Span>> outgoing(group.size), incoming(group.size);
  for (int64_t peer = 0; peer < group.size; ++peer) {
    if (peer == rank) continue;
    const std::vector<int64_t> theirs = ids_of(peer);
    const Owners of_theirs(theirs.data(), static_cast<int64_t>(theirs.size()), bounds);
    for (const int64_t token : of_theirs.tokens[rank]) {
      add_span(outgoing[peer], row_of(theirs[token]), bytes);
    }
    for (const int64_t token : owners.tokens[peer]) {
      add_span(incoming[peer], out + token * bytes, bytes);
    }
  }
  swap_bytes(kEmbedding, outgoing, incoming, group);
  if (bytes == 0) return output;
  for (const int64_t token : owners.tokens[rank]) {
    std::memcpy(out + token * bytes, row_of(own[token]), bytes);
  }
  at::parallel_for(0, num_own, kTokensPerTask, [&](int64_t token, int64_t end) {
    for (; token < end; ++token) {
      const int64_t first = owners.first[token];
      if (first != token) std::memcpy(out + token * bytes, out + first * bytes, bytes);
    }
  });
  return output;
}

at::Tensor gradient_of_own_tokens(const at::Tensor& grad_output, const at::Tensor& ids,
                                  int64_t num_rows, int64_t vocab_start,
                                  std::optional<int64_t> padding_idx,
                                  const std::vector<int64_t>& bounds, const TokensOfRanks& tokens,
                                  const Group& group) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  const int64_t bytes = grad_output.size(-1) * grad_output.element_size(), rank = tokens.rank;
  const auto owner_of = [&](int64_t token) {
    return std::upper_bound(bounds.begin(), bounds.end(), id[token]) - bounds.begin() - 1;
  };
  // The tokens whose rows this rank has, in their order, in which their gradients are summed.
  std::vector<int64_t> found(ids.numel(), -1);  // the place of each among them
  std::vector<int64_t> ids_found;
  for (int64_t token = 0; token < ids.numel(); ++token) {
    if (id[token] == padding_idx || owner_of(token) != rank) continue;
    found[token] = static_cast<int64_t>(ids_found.size());
    ids_found.push_back(id[token]);
  }
  const auto num_found = static_cast<int64_t>(ids_found.size());
  const at::Tensor gradients =
      pooled_empty({num_found, grad_output.size(-1)}, grad_output.options());
  const auto* own = static_cast<const char*>(grad_output.const_data_ptr());
  auto* out = static_cast<char*>(gradients.mutable_data_ptr());

  std::vector<std::vector<Span>> outgoing(group.size), incoming(group.size);
  for (int64_t peer = 0; peer < group.size; ++peer) {
    int64_t number = 0;
    tokens.for_each(peer, [&](int64_t token) {
      const char* gradient = own + number++ * bytes;  // of a token of this rank
      if (id[token] == padding_idx || bytes == 0) return;
      if (found[token] >= 0 && peer == rank) {
        std::memcpy(out + found[token] * bytes, gradient, bytes);
      } else if (found[token] >= 0) {
        add_span(incoming[peer], out + found[token] * bytes, bytes);
      } else if (peer == rank) {
        add_span(outgoing[owner_of(token)], gradient, bytes);
      }
    });
  }
  swap_bytes(kEmbedding, outgoing, incoming, group);
  const at::Tensor of_found = at::from_blob(ids_found.data(), {num_found}, ids.options());
  return vocab_embedding_backward_loops(gradients, of_found, num_rows, vocab_start, padding_idx);
}

}  // namespace parallel_ext
