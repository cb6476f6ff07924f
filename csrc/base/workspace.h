// Large CPU tensors whose memory is kept from call to call. glibc maps blocks above 32 MiB again
// for every allocation, and the page faults of new memory cost more than the work on it.
#pragma once

#include <ATen/core/Tensor.h>

namespace parallel_ext {

// An uninitialised tensor, like at::empty. It may be returned, saved and kept: its memory is reused
// only when no tensor and no view of it is left. Small tensors and those of other devices come from
// at::empty.
at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Frees the memory that is kept and not in use, and returns the number of bytes.
int64_t release_workspaces();

}  // namespace parallel_ext
