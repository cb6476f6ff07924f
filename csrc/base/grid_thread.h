// One thread of a CUDA grid of any size, for kernels and for what runs their threads on a CPU.
#pragma once

#include <cstdint>

namespace parallel_ext {

// Where it is, and how far it is to its next piece of work.
struct GridThread {
  int64_t x, y, num_x, num_y;
};

}  // namespace parallel_ext
