// The ranks of one group as threads of one process, for ThreadSanitizer, which sees the accesses of
// one process alone, by their addresses. So all ranks get the same mapping here, and the locks by
// which ranks know each other's processes always say that a rank lives.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>

namespace {

void* map_once(void*, size_t length, int protection, int flags, int fd, off_t offset) {
  static void* base = nullptr;
  static ino_t file = 0;
  struct stat status{};
  fstat(fd, &status);
  if (base == nullptr || status.st_ino != file) {
    base = mmap(nullptr, length, protection, flags, fd, offset);
    file = status.st_ino;
  }
  return base;
}

int keep_mapping(void*, size_t) { return 0; }

int lock_that_is_held(int fd, int command, struct flock* lock) {
  if (command == F_GETLK) lock->l_type = F_WRLCK;
  return command == F_GETLK ? 0 : fcntl(fd, command, lock);
}
int lock_that_is_held(int fd, int command, int seals = 0) { return fcntl(fd, command, seals); }

}  // namespace

#define mmap map_once
#define munmap keep_mapping
#define fcntl lock_that_is_held
#include SHARED_MEMORY
#undef mmap
#undef munmap
#undef fcntl

namespace {

using parallel_ext::SharedMemory;
using parallel_ext::Span;

constexpr int64_t kSlot = int64_t{2} << 20;
constexpr double kTimeout = 60;

float value(int64_t rank, int64_t place) { return static_cast<float>(rank * 31 + place % 97); }

void check(bool right, const char* what) {
  if (!right) {
    std::fprintf(stderr, "wrong result of a %s\n", what);
    std::exit(1);
  }
}

void sum(SharedMemory& memory, int64_t rank, int64_t size, int64_t count) {
  std::vector<float> data(count), out(count);
  for (int64_t i = 0; i < count; ++i) data[i] = value(rank, i);
  memory.start("op", "sum", data.data(), count * sizeof(float), kTimeout);
  memory.finish_sum(out.data(), c10::kFloat);
  for (int64_t i = 0; i < count; ++i) {
    float total = 0;
    for (int64_t peer = 0; peer < size; ++peer) total += value(peer, i);
    check(out[i] == total, "sum");
  }
}

void gather(SharedMemory& memory, int64_t rank, int64_t size, int64_t count) {
  std::vector<float> data(count), out(size * count);
  for (int64_t i = 0; i < count; ++i) data[i] = value(rank, i);
  memory.start("op", "gather", data.data(), count * sizeof(float), kTimeout);
  memory.finish_gather(out.data());
  for (int64_t i = 0; i < size * count; ++i) {
    check(out[i] == value(i / count, i % count), "gather");
  }
}

// Rank r sends (r + 1) * count numbers to each other rank.
void swap(SharedMemory& memory, int64_t rank, int64_t size, int64_t count) {
  std::vector<float> data((rank + 1) * count), out(size * size * count);
  for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
  std::vector<std::vector<Span>> outgoing(size), incoming(size);
  for (int64_t peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    const int64_t bytes = sizeof(float);
    add_span(outgoing[peer], data.data(), (rank + 1) * count * bytes);
    add_span(incoming[peer], out.data() + peer * size * count, (peer + 1) * count * bytes);
  }
  memory.swap("op", outgoing, incoming, kTimeout);
  for (int64_t peer = 0; peer < size; ++peer) {
    for (int64_t i = 0; peer != rank && i < (peer + 1) * count; ++i) {
      check(out[peer * size * count + i] == value(peer, i), "swap");
    }
  }
}

void run(SharedMemory& memory, int64_t rank, int64_t size) {
  std::mt19937 shared(size);  // all ranks draw the same
  for (int step = 0; step < 120; ++step) {
    const int64_t counts[] = {0, 1, 1000, 5000, kSlot / 4 + 3};
    const int64_t count = counts[shared() % (step % 20 == 0 ? 5 : 4)];
    const auto which = shared() % 3;
    (which == 0 ? sum : which == 1 ? gather : swap)(memory, rank, size, count);
  }
  // A rank that gives up ends the others' collectives.
  if (rank == 0) return memory.abandon();
  try {
    sum(memory, rank, size, 10);
  } catch (const c10::Error&) {
    return;
  }
  check(false, "sum after a rank has given up");
}

}  // namespace

int main() {
  for (int64_t size = 2; size <= 4; ++size) {
    std::vector<std::unique_ptr<SharedMemory>> memories;
    memories.push_back(SharedMemory::create(size));
    for (int64_t rank = 1; rank < size; ++rank) {
      memories.push_back(SharedMemory::open(memories[0]->place(), rank, size));
    }
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] { run(*memories[rank], rank, size); });
    }
    for (auto& each : ranks) each.join();
  }
  std::puts("done");
}
