// The process groups that this process knows: which of its threads a group belongs to, and which of
// the group's ranks share memory. Collectives are in comm.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/comm.h"
#include "comm/lost_ranks.h"
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

// Runs the part of a collective that the process group does. Its own errors, of gloo, name nobody.
template <typename Run>
auto in_process_group(const char* op, const ProcessGroup& group, const Run& run) {
  try {
    return run();
  } catch (const std::runtime_error& error) {
    throw_with_lost_ranks(op, group->getGroupName(), error);
  }
}

// What the ranks of a group share, for CPU tensors.
struct Sharing {
  // Memory of the ranks of this host; null where all communicate through the group alone, as where
  // one of several hosts has a single rank.
  std::shared_ptr<SharedMemory> memory;
  std::vector<int64_t> leaders;  // the first rank of each host, in the order of the group

  bool on_one_host() const { return leaders.size() == 1; }
};

// Finds out what the ranks of a group share. To be called between the begin and the end of a
// collective: the first call of a group communicates.
std::shared_ptr<const Sharing> sharing_of(const char* op, const ProcessGroup& group);

// The memory that all ranks of a group share; null where there is none. Otherwise the same.
std::shared_ptr<SharedMemory> shared_memory_of(const char* op, const ProcessGroup& group);

at::Tensor empty_for_all(const ProcessGroup& group, const at::Tensor& part);

// Contiguous `part` of every rank -> [ranks, *part.shape], through the group.
at::Tensor gather_into_new(const ProcessGroup& group, const at::Tensor& part,
                           const c10d::AllgatherOptions& options = {});

}  // namespace parallel_ext
