// What profilers see of an exchange between ranks.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <string>

#include "comm/comm.h"

namespace c10d {
class ProcessGroup;
}

namespace parallel_ext {

// A profiler's range of an exchange, from construction to destruction. Its name is
// "parallel_ext::<kind> <group> <size>", as in "parallel_ext::all_reduce tp 1.2 MB"; its one input
// is the number of bytes, as the counts of comm.h have it. The group is shown by its description,
// which a mesh gives its groups, or else by its name. Costs next to nothing while no profiler runs.
class ProfilerRange {
 public:
  ProfilerRange(const char* kind, int64_t bytes, const c10d::ProcessGroup& group);
  // Nothing for a rank alone. Throws if no live group has this name and size.
  ProfilerRange(const char* kind, int64_t bytes, const Group& group);

 private:
  void begin(const char* kind, int64_t bytes, const c10d::ProcessGroup& group);

  at::RecordFunction record_{at::RecordScope::FUNCTION};
};

}  // namespace parallel_ext
