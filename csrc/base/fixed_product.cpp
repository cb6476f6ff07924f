#include "base/fixed_product.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace parallel_ext {
namespace {

void product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (add) {
    out.addmm_(a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

}  // namespace

void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  if (!out.is_cpu() || at::get_num_threads() == 1) return product(out, a, b, add);
  constexpr int64_t kLeast = 16;  // rows and columns, below which BLAS takes other kernels
  const int64_t rows = out.size(0);
  const int64_t most = out.size(1) < kLeast ? 1 : std::max<int64_t>(rows / kLeast, 1);
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

}  // namespace parallel_ext
