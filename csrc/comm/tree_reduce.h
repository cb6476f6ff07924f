// The sum of what the blocks of a dimension yield, over the ranks that hold them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/comm.h"

namespace parallel_ext {

// The blocks of all ranks: those of rank r are [bounds[r], bounds[r + 1]).
struct BlocksOfRanks {
  std::vector<int64_t> bounds;
  int64_t rank;  // this one
};

// Throws unless this rank has `num_own` of all blocks, which `split` gives to the ranks, each some.
BlocksOfRanks check_own_blocks(const char* op, int64_t num_own, int64_t num_blocks,
                               const Group& group);

// What each of all `num_blocks` yields, in order, given that of this rank's blocks [own, ...].
std::vector<at::Tensor> of_all_blocks(const char* op, const at::Tensor& of_own, int64_t num_blocks,
                                      const Group& group);

// Contiguous `addends` [own blocks, ...] of a rank -> the sum over the tree of all `num_blocks`
// (base/tree.h) in `dtype`; the same bits for any group. One all-gather of the nodes that a rank
// can sum up alone.
at::Tensor tree_reduce(const char* op, const at::Tensor& addends, int64_t num_blocks,
                       at::ScalarType dtype, const Group& group);

}  // namespace parallel_ext
