#include "comm/tree_reduce.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/layout.h"
#include "base/tree.h"
#include "base/workspace.h"
#include "check.h"

namespace parallel_ext {

BlocksOfRanks check_own_blocks(const char* op, int64_t num_own, int64_t num_blocks,
                               const Group& group) {
  TORCH_CHECK_VALUE(num_blocks >= group.size, op, ": ", num_blocks, " blocks are too few for ",
                    group.size, " ranks");
  const std::vector<int64_t> bounds = split(num_blocks, group.size, 1);
  const int64_t rank = rank_in_group(op, group), own = bounds[rank + 1] - bounds[rank];
  TORCH_CHECK_VALUE(num_own == own, op, ": rank ", rank, " holds ", own, " of the ", num_blocks,
                    " blocks, got ", num_own);
  return {bounds, rank};
}

std::vector<at::Tensor> of_all_blocks(const char* op, const at::Tensor& of_own, int64_t num_blocks,
                                      const Group& group) {
  const std::vector<int64_t> bounds = split(num_blocks, group.size, 1);
  std::vector<int64_t> shape = of_own.sizes().vec();
  shape[0] = bounds[1];  // no rank has more than the first
  const at::Tensor message = pooled_empty(shape, of_own.options());
  message.narrow(0, 0, of_own.size(0)).copy_(of_own);
  const at::Tensor all = all_gather(op, message, group);
  std::vector<at::Tensor> in_order;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    for (int64_t i = 0; i < bounds[peer + 1] - bounds[peer]; ++i) in_order.push_back(all[peer][i]);
  }
  return in_order;
}

at::Tensor tree_reduce(const char* op, const at::Tensor& addends, int64_t num_blocks,
                       at::ScalarType dtype, const Group& group) {
  const auto [bounds, rank] = check_own_blocks(op, addends.size(0), num_blocks, group);
  const std::vector<at::Tensor> all_own = addends.unbind(0);
  if (group.alone()) return tree_sum(all_own, dtype);
  std::vector<std::vector<TreeNode>> nodes;
  size_t most = 0;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    nodes.push_back(maximal_nodes(bounds[peer], bounds[peer + 1], num_blocks));
    most = std::max(most, nodes.back().size());
  }
  std::vector<int64_t> shape = addends.sizes().vec();
  shape[0] = static_cast<int64_t>(most);
  const at::Tensor message = pooled_empty(shape, addends.options().dtype(wide_type(addends)));
  for (size_t i = 0; i < nodes[rank].size(); ++i) {
    const TreeNode node = nodes[rank][i];
    const auto first = all_own.begin() + (node.start - bounds[rank]);
    const int64_t size = std::min(node.width, num_blocks - node.start);
    message[static_cast<int64_t>(i)].copy_(
        tree_sum(std::vector<at::Tensor>(first, first + size), message.scalar_type()));
  }
  const at::Tensor all = all_gather(op, message, group);
  std::vector<TreeNode> every_node;
  std::vector<at::Tensor> values;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    for (size_t i = 0; i < nodes[peer].size(); ++i) {
      every_node.push_back(nodes[peer][i]);
      values.push_back(all[peer][static_cast<int64_t>(i)]);
    }
  }
  return tree_sum(every_node, values, dtype);
}

}  // namespace parallel_ext
