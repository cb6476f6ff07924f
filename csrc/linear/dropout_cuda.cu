// The tests run the work of each thread (base/dropout_mask.h) on the CPU too.
#include "base/cuda_grid.h"
#include "linear/dropout_cuda.h"

namespace parallel_ext {
namespace {

template <typename scalar_t, bool whole_runs>
__global__ void __launch_bounds__(kBlockThreads)
    drop_kernel(const MaskPart part, const scalar_t* __restrict__ input, double factor,
                scalar_t* __restrict__ output) {
  drop_in_thread<whole_runs>(part, this_thread(), input, factor, output);
}

template <typename scalar_t, bool whole_runs>
__global__ void __launch_bounds__(kBlockThreads)
    drop_and_add_kernel(const MaskPart part, const scalar_t* __restrict__ input,
                        scalar_t* __restrict__ output, const scalar_t* __restrict__ addend,
                        double factor, scalar_t* __restrict__ target) {
  drop_and_add_in_thread<whole_runs>(part, this_thread(), input, output, addend, factor, target);
}

template <typename Kernel, typename... Args>
void launch_on(const MaskPart& part, int device, const Kernel& kernel, Args... args) {
  if (part.rows == 0 || part.size == 0) return;  // CUDA refuses an empty grid
  launch(kernel, grid_of_rows(part.rows, part.threads_per_row()), device, part, args...);
}

}  // namespace

template <typename scalar_t>
void drop_on_cuda(const MaskPart& part, const scalar_t* input, double factor, scalar_t* output,
                  int device) {
  const bool whole_runs = has_whole_runs<scalar_t>(part, address(input) | address(output));
  launch_on(part, device, whole_runs ? drop_kernel<scalar_t, true> : drop_kernel<scalar_t, false>,
            input, factor, output);
}

template <typename scalar_t>
void drop_and_add_on_cuda(const MaskPart& part, const scalar_t* input, scalar_t* output,
                          const scalar_t* addend, double factor, scalar_t* target, int device) {
  const bool whole_runs = has_whole_runs<scalar_t>(
      part, address(input) | address(output) | address(addend) | address(target));
  launch_on(part, device,
            whole_runs ? drop_and_add_kernel<scalar_t, true> : drop_and_add_kernel<scalar_t, false>,
            input, output, addend, factor, target);
}

#define PARALLEL_EXT_INSTANTIATE(scalar_t)                                                         \
  template void drop_on_cuda(const MaskPart&, const scalar_t*, double, scalar_t*, int);            \
  template void drop_and_add_on_cuda(const MaskPart&, const scalar_t*, scalar_t*, const scalar_t*, \
                                     double, scalar_t*, int);

PARALLEL_EXT_INSTANTIATE(float)
PARALLEL_EXT_INSTANTIATE(double)
PARALLEL_EXT_INSTANTIATE(c10::BFloat16)
PARALLEL_EXT_INSTANTIATE(c10::Half)

}  // namespace parallel_ext
