// The process groups that this process knows: which of its threads a group belongs to, and whether
// the ranks of a group share memory. Collectives are in comm.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/comm.h"
#include "comm/shared_memory.h"

namespace parallel_ext {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// Alive as long as the thread or the collective that it stands for.
using Token = std::shared_ptr<const bool>;

// A collective that has begun.
struct Turn {
  ProcessGroup group;
  Token collective;  // must live as long as the collective; null off the CPU
};

// Throws if no live group has this name, or if it has another size.
ProcessGroup find_group(const char* op, const Group& group);

// Comes before every collective. Raises where another thread of this process uses the group, or
// where the order check is on and other ranks begin another collective.
Turn begin_turn(const char* op, const char* kind, int64_t bytes, const at::Device& device,
                const Group& group);

// The memory that the ranks of a group share, for CPU tensors; null where they communicate through
// the group. To be called between the begin and the end of a collective: the first call of a group
// communicates.
std::shared_ptr<SharedMemory> shared_memory_of(const char* op, const ProcessGroup& group);

at::Tensor empty_for_all(const ProcessGroup& group, const at::Tensor& part);

// Contiguous `part` of every rank -> [ranks, *part.shape], through the group.
at::Tensor gather_into_new(const ProcessGroup& group, const at::Tensor& part,
                           const c10d::AllgatherOptions& options = {});

}  // namespace parallel_ext
