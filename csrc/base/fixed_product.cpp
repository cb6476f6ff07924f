#include "base/fixed_product.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace parallel_ext {
namespace {

// Whether BLAS takes its kernels by the alignment and the strides of the matrices.
bool depends_on_place(const at::Tensor& out) {
  const bool is_small = out.size(0) < kLeastOfProduct || out.size(1) < kLeastOfProduct;
  return out.scalar_type() == at::kDouble || (out.scalar_type() == at::kFloat && is_small);
}

// A copy in memory of its own, stored by rows or by columns as the matrix is.
at::Tensor placed(const at::Tensor& matrix) {
  const auto copy = [](const at::Tensor& rows) { return rows.clone(at::MemoryFormat::Contiguous); };
  const bool by_rows = matrix.stride(1) == 1 || matrix.size(0) == 1 || matrix.size(1) == 1;
  return by_rows ? copy(matrix) : copy(matrix.t()).t();
}

void product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (add) {
    out.addmm_(a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

// Each thread computes rows of its own.
void fixed_slices(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (at::get_num_threads() == 1) return product(out, a, b, add);
  const int64_t rows = out.size(0);
  const bool is_whole = out.size(1) < kLeastOfProduct || out.scalar_type() == at::kDouble;
  const int64_t most = is_whole ? 1 : std::max<int64_t>(rows / kLeastOfProduct, 1);
  const int64_t slices = std::min<int64_t>(most, at::get_num_threads());
  // Two tasks at least: in a parallel region BLAS uses one thread.
  at::parallel_for(0, std::max<int64_t>(slices, 2), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (int64_t slice = begin; slice < std::min(end, slices); ++slice) {
      const int64_t first = rows * slice / slices, size = rows * (slice + 1) / slices - first;
      product(out.narrow(0, first, size), a.narrow(0, first, size), b, add);
    }
  });
}

}  // namespace

void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (!out.is_cpu()) return product(out, a, b, add);
  if (depends_on_place(out)) {
    const at::Tensor in_place = placed(out);
    fixed_slices(in_place, placed(a), placed(b), add);
    out.copy_(in_place);
  } else {
    fixed_slices(out, a, b, add);
  }
}

}  // namespace parallel_ext
