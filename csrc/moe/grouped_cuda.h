// What a GPU has to say about grouped products. It exists in builds with PARALLEL_EXT_WITH_CUDA.
#pragma once

namespace parallel_ext {

// Whether torch has grouped products of bf16 for the GPU that wait for no host. It has them for
// compute capability 9 and 10; elsewhere it reads the offsets on the host, and loops.
bool has_grouped_products_on_cuda(int device);

}  // namespace parallel_ext
