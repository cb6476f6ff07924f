// Collectives of the ranks of one Linux host through memory that all of them map, where a process
// group would send the same bytes through sockets. One object serves one group.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace parallel_ext {

// A stretch of memory; a list of them makes up a message.
struct Span {
  void* data;
  int64_t bytes;
};

// Appends a span to a list; one that continues the last span in memory extends it.
inline void add_span(std::vector<Span>& spans, const void* data, int64_t bytes) {
  if (bytes == 0) return;
  auto* start = static_cast<char*>(const_cast<void*>(data));
  if (!spans.empty() && static_cast<char*>(spans.back().data) + spans.back().bytes == start) {
    spans.back().bytes += bytes;
  } else {
    spans.push_back({start, bytes});
  }
}

// Every rank must start and finish the same collectives in the same order, one at a time. Every
// rank raises if another one runs another operator or has another size (compared in the same
// exchange), has exited, or does not arrive in time.
class SharedMemory {
 public:
  // Where other processes of the host find the memory: a file without a name, which disappears with
  // the last process that has it open, however that process ends.
  struct Place {
    int32_t process, descriptor;
    std::array<uint64_t, 2> token;  // random, and also in the memory: process ids are reused
  };

  // The first rank creates the memory and the others open it. Both return nullptr if the system
  // refuses; `open` also if it finds any other file, as on another host.
  static std::unique_ptr<SharedMemory> create(int64_t size);
  static std::unique_ptr<SharedMemory> open(const Place& place, int64_t rank, int64_t size);
  Place place() const;

  // Lets errors name the ranks as their group does, where only some of its ranks share the memory.
  void name_ranks(std::vector<int64_t> ranks) { names_ = std::move(ranks); }

  // Makes the collectives of the other ranks fail, now and later.
  void abandon();

  // `check` is called again and again during a wait, and may end it by throwing; nullptr for none.
  static void set_interrupt_check(void (*check)());

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Copies `data` to where the other ranks can read it, without waiting for them. `data` must not
  // change until the collective is finished. `kind` tells sums and gathers apart.
  void start(const char* op, const char* kind, const void* data, int64_t bytes, double timeout_s);
  // Writes the sum of the ranks' data to `out`, which may be the data. sum_in_rank_order must know
  // the dtype. Each rank computes a share of the sum for all, so that all have the same bits.
  void finish_sum(void* out, c10::ScalarType dtype);
  // Writes the data of all ranks, one after the other in rank order.
  void finish_gather(void* out) { gather(out, size_); }
  // Writes the data of the first rank.
  void finish_broadcast(void* out) { gather(out, 1); }

  // Sends `outgoing[r]` to rank r, whose incoming spans for this rank must hold as many bytes in
  // all. Spans of this rank for itself are ignored.
  void swap(const char* op, const std::vector<std::vector<Span>>& outgoing,
            const std::vector<std::vector<Span>>& incoming, double timeout_s);

 private:
  struct RankHeader;
  SharedMemory(int fd, void* base, int64_t rank, int64_t size);
  static std::unique_ptr<SharedMemory> attach(int fd, int64_t rank, int64_t size);

  void prepare(const char* op, const char* kind, int64_t bytes, double timeout_s);
  void describe();
  void show(int64_t offset);
  void gather(void* out, int64_t ranks);
  void arrive();
  void wait_for_all();
  void wait_for(int64_t peer);
  bool alive(int64_t peer) const;
  void check_interrupt();
  void check_same(bool same_bytes = true);
  [[noreturn]] void give_up(const std::string& why);
  int64_t piece_at(int64_t offset) const;
  int64_t name_of(int64_t rank) const { return names_.empty() ? rank : names_[rank]; }
  RankHeader& rank_header(int64_t rank) const;
  char* slot(int64_t rank) const;  // slot(size) holds the sum
  std::array<uint64_t, 2>& token() const;

  int fd_;
  char* base_;
  int64_t rank_, size_;
  std::vector<int64_t> names_;  // of the ranks, if other than their numbers here
  uint32_t arrivals_ = 0;       // of this rank; every rank has the same number between collectives

  // The collective that has started and not finished.
  bool started_ = false;
  std::string what_;
  const char* data_ = nullptr;
  int64_t bytes_ = 0;
  double timeout_s_ = 0;
};

}  // namespace parallel_ext
