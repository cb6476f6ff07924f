// Collectives of the ranks of one Linux host through memory that all of them have mapped, where a
// process group would push the same bytes through sockets. One object serves one group.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace parallel_ext {

struct Span {
  void* data;
  int64_t bytes;
};

// Every rank must start and finish the same collectives in the same order, one at a time. What
// goes wrong is an error on every rank that can still report it: other operators or sizes on other
// ranks (found by comparing them, at no extra exchange), a rank that has exited, one that does not
// come in time.
class SharedMemory {
 public:
  // Where other processes of the host find the memory: a file without a name, which is gone with
  // the last process that has it, however it ends.
  struct Place {
    int32_t process, descriptor;
    std::array<uint64_t, 2> token;  // random, and also in the memory: numbers of processes repeat
  };

  // The first rank makes the memory and the others open it. Both return nullptr where the system
  // refuses it, and `open` where what it finds is anything else, as it is on another host.
  static std::unique_ptr<SharedMemory> create(int64_t size);
  static std::unique_ptr<SharedMemory> open(const Place& place, int64_t rank, int64_t size);
  Place place() const;

  // Lets the other ranks' collectives fail, now and later.
  void abandon();

  // `check` is called between the naps of a wait, and ends it by throwing; nullptr for none.
  static void set_interrupt_check(void (*check)());

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Shows `bytes` of `data` to the other ranks, without waiting for them. `data` must stay as it is
  // until the collective is finished. `kind` tells sums and gathers apart.
  void start(const char* op, const char* kind, const void* data, int64_t bytes, double timeout_s);
  // Writes the sum of the ranks' data (comm/rank_order_sum.h, which must know the dtype); each rank
  // computes its share of it, so that all have the same bits. `out` may be the data.
  void finish_sum(void* out, c10::ScalarType dtype);
  // Writes the data of all ranks, one after the other in rank order.
  void finish_gather(void* out);

  // Brings `outgoing[r]` of this rank to rank r, whose incoming spans of this rank hold as many
  // bytes in all. Spans of this rank for itself are ignored.
  void swap(const char* op, const std::vector<std::vector<Span>>& outgoing,
            const std::vector<std::vector<Span>>& incoming, double timeout_s);

 private:
  struct Seat;
  SharedMemory(int fd, void* base, int64_t rank, int64_t size);
  static std::unique_ptr<SharedMemory> attach(int fd, int64_t rank, int64_t size);

  void prepare(const char* op, const char* kind, int64_t bytes, double timeout_s);
  void describe();
  void show(int64_t offset);
  void arrive();
  void wait_for_all();
  void wait_for(int64_t peer);
  bool alive(int64_t peer) const;
  void check_interrupt();
  void check_same(bool same_bytes = true);
  [[noreturn]] void give_up(const std::string& why);
  int64_t piece_at(int64_t offset) const;
  Seat& seat(int64_t rank) const;
  char* slot(int64_t rank) const;  // slot(size) holds the sum
  std::array<uint64_t, 2>& token() const;

  int fd_;
  char* base_;
  int64_t rank_, size_;
  uint32_t arrivals_ = 0;  // of this rank; every rank has the same number between collectives

  // The collective that was started and not finished.
  bool started_ = false;
  std::string what_;
  const char* data_ = nullptr;
  int64_t bytes_ = 0;
  double timeout_s_ = 0;
};

}  // namespace parallel_ext
