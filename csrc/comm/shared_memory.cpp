#include "comm/shared_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <random>

#include "base/sum_rows.h"

namespace parallel_ext {
namespace {

constexpr int64_t kSlotBytes = int64_t{2} << 20;
constexpr int64_t kPage = 4096;
// Some 50 to 100 us: longer than the usual lag between ranks, and short enough where ranks share a
// core.
constexpr int kSpins = 4000;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Walks over the bytes of several spans as if they were one.
class Cursor {
 public:
  explicit Cursor(const std::vector<Span>& spans) : spans_(spans) {
    for (const Span& span : spans) left_ += span.bytes;
  }
  int64_t left() const { return left_; }
  // Copy up to `most` bytes out of the spans, or into them.
  void read(char* out, int64_t most) {
    walk(most, [&](char* here, int64_t at, int64_t count) { std::memcpy(out + at, here, count); });
  }
  void write(const char* data, int64_t most) {
    walk(most, [&](char* here, int64_t at, int64_t count) { std::memcpy(here, data + at, count); });
  }

 private:
  template <typename Copy>
  void walk(int64_t most, const Copy& copy) {
    int64_t at = 0;
    while (at < most && left_ > 0) {
      const Span& span = spans_[index_];
      const int64_t count = std::min(most - at, span.bytes - offset_);
      copy(static_cast<char*>(span.data) + offset_, at, count);
      at += count;
      left_ -= count;
      offset_ += count;
      if (offset_ == span.bytes) {
        offset_ = 0;
        ++index_;
      }
    }
  }

  const std::vector<Span>& spans_;
  size_t index_ = 0;
  int64_t offset_ = 0, left_ = 0;
};

std::string in_words(int64_t rank) { return "rank " + std::to_string(rank) + " of the group "; }

constexpr int64_t kRankHeaderBytes = 128;

// A header for each rank, and one more for the token.
int64_t header_bytes(int64_t size) {
  return ((size + 1) * kRankHeaderBytes + kPage - 1) / kPage * kPage;
}

std::atomic<void (*)()> interrupt_check{nullptr};

}  // namespace

// The state of one rank that the others read, on cache lines of its own.
struct alignas(kRankHeaderBytes) SharedMemory::RankHeader {
  std::atomic<uint32_t> arrivals;  // points that this rank has reached; also the futex of waiters
  std::atomic<uint32_t> sleepers;  // ranks that sleep until it reaches the next one
  std::atomic<uint32_t> given_up;
  int64_t bytes;
  char what[64];
};

namespace {

int64_t total_bytes(int64_t size) { return header_bytes(size) + (size + 1) * kSlotBytes; }

constexpr char kName[] = "parallel_ext-ranks";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Whether this link of /proc leads to memory from SharedMemory::create.
bool is_ours(const std::string& link) {
  char target[64];
  const ssize_t length = readlink(link.c_str(), target, sizeof(target));
  return length > 0 && std::string(target, static_cast<size_t>(length)) ==
                           std::string("/memfd:") + kName + " (deleted)";
}

struct flock lock_of(int64_t byte) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

// Locks this byte of the file until the process ends, however it ends.
bool lock_byte(int fd, int64_t byte) {
  struct flock lock = lock_of(byte);
  return fcntl(fd, F_SETLK, &lock) == 0;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  const struct timespec moment{0, 50'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &moment, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::create(int64_t size) {
  const int fd = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return nullptr;
  // Allocated now, since a write to memory that the system cannot provide would kill the process;
  // sealed, since so would a write beyond the end of a file that another process has shortened.
  if (posix_fallocate(fd, 0, total_bytes(size)) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    ::close(fd);
    return nullptr;
  }
  auto memory = attach(fd, 0, size);
  if (memory) {
    std::random_device random;
    for (uint64_t& word : memory->token()) word = uint64_t{random()} << 32 | random();
  }
  return memory;
}

SharedMemory::Place SharedMemory::place() const { return {getpid(), fd_, token()}; }

// Looks at the link before it opens the file: another process' descriptor may be a pipe or a device
// here.
std::unique_ptr<SharedMemory> SharedMemory::open(const Place& place, int64_t rank, int64_t size) {
  const std::string path =
      "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
  if (!is_ours(path)) return nullptr;
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return nullptr;
  struct stat status{};
  const bool fits = is_ours("/proc/self/fd/" + std::to_string(fd)) && fstat(fd, &status) == 0 &&
                    S_ISREG(status.st_mode) && status.st_uid == geteuid() && status.st_nlink == 0 &&
                    status.st_size == total_bytes(size) &&
                    (fcntl(fd, F_GET_SEALS) & kSeals) == kSeals;
  if (!fits) {
    ::close(fd);
    return nullptr;
  }
  auto memory = attach(fd, rank, size);
  return memory && memory->token() == place.token ? std::move(memory) : nullptr;
}

std::unique_ptr<SharedMemory> SharedMemory::attach(int fd, int64_t rank, int64_t size) {
  void* base = MAP_FAILED;
  if (lock_byte(fd, rank)) {
    base = mmap(nullptr, total_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (base == MAP_FAILED) {
    ::close(fd);
    return nullptr;
  }
  return std::unique_ptr<SharedMemory>(new SharedMemory(fd, base, rank, size));
}

SharedMemory::~SharedMemory() {
  munmap(base_, total_bytes(size_));
  ::close(fd_);
}

bool SharedMemory::alive(int64_t peer) const {
  struct flock lock = lock_of(peer);
  return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

SharedMemory::SharedMemory(int fd, void* base, int64_t rank, int64_t size)
    : fd_(fd), base_(static_cast<char*>(base)), rank_(rank), size_(size) {
  static_assert(sizeof(RankHeader) == kRankHeaderBytes);
}

SharedMemory::RankHeader& SharedMemory::rank_header(int64_t rank) const {
  return reinterpret_cast<RankHeader*>(
      base_)[rank];  // a new file is zero, which is the initial state of a header
}

std::array<uint64_t, 2>& SharedMemory::token() const {
  return *reinterpret_cast<std::array<uint64_t, 2>*>(base_ + size_ * kRankHeaderBytes);
}

char* SharedMemory::slot(int64_t rank) const {
  return base_ + header_bytes(size_) + rank * kSlotBytes;
}

int64_t SharedMemory::piece_at(int64_t offset) const {
  return std::min(kSlotBytes, bytes_ - offset);
}

void SharedMemory::arrive() {
  ++arrivals_;
  RankHeader& own = rank_header(rank_);
  own.arrivals.store(arrivals_);
  if (own.sleepers.load() > 0) wake(own.arrivals);
}

void SharedMemory::wait_for_all() {
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (peer != rank_) wait_for(peer);
  }
}

void SharedMemory::wait_for(int64_t peer) {
  RankHeader& other = rank_header(peer);
  const auto has_come = [&] {
    return static_cast<int32_t>(other.arrivals.load() - arrivals_) >= 0;
  };
  for (int spin = 0; spin < kSpins; ++spin) {
    if (has_come()) return;
    pause_briefly();
  }
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s_);
  while (!has_come()) {
    const bool lives = alive(peer);
    if (has_come()) return;  // the peer may arrive and then exit
    if (!lives) give_up(in_words(name_of(peer)) + "has exited");
    if (other.given_up.load() != 0) give_up(in_words(name_of(peer)) + "has given up");
    if (std::chrono::steady_clock::now() > deadline) {
      char seconds[32];
      std::snprintf(seconds, sizeof(seconds), "%g", timeout_s_);
      give_up(in_words(name_of(peer)) + "did not come within " + seconds + " s");
    }
    other.sleepers.fetch_add(1);
    const uint32_t seen = other.arrivals.load();
    if (static_cast<int32_t>(seen - arrivals_) < 0) sleep_on(other.arrivals, seen);
    other.sleepers.fetch_sub(1);
    check_interrupt();
  }
}

void SharedMemory::set_interrupt_check(void (*check)()) { interrupt_check.store(check); }

void SharedMemory::abandon() { rank_header(rank_).given_up.store(1); }

void SharedMemory::check_interrupt() {
  const auto check = interrupt_check.load();
  if (check == nullptr) return;
  try {
    check();
  } catch (...) {
    abandon();
    throw;
  }
}

void SharedMemory::give_up(const std::string& why) {
  abandon();
  C10_THROW_ERROR(Error, what_ + ": " + why + "; the group cannot be used any more");
}

void SharedMemory::prepare(const char* op, const char* kind, int64_t bytes, double timeout_s) {
  what_ = std::string(op) + "/" + kind;
  bytes_ = bytes;
  timeout_s_ = timeout_s;
  if (rank_header(rank_).given_up.load() != 0 || started_) {
    give_up("an earlier collective of the group has failed on this rank");
  }
  // The old data of a rank that has given up must not be read as data of this collective.
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (rank_header(peer).given_up.load() != 0) give_up(in_words(name_of(peer)) + "has given up");
  }
  wait_for_all();  // other ranks may still read the data of the last collective
  started_ = true;
}

void SharedMemory::describe() {
  RankHeader& own = rank_header(rank_);
  own.bytes = bytes_;
  std::snprintf(own.what, sizeof(own.what), "%s", what_.c_str());
}

void SharedMemory::show(int64_t offset) {
  describe();
  if (bytes_ > 0) std::memcpy(slot(rank_), data_ + offset, piece_at(offset));
  arrive();
}

void SharedMemory::check_same(bool same_bytes) {
  const RankHeader& own = rank_header(rank_);
  for (int64_t peer = 0; peer < size_; ++peer) {
    const RankHeader& other = rank_header(peer);
    const bool fits = other.bytes == own.bytes || !same_bytes;
    if (fits && std::strcmp(other.what, own.what) == 0) continue;
    const std::string text =
        c10::str(own.what, " with ", own.bytes, " bytes on rank ", name_of(rank_), " meets ",
                 other.what, " with ", other.bytes, " bytes on rank ", name_of(peer),
                 "; all ranks must run the same operators on the same sizes in the same order");
    started_ = false;
    arrive();  // the peers' headers are read, so the peers may overwrite them
    C10_THROW_ERROR(Error, text);
  }
}

void SharedMemory::start(const char* op, const char* kind, const void* data, int64_t bytes,
                         double timeout_s) {
  prepare(op, kind, bytes, timeout_s);
  data_ = static_cast<const char*>(data);
  show(0);
}

void SharedMemory::finish_sum(void* out, c10::ScalarType dtype) {
  const int64_t item = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t offset = 0;
  do {
    if (offset > 0) show(offset);
    wait_for_all();
    if (offset == 0) check_same();
    const int64_t count = piece_at(offset) / item;
    const int64_t first = count * rank_ / size_, last = count * (rank_ + 1) / size_;
    std::vector<const void*> parts;
    for (int64_t rank = 0; rank < size_; ++rank) parts.push_back(slot(rank));
    sum_in_rank_order(dtype, parts, first, last, slot(size_));
    arrive();
    wait_for_all();
    if (bytes_ > 0) std::memcpy(static_cast<char*>(out) + offset, slot(size_), piece_at(offset));
    offset += kSlotBytes;
  } while (offset < bytes_);
  started_ = false;
}

void SharedMemory::gather(void* out, int64_t ranks) {
  int64_t offset = 0;
  do {
    if (offset > 0) {
      wait_for_all();
      show(offset);
    }
    wait_for_all();
    if (offset == 0) check_same();
    for (int64_t rank = 0; rank < ranks && bytes_ > 0; ++rank) {
      std::memcpy(static_cast<char*>(out) + rank * bytes_ + offset, slot(rank), piece_at(offset));
    }
    arrive();
    offset += kSlotBytes;
  } while (offset < bytes_);
  started_ = false;
}

// Every slot has a cell for each receiver, which begins with the sizes of both messages.
void SharedMemory::swap(const char* op, const std::vector<std::vector<Span>>& outgoing,
                        const std::vector<std::vector<Span>>& incoming, double timeout_s) {
  struct Sizes {
    int64_t sent, expected;
  };
  constexpr int64_t kCellHeader = 64;
  const int64_t cell = kSlotBytes / size_ / kCellHeader * kCellHeader, room = cell - kCellHeader;
  std::vector<Cursor> out(outgoing.begin(), outgoing.end());
  std::vector<Cursor> in(incoming.begin(), incoming.end());
  std::vector<Sizes> own;
  int64_t longest = 0;
  for (int64_t peer = 0; peer < size_; ++peer) {
    own.push_back({out[peer].left(), in[peer].left()});
    if (peer != rank_) longest = std::max(longest, own[peer].sent);
  }
  prepare(op, "swap", longest, timeout_s);
  for (int64_t done = 0; done == 0 || done < longest; done += room) {
    const bool first = done == 0;
    if (!first) wait_for_all();
    for (int64_t peer = 0; peer < size_; ++peer) {
      char* target = slot(rank_) + peer * cell;
      if (first) std::memcpy(target, &own[peer], sizeof(Sizes));
      if (peer != rank_) out[peer].read(target + kCellHeader, room);
    }
    describe();
    arrive();
    wait_for_all();
    if (first) check_same(false);
    for (int64_t peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      longest = std::max(longest, rank_header(peer).bytes);
      const char* source = slot(peer) + rank_ * cell;
      const auto& other = *reinterpret_cast<const Sizes*>(source);
      if (first && (other.sent != own[peer].expected || other.expected != own[peer].sent)) {
        give_up(c10::str(in_words(name_of(peer)), "sends ", other.sent, " bytes for ",
                         other.expected, " where ", own[peer].expected, " are expected for ",
                         own[peer].sent));
      }
      in[peer].write(source + kCellHeader, room);
    }
    arrive();
  }
  started_ = false;
}

}  // namespace parallel_ext
