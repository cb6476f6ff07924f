// One thread of a CUDA grid of any size. Apart from base/cuda_grid.h, so that the tests can run the
// work of a thread on a CPU.
#pragma once

#include <cstdint>

namespace parallel_ext {

// The position of the thread, and the distance to its next piece of work.
struct GridThread {
  int64_t x, y, num_x, num_y;
};

}  // namespace parallel_ext
