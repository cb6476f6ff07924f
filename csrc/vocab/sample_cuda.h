// The passes of vocab_argmax and vocab_sample over a shard of the logits, and the small steps
// between them, as CUDA kernels. They exist in builds with PARALLEL_EXT_WITH_CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vocab/sample_numbers.h"

namespace parallel_ext {

// Of candidates [B, 2] of vocab/sample.h. The best is a NaN, else the largest score; of equal ones
// the lowest id.
struct Candidate {
  double score;
  int64_t id;
};

// A search for the order of a logit, digit by digit: the digits that are found, and what is still
// needed of the logits that begin with them.
struct DigitSearch {
  int64_t prefix, needed;
};

// A shard of the logits, of which `parts` blocks share a row. Rows need no alignment.
template <typename scalar_t>
struct LogitsOnCuda {
  const scalar_t* logits;  // [num_rows, size], rows `stride` numbers apart
  int64_t num_rows, size, stride, vocab_start, parts;
};

// All blocks together fill a GPU, and each has something to do.
inline int64_t parts_of_row(int64_t num_rows, int64_t size) {
  constexpr int64_t kBlocks = 2048, kLeast = 1024;
  const auto pieces = [](int64_t total, int64_t of) {
    return std::max<int64_t>(1, (total + of - 1) / of);
  };
  return std::min(pieces(kBlocks, std::max<int64_t>(num_rows, 1)), pieces(size, kLeast));
}

// The kernels run on the current stream of the device. Their atomics add integers: same inputs,
// same bits.

// Fills candidates [parts, num_rows] with the best of each part.
template <typename scalar_t>
void argmax_on_cuda(const LogitsOnCuda<scalar_t>& logits, Candidate* candidates, int device);

// Of candidates [count, num_rows], the best of each row: itself, or only its id, or that and -1
// where its score is not finite. One of `best` and `ids` may be null.
void best_on_cuda(const Candidate* candidates, int64_t count, int64_t num_rows, bool only_finite,
                  Candidate* best, int64_t* ids, int device);

struct Digit {
  const Candidate* max;  // [num_rows], or null: a logit counts 1, and not its mass
  double temperature, scale;
  const DigitSearch* least;   // [num_rows], lower orders do not count; or null
  const DigitSearch* search;  // [num_rows], not read for the highest digit
  int64_t shift;
};

// Adds to sums [num_rows, kDigits] what vocab_shard_mass of vocab/sample.h makes.
void digit_sums_on_cuda(const LogitsOnCuda<float>& logits, const Digit& digit, int64_t* sums,
                        int device);

struct Share {
  bool first;     // the search starts: at the top_k-th largest, or else
  int64_t top_k;  // where the share top_p of the sum is reached
  double top_p;
};

// Takes the next digit by sums [count, num_rows, kDigits] of all ranks, the highest at which the
// sum from the largest logit on reaches what is needed.
void next_digit_on_cuda(const int64_t* sums, int64_t count, int64_t num_rows, const Share& share,
                        DigitSearch* search, int device);

struct Draw {
  double temperature;
  const DigitSearch* lowest;  // [num_rows], its order: lower logits are out; or null
  const Candidate* max;       // [num_rows]: logits below its score + by_min_p are out; or null
  double by_min_p;
  uint64_t seed;
  uint32_t step;
};

// Fills candidates [parts, num_rows] with the best of each part, as vocab_shard_draw.
void draw_on_cuda(const LogitsOnCuda<float>& logits, const Draw& draw, Candidate* candidates,
                  int device);

}  // namespace parallel_ext
