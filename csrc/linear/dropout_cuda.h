// drop and drop_and_add of linear/dropout.h as CUDA kernels: they draw the mask of the CPU loops,
// bit for bit. They exist in builds with PARALLEL_EXT_WITH_CUDA, for float, double, c10::BFloat16
// and c10::Half.
#pragma once

#include "base/dropout_mask.h"

namespace parallel_ext {

// All pointers are to [part.rows, part.size] on the device, contiguous and without overlap.
// The kernels run on the current stream of the device.
template <typename scalar_t>
void drop_on_cuda(const MaskPart& part, const scalar_t* input, double factor, scalar_t* output,
                  int device);

template <typename scalar_t>
void drop_and_add_on_cuda(const MaskPart& part, const scalar_t* input, scalar_t* output,
                          const scalar_t* addend, double factor, scalar_t* target, int device);

}  // namespace parallel_ext
