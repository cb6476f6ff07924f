#include "base/tree.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <type_traits>

#include "base/kernel_choice.h"
#include "base/number.h"
#include "check.h"

namespace parallel_ext {
namespace {

constexpr int64_t kChunk = 1024;  // numbers that are summed at a time, in the L1 cache

// One function per dtype: target_clones does not work with templates.
#define PARALLEL_EXT_TREE_LOOPS(scalar_t, wide_t)                                            \
  PARALLEL_EXT_MULTIVERSION void load(const scalar_t* from, int64_t size, wide_t* to) {      \
    for (int64_t i = 0; i < size; ++i) to[i] = widen(from[i]);                               \
  }                                                                                          \
  PARALLEL_EXT_MULTIVERSION void add_to(wide_t* sum, const scalar_t* values, int64_t size) { \
    for (int64_t i = 0; i < size; ++i) sum[i] += widen(values[i]);                           \
  }                                                                                          \
  PARALLEL_EXT_MULTIVERSION void store_all(const wide_t* from, int64_t size, scalar_t* to) { \
    for (int64_t i = 0; i < size; ++i) store(from[i], to + i);                               \
  }

PARALLEL_EXT_TREE_LOOPS(float, float)
PARALLEL_EXT_TREE_LOOPS(c10::BFloat16, float)
PARALLEL_EXT_TREE_LOOPS(c10::Half, float)
PARALLEL_EXT_TREE_LOOPS(double, double)

// Writes sums to the chunk of `out` from `offset` on.
void put(const float* sums, int64_t size, int64_t offset, at::Tensor& out) {
  if (out.scalar_type() == at::kFloat) {
    store_all(sums, size, out.mutable_data_ptr<float>() + offset);
  } else if (out.scalar_type() == at::kBFloat16) {
    store_all(sums, size, out.mutable_data_ptr<c10::BFloat16>() + offset);
  } else {
    store_all(sums, size, out.mutable_data_ptr<c10::Half>() + offset);
  }
}
void put(const double* sums, int64_t size, int64_t offset, at::Tensor& out) {
  store_all(sums, size, out.mutable_data_ptr<double>() + offset);
}

// How many of the `count` values from `first` on lie in the left half of a node.
int64_t in_left_half(const std::vector<TreeNode>& nodes, int64_t first, int64_t count,
                     TreeNode node) {
  const auto begin = nodes.begin() + first;
  return std::partition_point(
             begin, begin + count,
             [&](TreeNode each) { return each.start < node.start + node.width / 2; }) -
         begin;
}

// Calls use(numbers) with those of a value from `offset` on, which are summed as wide_t.
template <typename wide_t, typename Use>
void with_numbers(const at::Tensor& value, int64_t offset, const Use& use) {
  if constexpr (std::is_same_v<wide_t, double>) {
    use(value.const_data_ptr<double>() + offset);
  } else if (value.scalar_type() == at::kBFloat16) {
    use(value.const_data_ptr<c10::BFloat16>() + offset);
  } else if (value.scalar_type() == at::kHalf) {
    use(value.const_data_ptr<c10::Half>() + offset);
  } else {
    use(value.const_data_ptr<float>() + offset);
  }
}

template <typename wide_t>
struct ChunkOfTree {
  const std::vector<TreeNode>& nodes;
  const std::vector<at::Tensor>& values;
  int64_t offset, size;

  // sum = the value of `node`, which the `count` values from `first` on cover. `room` holds kChunk
  // numbers for each level below.
  void sum_up(TreeNode node, int64_t first, int64_t count, wide_t* sum, wide_t* room) const {
    if (count == 1) {
      return with_numbers<wide_t>(values[first], offset,
                                  [&](const auto* from) { load(from, size, sum); });
    }
    const int64_t left = in_left_half(nodes, first, count, node), half = node.width / 2;
    sum_up({node.start, half}, first, left, sum, room);
    if (left == count) return;
    if (count - left == 1) {
      return with_numbers<wide_t>(values[first + left], offset,
                                  [&](const auto* from) { add_to(sum, from, size); });
    }
    sum_up({node.start + half, half}, first + left, count - left, room, room + kChunk);
    add_to(sum, room, size);
  }
};

TreeNode root_of(const std::vector<TreeNode>& nodes) {
  TreeNode root = nodes.front();
  const TreeNode last = nodes.back();
  while (root.start + root.width < last.start + last.width) root.width *= 2;
  return root;
}

template <typename wide_t>
void sum_on_cpu(const std::vector<TreeNode>& nodes, const std::vector<at::Tensor>& values,
                at::Tensor& out) {
  const TreeNode root = root_of(nodes);
  int64_t levels = 1;
  for (int64_t width = root.width; width > 1; width /= 2) ++levels;
  const auto count = static_cast<int64_t>(nodes.size());
  const int64_t numel = out.numel(), chunks = (numel + kChunk - 1) / kChunk;
  at::parallel_for(0, chunks, 8, [&](int64_t begin, int64_t end) {
    std::vector<wide_t> room(static_cast<size_t>(levels * kChunk));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t offset = chunk * kChunk, size = std::min(kChunk, numel - offset);
      const ChunkOfTree<wide_t> tree{nodes, values, offset, size};
      tree.sum_up(root, 0, count, room.data(), room.data() + kChunk);
      put(room.data(), size, offset, out);
    }
  });
}

at::Tensor sum_by_aten(const std::vector<TreeNode>& nodes, const std::vector<at::Tensor>& values,
                       TreeNode node, int64_t first, int64_t count) {
  if (count == 1) return values[first].to(wide_type(values[first]));
  const int64_t left = in_left_half(nodes, first, count, node), half = node.width / 2;
  const at::Tensor sum = sum_by_aten(nodes, values, {node.start, half}, first, left);
  if (left == count) return sum;
  return sum + sum_by_aten(nodes, values, {node.start + half, half}, first + left, count - left);
}

}  // namespace

bool make_a_node(const std::vector<TreeNode>& nodes) {
  constexpr int64_t kMost = int64_t{1} << 60;  // so that nothing here overflows
  int64_t next = nodes.front().start;
  for (const auto [start, width] : nodes) {
    const bool is_power_of_two = width > 0 && (width & (width - 1)) == 0;
    if (start < 0 || start != next || !is_power_of_two || start % width != 0) return false;
    if (start > kMost || width > kMost) return false;
    next = start + width;
  }
  const TreeNode root = root_of(nodes);
  return root.start % root.width == 0;
}

std::vector<TreeNode> maximal_nodes(int64_t begin, int64_t end, int64_t count) {
  std::vector<TreeNode> nodes;
  while (begin < end) {
    int64_t width = 1;
    while (begin % (2 * width) == 0 && width < count && std::min(begin + 2 * width, count) <= end) {
      width *= 2;
    }
    nodes.push_back({begin, width});
    begin = std::min(begin + width, count);
  }
  return nodes;
}

at::Tensor tree_sum(const std::vector<TreeNode>& nodes, const std::vector<at::Tensor>& values,
                    at::ScalarType dtype) {
  const at::Tensor& first = values.front();
  if (!use_cpu_loops(first)) {
    const auto count = static_cast<int64_t>(nodes.size());
    return sum_by_aten(nodes, values, root_of(nodes), 0, count).to(dtype);
  }
  at::Tensor out = at::empty(first.sizes(), first.options().dtype(dtype));
  if (first.scalar_type() == at::kDouble) {
    sum_on_cpu<double>(nodes, values, out);
  } else {
    sum_on_cpu<float>(nodes, values, out);
  }
  return out;
}

at::Tensor tree_sum(const std::vector<at::Tensor>& addends, at::ScalarType dtype) {
  std::vector<TreeNode> nodes;
  for (size_t i = 0; i < addends.size(); ++i) nodes.push_back({static_cast<int64_t>(i), 1});
  return tree_sum(nodes, addends, dtype);
}

at::Tensor column_sums(const at::Tensor& rows, at::ScalarType dtype) {
  if (rows.size(0) == 0) return at::zeros({rows.size(1)}, rows.options().dtype(dtype));
  const at::Tensor sums = rows.to(wide_type(rows), /*non_blocking=*/false, /*copy=*/true);
  int64_t left = rows.size(0);
  for (; left > 2; left -= left / 2) {  // the last half to the first
    sums.narrow(0, 0, left / 2).add_(sums.narrow(0, left - left / 2, left / 2));
  }
  return (left == 2 ? sums[0] + sums[1] : sums[0]).to(dtype);  // no view of several rows
}

}  // namespace parallel_ext
