// What the ops that read the experts of tokens want of these.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

namespace parallel_ext {

// `position` is that of the id among those of all tokens, top_k each.
inline void check_expert_id(const char* op, int64_t id, int64_t position, int64_t top_k,
                            int64_t num_experts) {
  TORCH_CHECK_INDEX(0 <= id && id < num_experts, op, ": choice ", position % top_k, " of token ",
                    position / top_k, " is expert ", id, ", outside of [0, ", num_experts, ")");
}

}  // namespace parallel_ext
