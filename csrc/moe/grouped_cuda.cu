#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include "moe/grouped_cuda.h"

namespace parallel_ext {

bool has_grouped_products_on_cuda(int device) {
  int major = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major == 9 || major == 10;
}

}  // namespace parallel_ext
