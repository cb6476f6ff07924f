// Large CPU tensors whose memory is kept from call to call. glibc maps blocks above 32 MiB anew
// each time, and the page faults of fresh memory cost more than what is done with it.
#pragma once

#include <ATen/core/Tensor.h>

namespace parallel_ext {

// An uninitialised tensor, like at::empty. It may be handed out, saved and kept by anyone: its
// memory is used again only when no tensor and no view of it is left. Small ones and those of other
// devices are at::empty's own.
at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Gives back what is kept and not in use; the number of bytes.
int64_t release_workspaces();

}  // namespace parallel_ext
