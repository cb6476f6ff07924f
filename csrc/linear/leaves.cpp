// Sums over the leaves of a batch, whose gradients have the same bits whoever runs the leaves.
#include "base/layout.h"
#include "base/tree.h"
#include "check.h"
#include "linear/ops.h"

namespace parallel_ext {
namespace {

void check_sum(const at::Tensor& value, at::ScalarType dtype) {
  const bool is_double = value.scalar_type() == at::kDouble;
  TORCH_CHECK_TYPE(at::isFloatingType(dtype) && (dtype == at::kDouble) == is_double,
                   "sum_leaves: the sum of ", value.scalar_type(), " cannot be of ", dtype);
}

at::Tensor sum_leaves_kernel(at::TensorList values, at::IntArrayRef nodes, at::ScalarType dtype) {
  const char* op = "sum_leaves";
  TORCH_CHECK_VALUE(!values.empty() && nodes.size() == 2 * values.size(), op, ": nodes ", nodes,
                    " are not a start and a width for each of ", values.size(), " values");
  std::vector<TreeNode> of_tree;
  std::vector<at::Tensor> addends;
  for (size_t i = 0; i < values.size(); ++i) {
    of_tree.push_back({nodes[2 * i], nodes[2 * i + 1]});
    check_floating(op, "values", values[i]);
    check_shape(op, "values", values[i], values[0].sizes());
    TORCH_CHECK_TYPE(wide_type(values[i]) == wide_type(values[0]), op,
                     ": values of float64 and of other dtypes cannot be summed together");
    addends.push_back(values[i].contiguous());
  }
  check_sum(values[0], dtype);
  TORCH_CHECK_VALUE(make_a_node(of_tree), op, ": nodes ", nodes,
                    " are not nodes of a tree that follow each other and make one of it");
  if (addends.size() == 1) return addends[0].to(dtype, /*non_blocking=*/false, /*copy=*/true);
  return tree_sum(of_tree, addends, dtype);
}

at::Tensor sum_leaves_meta(at::TensorList values, at::IntArrayRef, at::ScalarType dtype) {
  check_sum(values[0], dtype);
  return at::empty_symint(values[0].sym_sizes(), values[0].options().dtype(dtype));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(parallel_ext, library) {
  implement<sum_leaves>(library).kernel<sum_leaves_kernel>().meta<sum_leaves_meta>();
}

}  // namespace parallel_ext
