#include "workspace.h"

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace parallel_ext {
namespace {

constexpr int64_t kMiB = 1 << 20;
// glibc reuses smaller blocks by itself.
constexpr int64_t kSmallest = 8 * kMiB;
// Beyond this, memory is not kept.
constexpr int64_t kMost = 512 * kMiB;

std::mutex mutex;
std::vector<c10::Storage> kept;  // each in use, or held by nothing but this

bool in_use(const c10::Storage& storage) { return storage.use_count() > 1; }

int64_t size_of(const c10::Storage& storage) { return static_cast<int64_t>(storage.nbytes()); }

// Sizes that differ little share their blocks: an eighth of a power of two, rounded up.
int64_t rounded(int64_t bytes) {
  int64_t step = kMiB;
  while (step * 16 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// The smallest free block that is not much too large, or a new one.
c10::Storage storage_of(int64_t bytes) {
  const int64_t wanted = rounded(bytes);
  std::lock_guard<std::mutex> lock(mutex);
  const c10::Storage* best = nullptr;
  int64_t total = wanted;
  for (const c10::Storage& storage : kept) {
    const int64_t size = size_of(storage);
    total += size;
    if (in_use(storage) || size < bytes || size > wanted * 3 / 2) continue;
    if (best == nullptr || size < size_of(*best)) best = &storage;
  }
  if (best != nullptr) return *best;
  // Free blocks of other sizes make room, the oldest first.
  for (auto it = kept.begin(); it != kept.end() && total > kMost;) {
    if (in_use(*it)) {
      ++it;
    } else {
      total -= size_of(*it);
      it = kept.erase(it);
    }
  }
  c10::Storage fresh = at::empty({wanted}, at::kByte).storage();
  if (total <= kMost) kept.push_back(fresh);
  return fresh;
}

}  // namespace

at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t item = static_cast<int64_t>(options.dtype().itemsize());
  const int64_t bytes = c10::multiply_integers(sizes) * item;
  if (!options.device().is_cpu() || bytes < kSmallest) return at::empty(sizes, options);
  return at::empty({0}, options).set_(storage_of(bytes), 0, sizes);
}

int64_t release_workspaces() {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t released = 0;
  for (const c10::Storage& storage : kept) released += in_use(storage) ? 0 : size_of(storage);
  kept.erase(std::remove_if(kept.begin(), kept.end(), [](const auto& s) { return !in_use(s); }),
             kept.end());
  return released;
}

}  // namespace parallel_ext
