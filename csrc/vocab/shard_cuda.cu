// The tests run this file on the CPU too, with one thread for each thread of a block.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/cuda_grid.h"
#include "base/exp.h"
#include "base/wide_store.h"
#include "vocab/shard_cuda.h"

namespace parallel_ext {
namespace {

// For kernels of which so many fit without spills: with few threads memory waits for them.
constexpr int kMoreBlocks = kLeastBlocks + 1;

// exp(x) for x < 88 in two instructions, to |x| 1e-7 relative: what is far below the maximum weighs
// little in a sum. 0 below the smallest normal number, NaN for NaN.
template <typename wide_t>
__device__ __forceinline__ wide_t fast_exp(wide_t x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(wide_t) == sizeof(float)) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
    return power;
  }
#endif
  return exp_below_88(x);
}

// The statistics of some numbers of a row. The sums use `base` instead of the maximum.
template <typename wide_t>
struct Part {
  wide_t max, base;
  double sum, smooth, weight, moment;
  int64_t id;
  bool found_nan;
};

template <typename wide_t>
__device__ Part<wide_t> empty_part() {
  return {kLowest<wide_t>, kLowest<wide_t>, 0, 0, 0, 0, 0, false};
}

// Logits of -inf only contribute nothing, but a NaN must still reach the sums.
template <typename wide_t>
__device__ __forceinline__ wide_t base_of(const Part<wide_t>& part) {
  return part.base == kLowest<wide_t> ? 0 : part.base;
}

// Makes the maximum the base of the sums. Nothing changes for a part that is empty or holds only
// -inf and NaN.
template <typename wide_t>
__device__ __forceinline__ void raise_base(Part<wide_t>& part) {
  if (part.base != kLowest<wide_t>) {
    const double step = static_cast<double>(part.base) - part.max;
    const wide_t factor = exp_below_88(static_cast<wide_t>(step));
    part.smooth += part.weight * step;
    part.moment = factor == 0 ? 0 : factor * (part.moment + step * part.sum);
    part.sum *= factor;
  }
  part.base = part.max;
}

// Adds numbers, whose columns follow those of the part so far.
template <int size, typename wide_t>
__device__ __forceinline__ void add(const wide_t (&z)[size], int64_t column, const wide_t* weight,
                                    const StatsRows& rows, Part<wide_t>& part) {
  wide_t max = kLowest<wide_t>;  // fmax leaves out NaN, so max is never NaN
  PARALLEL_EXT_UNROLL
  for (int i = 0; i < size; ++i) max = std::fmax(max, z[i]);
  if (max > part.max) {
    part.max = max;
    if (rows.id >= 0 && !part.found_nan) {
      PARALLEL_EXT_UNROLL
      for (int i = size - 1; i >= 0; --i) part.id = z[i] == max ? column + i : part.id;
    }
    if (part.base == kLowest<wide_t> || max > part.base + kAboveBase) raise_base(part);
  }
  const wide_t base = base_of(part);
  wide_t exponential[size], sum = 0;
  PARALLEL_EXT_UNROLL
  for (int i = 0; i < size; ++i) {
    exponential[i] = fast_exp(z[i] - base);
    sum += exponential[i];
  }
  part.sum += sum;
  if (rows.moment >= 0) {
    wide_t moment = 0;
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) {
      const wide_t x = z[i] - base;
      moment += x == kLowest<wide_t> ? 0 : exponential[i] * x;
    }
    part.moment += moment;
  }
  if (rows.smooth >= 0) {
    wide_t smooth = 0, total = 0;
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) {
      const wide_t own = weight == nullptr ? 1 : weight[column + i];
      smooth += own * (z[i] - base);
      total += own;
    }
    part.smooth += smooth;
    part.weight += total;
  }
  if (sum != sum && !part.found_nan) {  // by a NaN, or by inf - inf
    PARALLEL_EXT_UNROLL
    for (int i = size - 1; i >= 0; --i) {
      if (z[i] == z[i]) continue;
      part.found_nan = true;
      if (rows.id >= 0) part.id = column + i;
    }
  }
}

template <typename wide_t>
__device__ __forceinline__ void merge(Part<wide_t>& part, Part<wide_t> other) {
  if (part.found_nan == other.found_nan) {
    const bool tie = part.found_nan || part.max == other.max;
    const bool lower = tie ? other.id < part.id : other.max > part.max;
    part.id = lower ? other.id : part.id;
  } else if (other.found_nan) {
    part.found_nan = true;
    part.id = other.id;
  }
  part.max = other.max = other.max > part.max ? other.max : part.max;
  if (part.max > part.base) raise_base(part);
  if (other.max > other.base) raise_base(other);
  part.sum += other.sum;
  part.smooth += other.smooth;
  part.weight += other.weight;
  part.moment += other.moment;
}

// Logits as they are loaded. In whole words they take fewer registers than one by one.
template <typename scalar_t, int size>
struct Loaded {
  static constexpr int kCount = size;
  static constexpr size_t kBytes = size * sizeof(scalar_t);
  uint32_t words[(kBytes + 3) / 4];

  template <int count>
  __device__ __forceinline__ Loaded<scalar_t, count> part(int first) const {
    Loaded<scalar_t, count> result;
    std::memcpy(result.words, reinterpret_cast<const char*>(words) + first * sizeof(scalar_t),
                result.kBytes);
    return result;
  }
};

template <int size, typename scalar_t>
__device__ __forceinline__ Loaded<scalar_t, size> loaded(const scalar_t* logits) {
  const Pack<scalar_t, size> pack = *packs<size>(logits);
  Loaded<scalar_t, size> result;
  std::memcpy(result.words, &pack, sizeof(pack));
  return result;
}

template <typename scalar_t, int size, typename wide_t>
__device__ __forceinline__ void widen_all(const Loaded<scalar_t, size>& logits, wide_t (&z)[size]) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16> && size % 2 == 0) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; i += 2) {  // an instruction for each
      z[i] = __uint_as_float(logits.words[i / 2] << 16);
      z[i + 1] = __uint_as_float(logits.words[i / 2] & 0xffff0000);
    }
  } else
#endif
  {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) {
      scalar_t logit;
      std::memcpy(&logit, reinterpret_cast<const char*>(logits.words) + i * sizeof(logit),
                  sizeof(logit));
      z[i] = widen(logit);
    }
  }
}

// Calls use(column, logits) for the logits of a row that this thread serves: `size` of them where
// whole packs are aligned, one at a time before and after these. Each pack is loaded while `ahead`
// in front of it are used, else memory waits for arithmetic. Without `reads` they are undefined.
template <int size, int ahead, typename scalar_t, typename Use>
__device__ __forceinline__ void for_row(const scalar_t* row, int64_t columns, bool reads,
                                        const Use& use) {
  const int64_t thread = threadIdx.x, threads = blockDim.x, step = threads * size;
  const int64_t misplaced =
      reinterpret_cast<uintptr_t>(row) / sizeof(scalar_t) % static_cast<uint64_t>(size);
  const int64_t head = misplaced == 0 ? 0 : std::min<int64_t>(columns, size - misplaced);
  const int64_t tail = columns - (columns - head) % size;
  Loaded<scalar_t, 1> one;
  const auto use_one = [&](int64_t column) {
    if (reads) one = loaded<1>(row + column);
    use(column, one);
  };
  for (int64_t column = thread; column < head; column += threads) use_one(column);
  int64_t column = head + thread * size;
  Loaded<scalar_t, size> next[ahead];
  PARALLEL_EXT_UNROLL
  for (int i = 0; i < ahead; ++i) {
    const int64_t first = column + i * step;
    if (reads && first < tail) next[i] = loaded<size>(row + first);
  }
  for (; column < tail; column += ahead * step) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < ahead; ++i) {
      const int64_t own = column + i * step, later = own + ahead * step;
      if (own >= tail) break;
      const Loaded<scalar_t, size> logits = next[i];
      if (reads && later < tail) next[i] = loaded<size>(row + later);
      use(own, logits);
    }
  }
  for (column = tail + thread; column < columns; column += threads) use_one(column);
}

// Computes z of logits. The branches are outside of the loops.
template <typename scalar_t, int count, typename wide_t>
__device__ __forceinline__ void to_all_z(const Loaded<scalar_t, count>& logits, wide_t scale,
                                         wide_t cap, wide_t (&z)[count]) {
  widen_all(logits, z);
  if (cap != 0) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < count; ++i) z[i] = to_z(z[i], scale, cap);
  } else if (scale != 1) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < count; ++i) z[i] *= scale;
  }
}

template <int count, typename scalar_t, typename wide_t>
__device__ __forceinline__ void store_all(const wide_t (&values)[count], scalar_t* out) {
  Pack<scalar_t, count> pack;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<scalar_t, c10::BFloat16> && count % 2 == 0) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < count; i += 2) {  // rounds two numbers at once
      uint32_t pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[i + 1]), "f"(values[i]));
      std::memcpy(pack.value + i, &pair, sizeof(pair));
    }
  } else
#endif
  {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < count; ++i) store(values[i], pack.value + i);
  }
  if constexpr (sizeof(pack) == kWidest) {
    store_wide<sizeof(pack)>(&pack, packs<count>(out));
  } else {
    *packs<count>(out) = pack;
  }
}

template <typename scalar_t, typename wide_t>
__device__ void put_stats(const ShardOnCuda<scalar_t>& shard, const StatsRows& rows, int64_t token,
                          Part<wide_t> part, wide_t* partial_stats) {
  if (part.max > part.base) raise_base(part);
  const auto put = [&](int64_t row, wide_t value) {
    partial_stats[row * shard.num_tokens + token] = value;
  };
  const int64_t label = column_of(shard.labels[token], shard.vocab_start, shard.size);
  put(StatsRows::kMax, part.found_nan ? std::numeric_limits<wide_t>::quiet_NaN() : part.max);
  put(StatsRows::kSum, static_cast<wide_t>(part.sum));
  put(StatsRows::kTarget,
      label >= 0 ? to_z(widen(shard.logits[token * shard.stride + label]), shard.scale, shard.cap)
                 : 0);
  if (rows.smooth >= 0) {
    put(rows.smooth, static_cast<wide_t>(part.smooth));
    put(rows.smooth + 1, static_cast<wide_t>(part.weight));
  }
  if (rows.moment >= 0) put(rows.moment, static_cast<wide_t>(part.moment));
  if (rows.id >= 0) {
    const int64_t id = shard.size == 0 ? kLastId : shard.vocab_start + part.id;
    put(rows.id, bits_of_id<wide_t>(id));
  }
}

// The threads of a row read it once. Their parts are merged by halves of the threads, so always in
// the same order. `plain`: only the rows that every loss has; what no row needs takes no registers,
// so that a multiprocessor has room for more threads.
template <typename scalar_t, int size, bool plain>
__global__ void __launch_bounds__(kBlockThreads, plain ? kMoreBlocks : kLeastBlocks)
    stats_kernel(const ShardOnCuda<scalar_t> shard, const StatsRows wanted,
                 wide_of<scalar_t>* __restrict__ partial_stats) {
  const StatsRows rows = plain ? StatsRows(false, false, false) : wanted;
  using wide_t = wide_of<scalar_t>;
  __shared__ Part<wide_t> parts[kBlockThreads];
  Part<wide_t>* own = parts + threadIdx.y * blockDim.x + threadIdx.x;
  for_whole_rows(shard.num_tokens, [&](int64_t token) {
    Part<wide_t> part = empty_part<wide_t>();
    if (token < shard.num_tokens) {
      const scalar_t* row = shard.logits + token * shard.stride;
      for_row<size, 1>(row, shard.size, true, [&](int64_t column, const auto& logits) {
        constexpr int kCount = std::decay_t<decltype(logits)>::kCount;
        constexpr int kAtOnce = std::min<int>(kCount, sizeof(wide_t) == 8 ? 2 : 8);  // no spills
        PARALLEL_EXT_UNROLL
        for (int first = 0; first < kCount; first += kAtOnce) {
          wide_t z[kAtOnce];
          to_all_z(logits.template part<kAtOnce>(first), shard.scale, shard.cap, z);
          add(z, column + first, shard.weight, rows, part);
        }
      });
    }
    *own = part;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) merge(*own, own[half]);
    }
    if (threadIdx.x == 0 && token < shard.num_tokens) {
      put_stats(shard, rows, token, *own, partial_stats);
    }
    __syncthreads();  // before the next row's parts overwrite these
  });
}

// The gradients of neighbours with respect to their logits; `weight` and `label` count from the
// first of them.
template <int size, typename wide_t>
__device__ __forceinline__ void gradients(const wide_t (&z)[size], const RowFactors<wide_t>& factor,
                                          const wide_t* weight, int64_t label, wide_t scale,
                                          wide_t cap, wide_t (&grad)[size]) {
  PARALLEL_EXT_UNROLL
  for (int i = 0; i < size; ++i) {
    grad[i] = fast_exp((z[i] - factor.max) - factor.log_sum);
  }
  if (factor.entropy == 0) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) grad[i] *= factor.probability;
  } else {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) {
      const wide_t log_p = (z[i] - factor.max) - factor.log_sum;
      const wide_t p_log_p = log_p == kLowest<wide_t> ? 0 : grad[i] * log_p;  // 0 * log 0 is 0
      grad[i] = grad[i] * factor.probability + p_log_p * factor.entropy;
    }
  }
  if (weight == nullptr) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) grad[i] -= factor.column;
  } else {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) grad[i] -= factor.column * weight[i];
  }
  if (0 <= label && label < size) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) grad[i] -= i == label ? factor.label : 0;
  }
  if (cap != 0) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) {
      const wide_t t = z[i] / cap;
      grad[i] *= (1 - t) * (1 + t);
    }
  }
  if (scale != 1) {
    PARALLEL_EXT_UNROLL
    for (int i = 0; i < size; ++i) grad[i] *= scale;
  }
}

// Each logit is read before its gradient is written, by the same thread, so that the gradient may
// overwrite the logits.
template <typename scalar_t, int size>
__global__ void __launch_bounds__(kBlockThreads, kMoreBlocks)
    gradient_kernel(const ShardOnCuda<scalar_t> shard,
                    const wide_of<scalar_t>* __restrict__ normalizer,
                    const wide_of<scalar_t>* __restrict__ factors, scalar_t* grad_logits,
                    int64_t grad_stride) {
  using wide_t = wide_of<scalar_t>;
  for_whole_rows(shard.num_tokens, [&](int64_t token) {
    if (token >= shard.num_tokens) return;
    const RowFactors<wide_t> factor(normalizer, factors, shard.num_tokens, token);
    const bool all_zero = factor.all_zero();
    const int64_t label = column_of(shard.labels[token], shard.vocab_start, shard.size);
    const scalar_t* row = shard.logits + token * shard.stride;
    scalar_t* out = grad_logits + token * grad_stride;
    for_row<size, 2>(row, shard.size, !all_zero, [&](int64_t column, const auto& logits) {
      constexpr int kCount = std::decay_t<decltype(logits)>::kCount;
      wide_t z[kCount], grad[kCount] = {};
      if (!all_zero) {
        to_all_z(logits, shard.scale, shard.cap, z);
        gradients(z, factor, shard.weight == nullptr ? nullptr : shard.weight + column,
                  label - column, shard.scale, shard.cap, grad);
      }
      store_all(grad, out + column);
    });
  });
}

}  // namespace

// Runs for an empty shard too, whose statistics must be written.
template <typename scalar_t>
void vocab_stats_on_cuda(const ShardOnCuda<scalar_t>& shard, const StatsRows& rows,
                         wide_of<scalar_t>* partial_stats, int device) {
  if (shard.num_tokens == 0) return;                     // CUDA refuses an empty grid
  constexpr int kSize = 2 * kWidest / sizeof(scalar_t);  // two loads before the first use
  constexpr int64_t kLeast = 8;  // of these a thread takes, or merging takes longer than reading
  const bool plain = rows.count == StatsRows(false, false, false).count;
  launch(plain ? stats_kernel<scalar_t, kSize, true> : stats_kernel<scalar_t, kSize, false>,
         grid_of_whole_rows(shard.num_tokens, shard.size / (kSize * kLeast)), device, shard, rows,
         partial_stats);
}

template <typename scalar_t>
void vocab_gradient_on_cuda(const ShardOnCuda<scalar_t>& shard, const wide_of<scalar_t>* normalizer,
                            const wide_of<scalar_t>* factors, scalar_t* grad_logits,
                            int64_t grad_stride, int device) {
  if (shard.num_tokens == 0 || shard.size == 0) return;
  // A logit and its gradient have the same position in their packs if both distances are whole
  // packs.
  const uint64_t from_logits = address(grad_logits) - address(shard.logits);
  const uint64_t from_stride = (grad_stride - shard.stride) * sizeof(scalar_t);
  with_size<scalar_t>(from_logits | from_stride, [&](auto size) {
    launch(gradient_kernel<scalar_t, size>, grid_of_whole_rows(shard.num_tokens, shard.size / size),
           device, shard, normalizer, factors, grad_logits, grad_stride);
  });
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                                     \
  template void vocab_stats_on_cuda(const ShardOnCuda<scalar_t>&, const StatsRows&,            \
                                    wide_of<scalar_t>*, int);                                  \
  template void vocab_gradient_on_cuda(const ShardOnCuda<scalar_t>&, const wide_of<scalar_t>*, \
                                       const wide_of<scalar_t>*, scalar_t*, int64_t, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
