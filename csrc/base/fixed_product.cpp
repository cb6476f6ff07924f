#include "base/fixed_product.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "base/kernel_choice.h"

#ifndef _OPENMP
#error "compile with -fopenmp, without which at::parallel_for runs everything in one thread"
#endif

// A function of MKL, null where torch has no MKL.
extern "C" int MKL_Set_Num_Threads_Local(int num_threads) __attribute__((weak));

namespace parallel_ext {
namespace {

// Whether BLAS takes its kernels by the alignment and the strides of the matrices.
bool depends_on_place(const at::Tensor& out) {
  if (!use_cpu_loops(out)) return true;
  const bool is_small = out.size(0) < kLeastOfProduct || out.size(1) < kLeastOfProduct;
  return out.scalar_type() == at::kDouble || (out.scalar_type() == at::kFloat && is_small);
}

// A matrix stored by rows in memory of its own; on a GPU also one that lies as if it were, to the
// alignment that its allocator gives and its libraries look at.
at::Tensor rows_of_their_own(const at::Tensor& rows) {
  constexpr uintptr_t kAligned = 256;
  const bool is_dense = rows.stride(1) == 1 && rows.stride(0) == rows.size(1);
  const bool is_placed = !rows.is_cpu() && is_dense &&
                         reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAligned == 0;
  return is_placed ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// A matrix in memory of its own, stored by rows or by columns as it was before.
at::Tensor placed(const at::Tensor& matrix) {
  const bool by_rows = matrix.stride(1) == 1 || matrix.size(0) == 1 || matrix.size(1) == 1;
  return by_rows ? rows_of_their_own(matrix) : rows_of_their_own(matrix.t()).t();
}

void product(const Product& of) {
  at::Tensor out = of.out;
  if (of.add) {
    out.addmm_(of.a, of.b);
  } else {
    at::mm_out(out, of.a, of.b);
  }
}

void placed_product(const Product& of) {
  if (!depends_on_place(of.out)) return product(of);
  const at::Tensor out = placed(of.out);
  product({out, placed(of.a), placed(of.b), of.add});
  if (!out.is_same(of.out)) of.out.copy_(out);
}

// The rows, or with dim 1 the columns, of a product from `start` on.
Product part_of(const Product& of, int64_t dim, int64_t start, int64_t size) {
  return {of.out.narrow(dim, start, size), dim == 0 ? of.a.narrow(0, start, size) : of.a,
          dim == 1 ? of.b.narrow(1, start, size) : of.b, of.add};
}

std::vector<Product> parts_of(const Product& of, int64_t dim, int64_t count) {
  const int64_t size = of.out.size(dim);
  std::vector<Product> parts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = size * i / count;
    parts.push_back(part_of(of, dim, start, size * (i + 1) / count - start));
  }
  return parts;
}

// The pieces of a product, each one call of BLAS in one thread. They follow from its sizes alone:
// BLAS takes its kernels by these, and by the number of threads.
std::vector<Product> pieces_of(const Product& of) {
  constexpr int64_t kLeastOfPiece = 512, kMostPieces = 16;
  const int64_t dim = of.out.size(0) >= of.out.size(1) ? 0 : 1;
  if (depends_on_place(of.out)) return {of};
  return parts_of(of, dim, std::clamp<int64_t>(of.out.size(dim) / kLeastOfPiece, 1, kMostPieces));
}

// Lets BLAS choose its kernels for one thread: in a parallel region MKL and oneDNN use one, but
// they choose by how many there may be.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) {
    omp_set_num_threads(1);
    if (MKL_Set_Num_Threads_Local != nullptr) of_mkl_ = MKL_Set_Num_Threads_Local(1);
  }
  ~OneThread() {
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(of_mkl_);
    omp_set_num_threads(before_);
  }

 private:
  int before_, of_mkl_ = 0;
};

void compute(const std::vector<Product>& pieces) {
  if (at::get_num_threads() == 1 || !pieces.front().out.is_cpu()) {
    const OneThread one_thread;
    for (const Product& piece : pieces) placed_product(piece);
    return;
  }
  const auto count = static_cast<int64_t>(pieces.size());
  // Two tasks at least: in a parallel region BLAS uses one thread.
  at::parallel_for(0, std::max<int64_t>(count, 2), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const OneThread one_thread;
    for (int64_t i = begin; i < std::min(end, count); ++i) placed_product(pieces[i]);
  });
}

// In as few calls of BLAS as there are threads.
void compute_at_once(const Product& whole) {
  const int64_t most = std::max<int64_t>(whole.out.size(0) / kLeastOfProduct, 1);
  compute(parts_of(whole, 0, std::min<int64_t>(most, at::get_num_threads())));
}

// What decides which kernel BLAS takes for a product, and the blocks.
using Shape = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;

Shape shape_of(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
               const std::vector<int64_t>& sizes, int64_t dim) {
  const std::vector<int64_t> numbers{out.size(0),          out.size(1),      a.size(1),
                                     a.stride(1) == 1,     b.stride(1) == 1, dim,
                                     at::get_num_threads()};
  return {numbers, sizes, out.scalar_type()};
}

std::mutex shapes_mutex;
std::map<Shape, bool> known_shapes;  // -> whether one product has the bits of one a block

std::optional<bool> merges(const Shape& shape) {
  static const char* mode = std::getenv("PARALLEL_EXT_INVARIANT");
  if (mode != nullptr && std::string(mode) == "strict") return false;
  const std::lock_guard<std::mutex> lock(shapes_mutex);
  const auto found = known_shapes.find(shape);
  return found == known_shapes.end() ? std::nullopt : std::optional<bool>(found->second);
}

void remember(const Shape& shape, bool is_same) {
  const std::lock_guard<std::mutex> lock(shapes_mutex);
  known_shapes[shape] = is_same;
}

// Computes the pieces, at once if that is known to have the same bits.
void compute_pieces(const Product& whole, const std::vector<Product>& pieces, const Shape& shape) {
  // A GPU, which chooses by more than was looked into here, makes no two blocks at once.
  const bool never = pieces.size() == 1 || !use_cpu_loops(whole.out);
  const std::optional<bool> known = never ? false : merges(shape);
  if (known == false) return compute(pieces);
  compute_at_once(whole);
  if (known == true) return;
  std::vector<Product> alone;
  for (const Product& piece : pieces) {
    alone.push_back({at::empty(piece.out.sizes(), piece.out.options()), piece.a, piece.b, false});
  }
  compute(alone);
  bool is_same = true;
  for (size_t i = 0; i < pieces.size(); ++i) {
    is_same = is_same && pieces[i].out.equal(alone[i].out);
    pieces[i].out.copy_(alone[i].out);
  }
  if (whole.out.any().item<bool>()) remember(shape, is_same);  // zeros show nothing
}

}  // namespace

void fixed_product(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool add) {
  const Product whole{out, a, b, add};
  if (add) return compute(pieces_of(whole));
  fixed_product_of_blocks(out, a, b, {out.size(0)}, 0);
}

void fixed_products(const std::vector<Product>& products) {
  if (at::get_num_threads() > 1) return products_of_any_size(products);
  for (const Product& each : products) fixed_product(each.out, each.a, each.b, each.add);
}

void products_of_any_size(const std::vector<Product>& products) {
  std::vector<Product> pieces;
  for (const Product& each : products) {
    const auto own = pieces_of(each);
    pieces.insert(pieces.end(), own.begin(), own.end());
  }
  if (!pieces.empty()) compute(pieces);
}

void fixed_product_of_blocks(at::Tensor out, const at::Tensor& a, const at::Tensor& b,
                             const std::vector<int64_t>& sizes, int64_t dim) {
  const Product whole{out, a, b, false};
  std::vector<Product> pieces;
  int64_t start = 0;
  for (const int64_t size : sizes) {
    const auto of_block = pieces_of(part_of(whole, dim, start, size));
    pieces.insert(pieces.end(), of_block.begin(), of_block.end());
    start += size;
  }
  compute_pieces(whole, pieces, shape_of(out, a, b, sizes, dim));
}

void choose_blas_for_one_thread(bool on) {
  if (MKL_Set_Num_Threads_Local == nullptr) return;
  if (!on) {  // the others use one thread in any case
    MKL_Set_Num_Threads_Local(0);
    return;
  }
#pragma omp parallel
  MKL_Set_Num_Threads_Local(1);
}

}  // namespace parallel_ext
