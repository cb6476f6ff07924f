// The tests run this file on the CPU too, with one thread for each thread of a block.
#include <c10/macros/Macros.h>

#include <cmath>
#include <limits>

#include "base/cuda_grid.h"
#include "vocab/sample_cuda.h"

namespace parallel_ext {
namespace {

constexpr int kAtOnce = 4;  // numbers that a thread loads before it works on them

__device__ __forceinline__ Candidate no_candidate() {
  return {-kInfinity, std::numeric_limits<int64_t>::max()};
}

__device__ __forceinline__ void take(Candidate& best, double score, int64_t id) {
  const bool nan = score != score, best_nan = best.score != best.score;
  const bool equal = score == best.score || (nan && best_nan);
  const bool better = nan != best_nan ? nan : score > best.score;
  if (better || (equal && id < best.id)) best = {score, id};
}

// The best of all threads, to the first of them. The next call may follow at once.
__device__ __forceinline__ Candidate best_of_block(const Candidate& own) {
  __shared__ Candidate of_thread[kBlockThreads];
  Candidate* const here = of_thread + threadIdx.x;
  *here = own;
  for (unsigned half = kBlockThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) take(*here, here[half].score, here[half].id);
  }
  const Candidate best = of_thread[threadIdx.x];
  __syncthreads();
  return best;
}

// Calls use(row, part) for the work of this block.
template <typename Use>
__device__ __forceinline__ void for_parts(int64_t num_rows, int64_t parts, const Use& use) {
  for (int64_t piece = blockIdx.x; piece < num_rows * parts; piece += gridDim.x) {
    use(piece / parts, piece % parts);
  }
}

struct Range {
  int64_t begin, end;
};

__device__ __forceinline__ Range range_of(int64_t part, int64_t parts, int64_t size) {
  const int64_t length = (size + parts - 1) / parts;
  return {std::min(size, part * length), std::min(size, (part + 1) * length)};
}

// Calls use(number, column) for those of a range that this thread serves.
template <typename scalar_t, typename Use>
__device__ __forceinline__ void for_numbers(const scalar_t* row, const Range& range,
                                            const Use& use) {
  for (int64_t first = range.begin + threadIdx.x; first < range.end;
       first += kAtOnce * kBlockThreads) {
    wide_of<scalar_t> number[kAtOnce];
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t column = first + i * kBlockThreads;
      number[i] = column < range.end ? widen(row[column]) : 0;
    }
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t column = first + i * kBlockThreads;
      if (column < range.end) use(number[i], column);
    }
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kBlockThreads)
    argmax_kernel(const LogitsOnCuda<scalar_t> logits, Candidate* __restrict__ candidates) {
  for_parts(logits.num_rows, logits.parts, [&](int64_t row, int64_t part) {
    Candidate best = no_candidate();
    for_numbers(
        logits.logits + row * logits.stride, range_of(part, logits.parts, logits.size),
        [&](auto number, int64_t column) { take(best, number, logits.vocab_start + column); });
    best = best_of_block(best);
    if (threadIdx.x == 0) candidates[part * logits.num_rows + row] = best;
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    best_kernel(const Candidate* __restrict__ candidates, int64_t count, int64_t num_rows,
                bool only_finite, Candidate* __restrict__ best_of_row, int64_t* __restrict__ ids) {
  for_parts(num_rows, 1, [&](int64_t row, int64_t) {
    Candidate best = no_candidate();
    for (int64_t i = threadIdx.x; i < count; i += kBlockThreads) {
      const Candidate other = candidates[i * num_rows + row];
      take(best, other.score, other.id);
    }
    best = best_of_block(best);
    if (threadIdx.x != 0) return;
    if (best_of_row != nullptr) best_of_row[row] = best;
    const bool finite = std::fabs(best.score) < kInfinity;
    if (ids != nullptr) ids[row] = only_finite && !finite ? -1 : best.id;
  });
}

constexpr int kOwnDigits = kDigits / kBlockThreads;  // of a thread
static_assert(kDigits % kBlockThreads == 0);

// The shared sums of a block are of 32 bits, which have fast atomics: three pieces of a mass, and
// of each some copies, since most logits have one of a few first digits.
constexpr int kPieces = 3, kPieceBits = 21, kCopies = 4;
// So many numbers add to a copy before it can overflow.
constexpr int64_t kIdsOfRound = int64_t{kCopies} << (32 - kPieceBits);
static_assert(kPieces * kPieceBits >= 62 && kIdsOfRound % kBlockThreads == 0);

__global__ void __launch_bounds__(kBlockThreads)
    digit_kernel(const LogitsOnCuda<float> logits, const Digit digit, int64_t* __restrict__ sums) {
  __shared__ uint32_t pieces[kPieces][kDigits][kCopies];
  const bool highest = digit.shift + kDigitBits == kLogitBits;
  uint32_t* const flat = &pieces[0][0][0];
  for (int i = threadIdx.x; i < kPieces * kDigits * kCopies; i += kBlockThreads) flat[i] = 0;
  __syncthreads();
  for_parts(logits.num_rows, logits.parts, [&](int64_t row, int64_t part) {
    const uint64_t prefix = highest ? 0 : digit.search[row].prefix;
    const uint64_t least = digit.least == nullptr ? 0 : digit.least[row].prefix;
    const double max = digit.max == nullptr ? 0 : digit.max[row].score;
    const auto mass_of = [&](float logit) -> uint64_t {
      if (digit.max == nullptr) return 1;
      const double mass = std::exp((logit - max) / digit.temperature) * digit.scale;
      return mass >= 0.5 ? static_cast<uint64_t>(mass + 0.5) : 0;  // 0 for a NaN
    };
    const auto add = [&](float logit, int64_t) {
      const uint64_t order = order_of(logit);
      if (order >> (digit.shift + kDigitBits) != prefix || order < least) return;
      const uint64_t mass = mass_of(logit);
      const int place = (order >> digit.shift) & (kDigits - 1), copy = threadIdx.x % kCopies;
      PARALLEL_EXT_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const uint32_t piece = (mass >> (i * kPieceBits)) & ((1u << kPieceBits) - 1);
        if (piece != 0) atomicAdd(&pieces[i][place][copy], piece);
      }
    };
    uint64_t total[kOwnDigits] = {};
    const Range all = range_of(part, logits.parts, logits.size);
    for (int64_t begin = all.begin; begin < all.end; begin += kIdsOfRound) {
      const Range round{begin, std::min(all.end, begin + kIdsOfRound)};
      for_numbers(logits.logits + row * logits.stride, round, add);
      __syncthreads();
      PARALLEL_EXT_UNROLL
      for (int own = 0; own < kOwnDigits; ++own) {
        PARALLEL_EXT_UNROLL
        for (int i = 0; i < kPieces; ++i) {
          uint32_t* const copies = pieces[i][own * kBlockThreads + threadIdx.x];
          PARALLEL_EXT_UNROLL
          for (int copy = 0; copy < kCopies; ++copy) {
            total[own] += uint64_t{copies[copy]} << (i * kPieceBits);
            copies[copy] = 0;
          }
        }
      }
      __syncthreads();
    }
    PARALLEL_EXT_UNROLL
    for (int own = 0; own < kOwnDigits; ++own) {
      if (total[own] == 0) continue;
      int64_t* const sum = sums + row * kDigits + own * kBlockThreads + threadIdx.x;
      atomicAdd(reinterpret_cast<unsigned long long*>(sum),
                static_cast<unsigned long long>(total[own]));
    }
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    next_digit_kernel(const int64_t* __restrict__ sums, int64_t count, int64_t num_rows,
                      const Share share, DigitSearch* search) {
  __shared__ int64_t up_to[kBlockThreads];  // a thread: the sum of its digits and all above
  for_parts(num_rows, 1, [&](int64_t row, int64_t) {
    const DigitSearch before = share.first ? DigitSearch{0, 0} : search[row];
    int64_t sum[kOwnDigits] = {}, own = 0;
    const int first = threadIdx.x * kOwnDigits;  // from the highest digit on
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < kOwnDigits; ++i) {
      for (int64_t rank = 0; rank < count; ++rank) {
        sum[i] += sums[(rank * num_rows + row) * kDigits + kDigits - 1 - (first + i)];
      }
      own += sum[i];
    }
    up_to[threadIdx.x] = own;
    for (unsigned step = 1; step < kBlockThreads; step *= 2) {
      __syncthreads();
      const int64_t more = threadIdx.x < step ? 0 : up_to[threadIdx.x - step];
      __syncthreads();
      up_to[threadIdx.x] += more;
    }
    __syncthreads();
    int64_t needed = before.needed;
    if (share.first && share.top_k > 0) {
      needed = share.top_k;
    } else if (share.first) {
      const int64_t total = up_to[kBlockThreads - 1];
      const auto part = static_cast<int64_t>(std::ceil(static_cast<double>(total) * share.top_p));
      needed = std::min(std::max<int64_t>(part, 1), total);
    }
    int64_t above = up_to[threadIdx.x] - own;
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < kOwnDigits; ++i) {
      const int place = first + i;
      const bool reached = above + sum[i] >= needed;
      if (reached ? above < needed || place == 0 : place == kDigits - 1) {
        search[row] = {before.prefix * kDigits + (kDigits - 1 - place), needed - above};
      }
      above += sum[i];
    }
    __syncthreads();  // before the next row's sums overwrite these
  });
}

// A thread takes the two ids of a Philox block. The logarithms of the noise take longer than all
// else: only ids that can still win have them, and the threads of a warp tell each other their
// best, so that these become few.
__global__ void __launch_bounds__(kBlockThreads)
    draw_kernel(const LogitsOnCuda<float> logits, const Draw draw,
                Candidate* __restrict__ candidates) {
  const int64_t start = logits.vocab_start, stop = start + logits.size;
  const int64_t pairs = (stop + 1) / 2 - start / 2;
  for_parts(logits.num_rows, logits.parts, [&](int64_t row, int64_t part) {
    const float* const own = logits.logits + row * logits.stride;
    double floor = draw.lowest == nullptr
                       ? -kInfinity
                       : logit_of(static_cast<uint32_t>(draw.lowest[row].prefix));
    if (draw.max != nullptr) {
      const double other = draw.max[row].score + draw.by_min_p;
      floor = other > floor ? other : floor;
    }
    Candidate best = no_candidate();
    double bound = -kInfinity;
    const Range range = range_of(part, logits.parts, pairs);
    for (int64_t first = range.begin; first < range.end; first += kBlockThreads) {
      const int64_t number = first + threadIdx.x, pair = start / 2 + number;
      double logit[2];
      bool stays[2];
      PARALLEL_EXT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int64_t id = 2 * pair + i;
        const bool is_own = number < range.end && start <= id && id < stop;
        logit[i] = is_own ? own[id - start] : -kInfinity;
        if (!(logit[i] < kInfinity)) take(best, std::numeric_limits<double>::quiet_NaN(), id);
        stays[i] = logit[i] > -kInfinity && logit[i] < kInfinity && !(logit[i] < floor);
      }
      if (stays[0] || stays[1]) {
        const Philox block =
            philox({{static_cast<uint32_t>(pair), static_cast<uint32_t>(row), draw.step, kDraw}},
                   static_cast<uint32_t>(draw.seed), static_cast<uint32_t>(draw.seed >> 32));
        PARALLEL_EXT_UNROLL
        for (int i = 0; i < 2; ++i) {
          const double u = uniform_of(block, i), scaled = logit[i] / draw.temperature;
          if (stays[i] && scaled + noise_below(u) >= bound) {
            take(best, scaled + noise_of(u), 2 * pair + i);
          }
        }
      }
      bound = best.score > bound ? best.score : bound;
      for (int mask = 16; mask > 0; mask /= 2) {
        const double other = __shfl_xor_sync(kAllLanes, bound, mask);
        bound = other > bound ? other : bound;
      }
    }
    best = best_of_block(best);
    if (threadIdx.x == 0) candidates[part * logits.num_rows + row] = best;
  });
}

}  // namespace

template <typename scalar_t>
void argmax_on_cuda(const LogitsOnCuda<scalar_t>& logits, Candidate* candidates, int device) {
  if (logits.num_rows == 0) return;
  launch(argmax_kernel<scalar_t>, grid_of_blocks(logits.num_rows * logits.parts), device, logits,
         candidates);
}

void best_on_cuda(const Candidate* candidates, int64_t count, int64_t num_rows, bool only_finite,
                  Candidate* best, int64_t* ids, int device) {
  if (num_rows == 0) return;
  launch(best_kernel, grid_of_blocks(num_rows), device, candidates, count, num_rows, only_finite,
         best, ids);
}

void digit_sums_on_cuda(const LogitsOnCuda<float>& logits, const Digit& digit, int64_t* sums,
                        int device) {
  if (logits.num_rows == 0 || logits.size == 0) return;
  launch(digit_kernel, grid_of_blocks(logits.num_rows * logits.parts), device, logits, digit, sums);
}

void next_digit_on_cuda(const int64_t* sums, int64_t count, int64_t num_rows, const Share& share,
                        DigitSearch* search, int device) {
  if (num_rows == 0) return;
  launch(next_digit_kernel, grid_of_blocks(num_rows), device, sums, count, num_rows, share, search);
}

void draw_on_cuda(const LogitsOnCuda<float>& logits, const Draw& draw, Candidate* candidates,
                  int device) {
  if (logits.num_rows == 0) return;
  launch(draw_kernel, grid_of_blocks(logits.num_rows * logits.parts), device, logits, draw,
         candidates);
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t) \
  template void argmax_on_cuda(const LogitsOnCuda<scalar_t>&, Candidate*, int)
PARALLEL_EXT_INSTANTIATE(float);
PARALLEL_EXT_INSTANTIATE(double);
PARALLEL_EXT_INSTANTIATE(c10::BFloat16);
PARALLEL_EXT_INSTANTIATE(c10::Half);
#undef PARALLEL_EXT_INSTANTIATE

}  // namespace parallel_ext
