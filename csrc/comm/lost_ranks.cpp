#include "comm/lost_ranks.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace parallel_ext {
namespace {

std::atomic<LostRanks> known_lost_ranks{nullptr};

}  // namespace

void set_lost_ranks(LostRanks lost_ranks) { known_lost_ranks.store(lost_ranks); }

void throw_with_lost_ranks(const char* op, const std::string& group_name,
                           const std::exception& error) {
  const LostRanks lost_ranks = known_lost_ranks.load();
  const std::string missing = lost_ranks == nullptr ? "" : lost_ranks(group_name);
  C10_THROW_ERROR(Error, std::string(op) + ": " + missing + error.what());
}

}  // namespace parallel_ext
