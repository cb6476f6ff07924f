// Blocks of a sharded dimension, whose borders no layout changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/product.h"
#include "comm/comm.h"

namespace parallel_ext {

using Blocks = std::vector<Range>;

// `bounds`: start and stop of each block in a rank's `size` indices, which they cover in order; of
// all blocks `copies` consecutive ones are the same.
Blocks blocks_of(const char* op, at::IntArrayRef bounds, int64_t size, int64_t copies = 1);

// The sizes of blocks, and their sum.
std::vector<int64_t> sizes_of(const Blocks& blocks);
int64_t width_of(const Blocks& blocks);

// Whether fixed_product_of_blocks may compute all blocks at once: they follow each other, and no
// product is so small that the place of its matrices decides its bits. `other_size`: rows of the
// product where its columns are in blocks, or columns where its rows are.
bool can_merge_blocks(const Blocks& blocks, int64_t other_size, at::ScalarType dtype);

// Throws if `copies` consecutive blocks leave some of all blocks over.
void check_copies(const char* op, int64_t copies, int64_t num_blocks);

// The gradient of rows that `copies` consecutive ones of all blocks share, over the tree of these;
// the ranks that hold one of them get the same. `of_blocks` [own blocks, rows, K]; `copies` were
// checked.
at::Tensor shared_grad(const char* op, const at::Tensor& of_blocks, int64_t copies,
                       int64_t num_blocks, const Group& group);

}  // namespace parallel_ext
