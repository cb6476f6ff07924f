#include "base/workspace.h"

#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/accumulate.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace parallel_ext {
namespace {

constexpr int64_t kMiB = 1 << 20;
// glibc reuses smaller blocks by itself.
constexpr int64_t kSmallest = 8 * kMiB;
// Beyond this, memory is not kept.
constexpr int64_t kMost = 512 * kMiB;

struct Block {
  at::DataPtr memory;
  int64_t size;
};

// The blocks that no tensor uses, oldest first, and the bytes of those in use.
struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Block>> kept;
  int64_t bytes_out = 0;

  int64_t bytes_kept() const {
    int64_t bytes = 0;
    for (const auto& block : kept) bytes += block->size;
    return bytes;
  }

  void make_room(int64_t bytes) {
    while (!kept.empty() && bytes_kept() + bytes_out + bytes > kMost) kept.erase(kept.begin());
  }
};

// Never destroyed, since tensors may outlive static objects.
Pool& pool() {
  static Pool& only = *new Pool;
  return only;
}

// Rounds up to an eighth of a power of two, so that similar sizes share their blocks.
int64_t rounded(int64_t bytes) {
  int64_t step = kMiB;
  while (step * 16 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

// The deleter of a storage's memory: returns the block to the pool.
void give_back(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  Pool& all = pool();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.bytes_out -= block->size;
  all.make_room(block->size);
  if (all.bytes_out + block->size <= kMost) all.kept.push_back(std::move(block));
}

// Returns the smallest kept block that is not much too large, or a new one.
std::unique_ptr<Block> take(int64_t bytes) {
  const int64_t wanted = rounded(bytes);
  Pool& all = pool();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto best = all.kept.end();
  for (auto it = all.kept.begin(); it != all.kept.end(); ++it) {
    const int64_t size = (*it)->size;
    if (size < bytes || size > wanted * 3 / 2) continue;
    if (best == all.kept.end() || size < (*best)->size) best = it;
  }
  std::unique_ptr<Block> block;
  if (best != all.kept.end()) {
    block = std::move(*best);
    all.kept.erase(best);
  } else {
    all.make_room(wanted);
    auto* allocator = c10::GetAllocator(c10::kCPU);
    block.reset(new Block{allocator->allocate(wanted), wanted});
  }
  all.bytes_out += block->size;
  return block;
}

}  // namespace

at::Tensor pooled_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t item = static_cast<int64_t>(options.dtype().itemsize());
  const int64_t bytes = c10::multiply_integers(sizes) * item;
  if (!options.device().is_cpu() || bytes < kSmallest) return at::empty(sizes, options);
  Block* block = take(bytes).release();
  at::DataPtr memory(block->memory.get(), block, give_back, c10::kCPU);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                             c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  return at::empty({0}, options).set_(storage, 0, sizes);
}

int64_t release_workspaces() {
  Pool& all = pool();
  std::lock_guard<std::mutex> lock(all.mutex);
  const int64_t released = all.bytes_kept();
  all.kept.clear();
  return released;
}

}  // namespace parallel_ext
