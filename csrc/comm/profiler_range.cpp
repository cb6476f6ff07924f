#include "comm/profiler_range.h"

#include <array>
#include <cstdio>
#include <string_view>

#include "comm/known_groups.h"

namespace parallel_ext {
namespace {

std::string shown(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  auto size = static_cast<double>(bytes);
  size_t unit = 0;
  for (; size >= 999.5 && unit + 1 < kUnits.size(); ++unit) size /= 1000;
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g %s", size, kUnits[unit]);
  return text;
}

}  // namespace

ProfilerRange::ProfilerRange(const char* kind, int64_t bytes, const c10d::ProcessGroup& group) {
  if (record_.isActive()) begin(kind, bytes, group);
}

ProfilerRange::ProfilerRange(const char* kind, int64_t bytes, const Group& group) {
  if (!group.alone() && record_.isActive()) begin(kind, bytes, *find_group(kind, group));
}

void ProfilerRange::begin(const char* kind, int64_t bytes, const c10d::ProcessGroup& group) {
  const std::string& description = group.getGroupDesc();
  const bool described = !description.empty() && description != "undefined";
  const std::string& label = described ? description : group.getGroupName();
  const std::string name = "parallel_ext::" + (kind + (" " + label) + " " + shown(bytes));
  const c10::IValue input(bytes);
  record_.before(std::string_view(name), c10::ArrayRef<const c10::IValue>(&input, 1));
}

}  // namespace parallel_ext
