// No GPU has run these kernels yet: the tests compile them, and run what each of their threads does
// (dropout_mask.h) on the CPU.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "dropout_cuda.h"

namespace parallel_ext {
namespace {

constexpr int64_t kThreads = 256;     // of a block
constexpr int64_t kMaxGrid = 0xffff;  // what CUDA allows for the y dimension

__device__ GridThread this_thread() {
  return {int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
          int64_t{blockIdx.y} * blockDim.y + threadIdx.y, int64_t{gridDim.x} * blockDim.x,
          int64_t{gridDim.y} * blockDim.y};
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    drop_kernel(const MaskPart part, const scalar_t* __restrict__ input,
                scalar_t* __restrict__ output) {
  drop_in_thread(part, this_thread(), input, output);
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    drop_and_add_kernel(const MaskPart part, const scalar_t* __restrict__ input,
                        scalar_t* __restrict__ output, const scalar_t* __restrict__ addend,
                        double factor, scalar_t* __restrict__ target) {
  drop_and_add_in_thread(part, this_thread(), input, output, addend, factor, target);
}

unsigned blocks_for(int64_t threads, int64_t of_block) {
  return static_cast<unsigned>(std::min(kMaxGrid, (threads + of_block - 1) / of_block));
}

template <typename... Parameters, typename... Args>
void launch(void (*kernel)(MaskPart, Parameters...), const MaskPart& part, int device,
            Args... args) {
  if (part.rows == 0 || part.size == 0) return;  // CUDA refuses an empty grid
  int64_t wide = kMaskLanes;                     // where rows are short, a block serves several
  while (wide < part.threads_per_row() && wide < kThreads) wide *= 2;
  const int64_t high = kThreads / wide;
  const dim3 grid(blocks_for(part.threads_per_row(), wide), blocks_for(part.rows, high));
  const dim3 block(static_cast<unsigned>(wide), static_cast<unsigned>(high));
  const c10::cuda::CUDAGuard on_device(static_cast<c10::DeviceIndex>(device));
  kernel<<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(part, args...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

template <typename scalar_t>
void drop_on_cuda(const MaskPart& part, const scalar_t* input, scalar_t* output, int device) {
  launch(drop_kernel<scalar_t>, part, device, input, output);
}

template <typename scalar_t>
void drop_and_add_on_cuda(const MaskPart& part, const scalar_t* input, scalar_t* output,
                          const scalar_t* addend, double factor, scalar_t* target, int device) {
  launch(drop_and_add_kernel<scalar_t>, part, device, input, output, addend, factor, target);
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                                         \
  template void drop_on_cuda(const MaskPart&, const scalar_t*, scalar_t*, int);                    \
  template void drop_and_add_on_cuda(const MaskPart&, const scalar_t*, scalar_t*, const scalar_t*, \
                                     double, scalar_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
