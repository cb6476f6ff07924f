// The ops of vocab/sample.cpp by the kernels of vocab/sample_cuda.h: a few launches, and with a
// group the exchanges between them. The host waits for nothing.
#ifdef PARALLEL_EXT_WITH_CUDA

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "vocab/sample.h"
#include "vocab/sample_cuda.h"

namespace parallel_ext {
namespace {

template <typename scalar_t>
LogitsOnCuda<scalar_t> on_cuda(const at::Tensor& logits, int64_t vocab_start) {
  const int64_t num_rows = logits.size(0), size = logits.size(1);
  return {logits.const_data_ptr<scalar_t>(), num_rows, size, logits.stride(0), vocab_start,
          parts_of_row(num_rows, size)};
}

template <typename Record>
Record* records(const at::Tensor& pairs) {
  static_assert(sizeof(Record) == 2 * sizeof(int64_t));
  return reinterpret_cast<Record*>(pairs.mutable_data_ptr<int64_t>());
}

at::Tensor empty_ids(at::IntArrayRef sizes, const at::Tensor& logits) {
  return at::empty(sizes, logits.options().dtype(at::kLong));
}

// Candidates [count, B, 2] -> the best of each row [B, 2].
at::Tensor best_candidates(const at::Tensor& candidates) {
  at::Tensor best = empty_ids({candidates.size(1), 2}, candidates);
  best_on_cuda(records<Candidate>(candidates), candidates.size(0), candidates.size(1),
               /*only_finite=*/false, records<Candidate>(best), nullptr, candidates.get_device());
  return best;
}

// Gathers the best candidates of every rank [ranks, B, 2]. Without a group it returns the parts
// [parts, B, 2], whose best the next kernel finds as well.
at::Tensor candidates_of_all(const char* op, const at::Tensor& parts, const Group& group) {
  return group.alone() ? parts : all_gather(op, best_candidates(parts), group);
}

at::Tensor best_ids(const at::Tensor& candidates, bool only_finite) {
  at::Tensor ids = empty_ids({candidates.size(1)}, candidates);
  best_on_cuda(records<Candidate>(candidates), candidates.size(0), candidates.size(1), only_finite,
               nullptr, ids.mutable_data_ptr<int64_t>(), candidates.get_device());
  return ids;
}

// The largest logits of all ranks or of the parts of the only one [.., B, 2].
at::Tensor largest_of_all(const char* op, const at::Tensor& logits, int64_t vocab_start,
                          const Group& group) {
  const int64_t num_rows = logits.size(0);
  at::Tensor parts = empty_ids({parts_of_row(num_rows, logits.size(1)), num_rows, 2}, logits);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, logits.scalar_type(), "vocab_argmax",
                                  [&] {
                                    argmax_on_cuda(on_cuda<scalar_t>(logits, vocab_start),
                                                   records<Candidate>(parts), logits.get_device());
                                  });
  return candidates_of_all(op, parts, group);
}

// The order [B, 2] (DigitSearch) of the lowest logit that `share` leaves, of the logits that
// `digit` counts.
at::Tensor order_by_digits(const LogitsOnCuda<float>& logits, Digit digit, Share share,
                           const at::Tensor& logits_tensor, const Group& group) {
  const int64_t num_rows = logits.num_rows;
  const int device = logits_tensor.get_device();
  const at::Tensor sums = at::zeros({kLogitBits / kDigitBits, num_rows, kDigits},
                                    logits_tensor.options().dtype(at::kLong));
  at::Tensor search = empty_ids({num_rows, 2}, logits_tensor);
  digit.search = records<DigitSearch>(search);
  digit.shift = kLogitBits;
  share.first = true;
  for (const at::Tensor& own : sums.unbind(0)) {
    digit.shift -= kDigitBits;
    digit_sums_on_cuda(logits, digit, own.mutable_data_ptr<int64_t>(), device);
    const at::Tensor all = all_gather(kSample, own, group);
    next_digit_on_cuda(all.const_data_ptr<int64_t>(), all.size(0), num_rows, share,
                       records<DigitSearch>(search), device);
    share.first = false;
  }
  return search;
}

}  // namespace

at::Tensor vocab_argmax_by_kernels(const at::Tensor& logits, int64_t vocab_start,
                                   const Group& group) {
  return best_ids(largest_of_all("vocab_argmax", logits, vocab_start, group),
                  /*only_finite=*/false);
}

at::Tensor vocab_sample_by_kernels(const SampleShard& shard, int64_t vocab_size,
                                   const Filters& filters, int64_t seed, int64_t step,
                                   const Group& group) {
  const at::Tensor& tensor = shard.logits;
  const auto logits = on_cuda<float>(tensor, shard.vocab_start);
  Draw draw{filters.temperature,        nullptr, nullptr, 0, static_cast<uint64_t>(seed),
            static_cast<uint32_t>(step)};
  Digit digit{nullptr, filters.temperature, mass_scale(vocab_size), nullptr, nullptr, 0};
  at::Tensor max, by_top_k, by_top_p;
  if (filters.top_p < 1 || filters.min_p > 0) {
    max = best_candidates(largest_of_all(kSample, tensor, shard.vocab_start, group));
  }
  if (filters.with_top_k(vocab_size)) {
    by_top_k = order_by_digits(logits, digit, {true, filters.top_k, 1}, tensor, group);
    draw.lowest = digit.least = records<DigitSearch>(by_top_k);
  }
  if (filters.top_p < 1) {
    digit.max = records<Candidate>(max);
    by_top_p = order_by_digits(logits, digit, {true, 0, filters.top_p}, tensor, group);
    draw.lowest = records<DigitSearch>(by_top_p);
  }
  if (filters.min_p > 0) {
    draw.max = records<Candidate>(max);
    draw.by_min_p = filters.temperature * std::log(filters.min_p);
  }
  at::Tensor parts = empty_ids({logits.parts, logits.num_rows, 2}, tensor);
  draw_on_cuda(logits, draw, records<Candidate>(parts), tensor.get_device());
  return best_ids(candidates_of_all(kSample, parts, group), /*only_finite=*/true);
}

}  // namespace parallel_ext

#endif
