// The random bits that decide each element of a dropout mask, and the elements that each CUDA
// thread serves. CPU loops and CUDA kernels share this, so that they draw the same mask. Nothing
// here needs a GPU, so that the tests can run the threads one after the other on a CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/grid_thread.h"
#include "base/number.h"
#include "base/philox.h"
#include "base/wide_store.h"

namespace parallel_ext {

// The 16 random bits of feature f of token t are half s mod 2 of word s / 2 of the Philox block
// with the counter (f / 128 * 16 + f mod 16, t, step, 0), where s = f / 16 mod 8: so 16 blocks,
// which a vector register computes side by side, serve 128 features in a row.
inline constexpr int64_t kMaskLanes = 16;
inline constexpr int64_t kMaskHalves = 8;
inline constexpr int64_t kMaskBlock = kMaskLanes * kMaskHalves;

struct MaskStream {
  uint32_t key0, key1, step, threshold;
};

// The random bits of features 128 * block + 16 * s + lane of a token, s in [0, 8).
PARALLEL_EXT_INLINE Philox draw_lane(const MaskStream& stream, uint32_t token, uint32_t block,
                                     uint32_t lane) {
  const uint32_t first = block * static_cast<uint32_t>(kMaskLanes) + lane;
  return philox({{first, token, stream.step, 0}}, stream.key0, stream.key1);
}

// Whether feature 128 * block + 16 * s + lane is kept, from word s / 2 of that draw and s mod 2.
PARALLEL_EXT_INLINE bool is_kept(const MaskStream& stream, uint32_t word, int half) {
  return ((word >> (16 * half)) & 0xffffu) >= stream.threshold;
}

// A thread serves 8 lanes of a block, half of it, so that it reads and writes 8 adjacent elements
// at once.
inline constexpr int64_t kMaskRun = 8;

// A part [rows, size] of the mask, which begins at a token and a feature.
struct MaskPart {
  MaskStream stream;
  uint32_t token;
  int64_t feature, rows, size;

  PARALLEL_EXT_INLINE int64_t inside() const { return feature % kMaskBlock; }  // its first block
  PARALLEL_EXT_INLINE int64_t blocks_per_row() const {
    return (inside() + size + kMaskBlock - 1) / kMaskBlock;
  }
  PARALLEL_EXT_INLINE int64_t threads_per_row() const {
    return blocks_per_row() * (kMaskLanes / kMaskRun);
  }
};

// The runs of a thread in one block of a row: run s begins at `column` + 16 * s. Any element of
// them may lie outside of the part.
struct MaskRuns {
  MaskStream stream;
  int64_t row, column;
  Philox bits[kMaskRun];

  PARALLEL_EXT_INLINE int64_t column_of(int s) const { return column + s * kMaskLanes; }
  PARALLEL_EXT_INLINE bool kept(int s, int j) const {
    return is_kept(stream, bits[j].word[s / 2], s % 2);
  }
};

// Calls use(runs) for the work of a thread.
template <typename Use>
PARALLEL_EXT_INLINE void for_runs(const MaskPart& part, const GridThread& thread, const Use& use) {
  const int64_t threads = part.threads_per_row(), halves = kMaskLanes / kMaskRun;
  for (int64_t row = thread.y; row < part.rows; row += thread.num_y) {
    for (int64_t x = thread.x; x < threads; x += thread.num_x) {
      const int64_t block = x / halves, lane = x % halves * kMaskRun;
      MaskRuns runs{part.stream, row, block * kMaskBlock + lane - part.inside(), {}};
      PARALLEL_EXT_UNROLL
      for (int j = 0; j < kMaskRun; ++j) {
        runs.bits[j] = draw_lane(part.stream, part.token + static_cast<uint32_t>(row),
                                 static_cast<uint32_t>(part.feature / kMaskBlock + block),
                                 static_cast<uint32_t>(lane + j));
      }
      use(runs);
    }
  }
}

// Calls copy(i, j) for each element j of a run that lies in the part.
template <typename Copy>
PARALLEL_EXT_INLINE void for_elements(const MaskPart& part, int64_t row, int64_t column,
                                      const Copy& copy) {
  PARALLEL_EXT_UNROLL
  for (int j = 0; j < kMaskRun; ++j) {
    const bool in_part = 0 <= column + j && column + j < part.size;
    if (in_part) copy(row * part.size + column + j, j);
  }
}

// A run in memory, which starts at a multiple of 16 bytes: as wide as a thread can load and store.
template <typename scalar_t>
struct alignas(16) RunWords {
  uint32_t word[kMaskRun * sizeof(scalar_t) / sizeof(uint32_t)];
};

// Whether all runs that lie in the part as a whole start there. `addresses`: of all data, or-ed.
template <typename scalar_t>
bool has_whole_runs(const MaskPart& part, uint64_t addresses) {
  return ((part.size | part.inside()) * sizeof(scalar_t) | addresses) % 16 == 0;
}

template <bool whole_runs, typename scalar_t>
PARALLEL_EXT_INLINE void load_run(const MaskPart& part, int64_t row, int64_t column,
                                  const scalar_t* data, scalar_t (&run)[kMaskRun]) {
  if (whole_runs && 0 <= column && column + kMaskRun <= part.size) {
    const auto words =
        *reinterpret_cast<const RunWords<scalar_t>*>(data + row * part.size + column);
    std::memcpy(run, &words, sizeof(run));
  } else {
    for_elements(part, row, column, [&](int64_t i, int j) { run[j] = data[i]; });
  }
}

template <bool whole_runs, typename scalar_t>
PARALLEL_EXT_INLINE void store_run(const MaskPart& part, int64_t row, int64_t column,
                                   const scalar_t (&run)[kMaskRun], scalar_t* data) {
  if (whole_runs && 0 <= column && column + kMaskRun <= part.size) {
    store_wide<sizeof(run)>(run, data + row * part.size + column);
  } else {
    for_elements(part, row, column, [&](int64_t i, int j) { data[i] = run[j]; });
  }
}

// The work of one thread of the kernels in linear/dropout_cuda.h.

template <bool whole_runs, typename scalar_t>
PARALLEL_EXT_INLINE void drop_in_thread(const MaskPart& part, const GridThread& thread,
                                        const scalar_t* __restrict__ input, double factor,
                                        scalar_t* __restrict__ output) {
  constexpr int kAtOnce = 8 / sizeof(scalar_t);  // loaded before the first is used
  const auto wide_factor = static_cast<wide_of<scalar_t>>(factor);
  for_runs(part, thread, [&](const MaskRuns& runs) {
    PARALLEL_EXT_UNROLL
    for (int first = 0; first < kMaskHalves; first += kAtOnce) {
      scalar_t run[kAtOnce][kMaskRun] = {};
      PARALLEL_EXT_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        load_run<whole_runs>(part, runs.row, runs.column_of(first + k), input, run[k]);
      }
      PARALLEL_EXT_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        PARALLEL_EXT_UNROLL
        for (int j = 0; j < kMaskRun; ++j) {
          store(runs.kept(first + k, j) ? widen(run[k][j]) * wide_factor : 0, run[k] + j);
        }
        store_run<whole_runs>(part, runs.row, runs.column_of(first + k), run[k], output);
      }
    }
  });
}

template <bool whole_runs, typename scalar_t>
PARALLEL_EXT_INLINE void drop_and_add_in_thread(const MaskPart& part, const GridThread& thread,
                                                const scalar_t* __restrict__ input,
                                                scalar_t* __restrict__ output,
                                                const scalar_t* __restrict__ addend, double factor,
                                                scalar_t* __restrict__ target) {
  const auto wide_factor = static_cast<wide_of<scalar_t>>(factor);
  for_runs(part, thread, [&](const MaskRuns& runs) {
    PARALLEL_EXT_UNROLL
    for (int s = 0; s < kMaskHalves; ++s) {
      const int64_t row = runs.row, column = runs.column_of(s);
      scalar_t run[kMaskRun] = {}, more[kMaskRun] = {}, sum[kMaskRun] = {};
      load_run<whole_runs>(part, row, column, input, run);
      load_run<whole_runs>(part, row, column, addend, more);
      load_run<whole_runs>(part, row, column, target, sum);
      PARALLEL_EXT_UNROLL
      for (int j = 0; j < kMaskRun; ++j) {
        const bool kept = runs.kept(s, j);
        run[j] = kept ? run[j] : scalar_t(0);
        if (kept) store(widen(sum[j]) + wide_factor * widen(more[j]), sum + j);
      }
      store_run<whole_runs>(part, row, column, run, output);
      store_run<whole_runs>(part, row, column, sum, target);
    }
  });
}

}  // namespace parallel_ext
