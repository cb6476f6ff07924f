// Lists of the places in memory that make up a message.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/shared_memory.h"

namespace parallel_ext {

// Neighbours in memory become one span.
inline void add_span(std::vector<Span>& spans, const void* data, int64_t bytes) {
  if (bytes == 0) return;
  auto* start = static_cast<char*>(const_cast<void*>(data));
  if (!spans.empty() && static_cast<char*>(spans.back().data) + spans.back().bytes == start) {
    spans.back().bytes += bytes;
  } else {
    spans.push_back({start, bytes});
  }
}

}  // namespace parallel_ext
