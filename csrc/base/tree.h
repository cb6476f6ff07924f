// Sums over a tree that depends on the number of addends alone, never on who holds them: the order
// of every sum that must have the same bits on any layout.
//
// A node (start, width), with `width` a power of two that divides `start`, covers the addends
// [start, start + width). Its value is that of its left half plus that of its right half, or that
// of the left one where the other covers nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace parallel_ext {

struct TreeNode {
  int64_t start, width;
};

// The fewest nodes of the tree over `count` addends that cover just [begin, end), in order.
std::vector<TreeNode> maximal_nodes(int64_t begin, int64_t end, int64_t count);

// Whether the nodes follow each other and cover the range of one node, or its first part.
bool make_a_node(const std::vector<TreeNode>& nodes);

// The sum of `values`, of equal shape and contiguous, each the value of one of the `nodes`, which
// make one: added in fp32, or in fp64 where they and `dtype` are, and cast once to `dtype`.
at::Tensor tree_sum(const std::vector<TreeNode>& nodes, const std::vector<at::Tensor>& values,
                    at::ScalarType dtype);

// The sum of `addends`, which are the nodes (0, 1), (1, 1), ... of the tree.
at::Tensor tree_sum(const std::vector<at::Tensor>& addends, at::ScalarType dtype);

// The sum of the rows of [N, W], in an order that depends on N alone: added in fp32, or in fp64 for
// fp64, and cast once to `dtype`.
at::Tensor column_sums(const at::Tensor& rows, at::ScalarType dtype);

}  // namespace parallel_ext
