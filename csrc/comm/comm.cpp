#include "comm/comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/layout.h"
#include "comm/rank_order_sum.h"

namespace parallel_ext {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::mutex state_mutex;
std::map<std::string, int64_t> counts;           // guarded by state_mutex
std::map<std::string, int64_t> running_numbers;  // by group name, guarded by state_mutex

// Alive as long as what it stands for: a thread, or a collective.
using Token = std::shared_ptr<const bool>;

// What this process knows of a group.
struct Known {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;  // names come back after a group is destroyed
  Token::weak_type thread = {};                       // to which the group's collectives belong,
  int64_t collectives = 0;                            // so many of them,
  Token::weak_type collective = {};                   // the last of which is this
  bool contested = false;  // a second thread came before the ranks could be sure of the first
  bool met = false;        // whether the ranks have found out about the memory that they share:
  std::shared_ptr<SharedMemory> memory = nullptr;
};
std::map<std::string, Known> groups;  // by name, guarded by state_mutex

bool is_set_to(const char* variable, const char* wanted) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, wanted) == 0;
}

std::atomic<bool>& order_check_flag() {
  static std::atomic<bool> flag = is_set_to("PARALLEL_EXT_DEBUG", "1");
  return flag;
}

std::atomic<bool>& shared_memory_flag() {
  static std::atomic<bool> flag = !is_set_to("PARALLEL_EXT_SHARED_MEMORY", "0");
  return flag;
}

Group find_group(const char* op, int64_t group_size, const std::string& group_name) {
  Group group;
  try {
    group = c10d::resolve_process_group(group_name);
  } catch (const std::exception&) {
    TORCH_CHECK_VALUE(false, op, ": no live process group is named '", group_name,
                      "'; pass the name of a group that this process belongs to");
  }
  TORCH_CHECK_VALUE(group->getSize() == group_size, op, ": group '", group_name, "' has ",
                    group->getSize(), " ranks, but group_size is ", group_size,
                    "; pass the size of the same group");
  return group;
}

at::Tensor empty_for_all(const Group& group, const at::Tensor& part) {
  std::vector<int64_t> shape{group->getSize()};
  shape.insert(shape.end(), part.sizes().begin(), part.sizes().end());
  return at::empty(shape, part.options());
}

at::Tensor gather_into_new(const Group& group, const at::Tensor& part,
                           const c10d::AllgatherOptions& options = {}) {
  at::Tensor all = empty_for_all(group, part);
  std::vector<at::Tensor> inputs{part};
  std::vector<std::vector<at::Tensor>> outputs{all.unbind(0)};
  group->allgather(outputs, inputs, options)->wait();
  return all;
}

// The records of all ranks of a group, in rank order.
template <typename Record>
std::vector<Record> gather_records(const Group& group, const Record& own,
                                   const at::Device& device) {
  at::Tensor part = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(part.mutable_data_ptr(), &own, sizeof(own));
  const at::Tensor all = gather_into_new(group, part.to(device)).cpu();
  std::vector<Record> records(group->getSize());
  std::memcpy(records.data(), all.const_data_ptr(), all.nbytes());
  return records;
}

// A stretch of what one rank sends another: the memory itself, or where it lies in several places a
// copy of them.
struct Message {
  at::Tensor bytes;
  std::vector<Span> spans;  // of a copy

  template <typename Copy>
  void copy(const Copy& copy) const {
    auto* packed = static_cast<char*>(bytes.mutable_data_ptr());
    for (const Span& span : spans) {
      copy(packed, static_cast<char*>(span.data), span.bytes);
      packed += span.bytes;
    }
  }
};

// Cut by the number of bytes alone, so that sender and receiver cut alike.
std::vector<Message> messages_of(const std::vector<Span>& spans) {
  constexpr int64_t kMost = int64_t{4} << 20;
  std::vector<std::vector<Span>> cut;
  int64_t room = 0;
  for (Span span : spans) {
    while (span.bytes > 0) {
      if (room == 0) {
        cut.emplace_back();
        room = kMost;
      }
      const int64_t bytes = std::min(room, span.bytes);
      cut.back().push_back({span.data, bytes});
      span.data = static_cast<char*>(span.data) + bytes;
      span.bytes -= bytes;
      room -= bytes;
    }
  }
  std::vector<Message> messages;
  for (auto& piece : cut) {
    int64_t length = 0;
    for (const Span& span : piece) length += span.bytes;
    if (piece.size() == 1) {
      messages.push_back({at::from_blob(piece[0].data, {length}, at::kByte), {}});
    } else {
      messages.push_back({at::empty({length}, at::kByte), std::move(piece)});
    }
  }
  return messages;
}

// What a rank is about to run, in a fixed size so that ranks that disagree can still exchange it.
struct OrderRecord {
  char what[48];
  int64_t number;
  int64_t bytes;
};

void compare_order(const char* op, const char* kind, int64_t bytes, const at::Device& device,
                   const Group& group) {
  OrderRecord own{};
  std::snprintf(own.what, sizeof(own.what), "%s/%s", op, kind);
  own.bytes = bytes;
  {
    std::lock_guard<std::mutex> lock(state_mutex);
    own.number = running_numbers[group->getGroupName()]++;
  }
  const auto records = gather_records(group, own, device);
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const OrderRecord& other = records[rank];
    TORCH_CHECK(std::memcmp(&own, &other, sizeof(own)) == 0, op, ": order check: rank ",
                group->getRank(), " is about to run ", own.what, " as number ", own.number,
                " with ", own.bytes, " bytes, but rank ", rank, " runs ", other.what, " as number ",
                other.number, " with ", other.bytes,
                " bytes; all ranks must create the same collectives in the same order");
  }
}

[[noreturn]] void refuse_thread(const char* op, const std::string& group_name) {
  C10_THROW_ERROR(Error, std::string(op) + ": group '" + group_name +
                             "' is used by another thread; ops of one group belong to one thread");
}

// Collectives of two threads would meet in another order on another rank. A group belongs to the
// first thread that uses it, until that ends. Where another comes before the first one's second
// collective, the ranks may have taken each other's first for the same: nobody can use the group.
// Returns what must live as long as the collective.
Token claim(const char* op, const Group& group) {
  using std::chrono::steady_clock;
  thread_local const Token self = std::make_shared<const bool>(true);
  const std::string name = group->getGroupName();
  const auto deadline = steady_clock::now() + std::chrono::seconds(1);
  std::unique_lock<std::mutex> lock(state_mutex);
  for (;;) {
    auto found = groups.find(name);
    if (found == groups.end() || found->second.group.lock() != group) {
      for (auto each = groups.begin(); each != groups.end();) {  // of destroyed groups
        each = each->second.group.expired() ? groups.erase(each) : std::next(each);
      }
      Known fresh{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)};
      found = groups.insert_or_assign(name, std::move(fresh)).first;
    }
    Known& known = found->second;
    const Token owner = known.thread.lock();
    if (!owner) known.collectives = 0;
    if (!owner || owner == self) {
      if (known.contested) refuse_thread(op, name);
      ++known.collectives;
      known.thread = self;
      const Token collective = std::make_shared<const bool>(true);
      known.collective = collective;
      return collective;
    }
    // Python joins a thread a moment before it ends.
    const bool ending = known.collective.expired() && steady_clock::now() < deadline;
    if (!ending) {
      if (known.collectives < 2) {
        known.contested = true;
        if (known.memory) known.memory->abandon();
      }
      refuse_thread(op, name);
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
}

bool is_contested(const Group& group) {
  std::lock_guard<std::mutex> lock(state_mutex);
  return groups.at(group->getGroupName()).contested;
}

// Asks the ranks of a group whether all of them can map the same memory: two exchanges. Throws on
// all of them where on one a second thread has come meanwhile.
std::shared_ptr<SharedMemory> meet_neighbours(const char* op, const Group& group) {
  struct Offer {
    SharedMemory::Place place;
    bool willing;
  } own{};
  struct Answer {
    bool have, contested;
  } answer{};
  const int64_t rank = group->getRank(), size = group->getSize();
  const auto backend = group->getBackend(at::kCPU);
  own.willing = shared_memory_flag().load() && backend->getBackendName() == "gloo";
  std::shared_ptr<SharedMemory> memory;
  if (rank == 0 && own.willing) {
    memory = SharedMemory::create(size);
    own.willing = memory != nullptr;
    if (memory) own.place = memory->place();
  }
  const auto offers = gather_records(group, own, at::kCPU);
  bool all = true;
  for (const Offer& offer : offers) all = all && offer.willing;
  if (all && rank != 0) memory = SharedMemory::open(offers[0].place, rank, size);
  answer = {memory != nullptr, is_contested(group)};
  for (const Answer& other : gather_records(group, answer, at::kCPU)) {
    answer.have = answer.have && other.have;
    answer.contested = answer.contested || other.contested;
  }
  std::lock_guard<std::mutex> lock(state_mutex);
  Known& known = groups.at(group->getGroupName());
  known.contested = known.contested || answer.contested;
  if (answer.contested) refuse_thread(op, group->getGroupName());
  known.met = true;
  known.memory = answer.have ? memory : nullptr;
  return known.memory;
}

// The memory that the ranks of this group share; nullptr where they talk through the group.
std::shared_ptr<SharedMemory> shared_memory_of(const char* op, const Group& group) {
  {
    std::lock_guard<std::mutex> lock(state_mutex);
    const Known& known = groups.at(group->getGroupName());
    if (known.met) return known.memory;
  }
  return meet_neighbours(op, group);
}

double timeout_of(const Group& group) {
  return std::chrono::duration<double>(group->getBackend(at::kCPU)->getBackendOptions()->timeout)
      .count();
}

void count(const std::string& what, int64_t number) {
  std::lock_guard<std::mutex> lock(state_mutex);
  counts[what] += number;
}

// One transfer of an op between ranks: counts its bytes, and how long the host is in it.
class Transfer {
 public:
  Transfer(const char* op, int64_t bytes) : op_(op) { count(op_ + "/bytes", bytes); }
  ~Transfer() {
    const auto taken = std::chrono::steady_clock::now() - start_;
    count(op_ + "/us", std::chrono::duration_cast<std::chrono::microseconds>(taken).count());
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

 private:
  const std::string op_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// A collective that has begun. Off the CPU autograd has a thread of its own for each device, and
// the host communicates nothing itself, so that there is no one thread to which a group would
// belong.
struct Turn {
  Group group;
  Token token;
};

// What comes before every collective: one thread at a time, the optional order check, the counters.
Turn begin(const char* op, const char* kind, int64_t bytes, const at::Device& device,
           int64_t group_size, const std::string& group_name) {
  Group group = find_group(op, group_size, group_name);
  Turn turn{group, device.is_cpu() ? claim(op, group) : nullptr};
  if (order_check()) compare_order(op, kind, bytes, device, group);
  std::lock_guard<std::mutex> lock(state_mutex);
  counts[kind] += 1;
  counts[std::string(kind) + "_bytes"] += bytes;
  return turn;
}

}  // namespace

std::function<void()> start_all_reduce_sum(const char* op, at::Tensor& tensor, int64_t group_size,
                                           const std::string& group_name) {
  if (group_size == 1) return [] {};
  TORCH_INTERNAL_ASSERT(tensor.is_contiguous(), op, ": the sum needs a contiguous buffer");
  const Turn turn =
      begin(op, "all_reduce", tensor.nbytes(), tensor.device(), group_size, group_name);
  const Group& group = turn.group;
  auto memory = tensor.is_cpu() ? shared_memory_of(op, group) : nullptr;
  if (memory && can_sum_in_rank_order(tensor.scalar_type())) {
    count("in_shared_memory", 1);
    // The dtype too must be equal on all ranks.
    const std::string kind = std::string("all_reduce ") + c10::toString(tensor.scalar_type());
    memory->start(op, kind.c_str(), tensor.const_data_ptr(), tensor.nbytes(), timeout_of(group));
    return [turn, memory, tensor] {
      memory->finish_sum(tensor.mutable_data_ptr(), tensor.scalar_type());
    };
  }
  std::vector<at::Tensor> tensors{tensor};
  auto work = group->allreduce(tensors);
  return [turn, work, tensors] { work->wait(); };
}

int64_t rank_in_group(const char* op, int64_t group_size, const std::string& group_name) {
  return group_size == 1 ? 0 : find_group(op, group_size, group_name)->getRank();
}

void all_reduce_sum(const char* op, at::Tensor& tensor, int64_t group_size,
                    const std::string& group_name) {
  start_all_reduce_sum(op, tensor, group_size, group_name)();
}

at::Tensor all_gather(const char* op, const at::Tensor& part, int64_t group_size,
                      const std::string& group_name) {
  if (group_size == 1) return part.unsqueeze(0);
  TORCH_INTERNAL_ASSERT(part.is_contiguous(), op, ": the gather needs a contiguous buffer");
  const Turn turn = begin(op, "all_gather", part.nbytes(), part.device(), group_size, group_name);
  const Group& group = turn.group;
  auto memory = part.is_cpu() ? shared_memory_of(op, group) : nullptr;
  if (!memory) return gather_into_new(group, part);
  count("in_shared_memory", 1);
  at::Tensor all = empty_for_all(group, part);
  memory->start(op, "all_gather", part.const_data_ptr(), part.nbytes(), timeout_of(group));
  memory->finish_gather(all.mutable_data_ptr());
  return all;
}

std::vector<std::string> exchange_bytes(const std::string& record, int64_t group_size,
                                        const std::string& group_name, double timeout_s) {
  if (group_size == 1) return {record};
  const auto size = static_cast<int64_t>(record.size());
  const Turn turn = begin("exchange_bytes", "all_gather", size, at::kCPU, group_size, group_name);
  at::Tensor part = at::empty({size}, at::kByte);
  std::memcpy(part.mutable_data_ptr(), record.data(), record.size());
  c10d::AllgatherOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  at::Tensor all = gather_into_new(turn.group, part, options);
  std::vector<std::string> records;
  for (int64_t rank = 0; rank < group_size; ++rank) {
    records.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * size, size);
  }
  return records;
}

void swap_bytes(const char* op, const std::vector<std::vector<Span>>& outgoing,
                const std::vector<std::vector<Span>>& incoming, int64_t group_size,
                const std::string& group_name, std::optional<double> own_timeout_s) {
  if (group_size == 1) return;
  // The order check compares the bytes, which here differ from rank to rank.
  const Turn turn = begin(op, "swap", 0, at::kCPU, group_size, group_name);
  const Group& group = turn.group;
  const double timeout_s = own_timeout_s.value_or(timeout_of(group));
  int64_t bytes = 0;
  for (int64_t peer = 0; peer < group_size; ++peer) {
    if (peer == group->getRank()) continue;
    for (const Span& span : outgoing[peer]) bytes += span.bytes;
  }
  count("swap_bytes", bytes);
  const Transfer transfer(op, bytes);
  const auto memory = shared_memory_of(op, group);
  if (memory) {
    count("in_shared_memory", 1);
    memory->swap(op, outgoing, incoming, timeout_s);
    return;
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<Message> arriving;
  for (int64_t peer = 0; peer < group_size; ++peer) {
    if (peer == group->getRank()) continue;
    for (Message& message : messages_of(incoming[peer])) {
      std::vector<at::Tensor> tensors{message.bytes};
      works.push_back(group->recv(tensors, static_cast<int>(peer), 0));
      arriving.push_back(std::move(message));
    }
  }
  for (int64_t peer = 0; peer < group_size; ++peer) {
    if (peer == group->getRank()) continue;
    for (const Message& message : messages_of(outgoing[peer])) {
      message.copy([](char* packed, char* span, int64_t size) { std::memcpy(packed, span, size); });
      std::vector<at::Tensor> tensors{message.bytes};
      works.push_back(group->send(tensors, static_cast<int>(peer), 0));
    }
  }
  const std::chrono::milliseconds timeout(static_cast<int64_t>(timeout_s * 1000));
  for (const auto& work : works) work->wait(timeout);
  for (const Message& message : arriving) {
    message.copy([](char* packed, char* span, int64_t size) { std::memcpy(span, packed, size); });
  }
}

at::Tensor all_to_all_rows(const char* op, const at::Tensor& rows, const std::vector<int64_t>& sent,
                           const std::vector<int64_t>& received, int64_t group_size,
                           const std::string& group_name) {
  if (group_size == 1) return rows;
  const Turn turn = begin(op, "all_to_all", 0, rows.device(), group_size, group_name);
  const Group& group = turn.group;
  const int64_t num_rows = sum_of(received);
  at::Tensor output = at::empty({num_rows, rows.size(1)}, rows.options());
  const int64_t row_bytes = rows.size(1) * rows.element_size();
  const int64_t bytes = (rows.size(0) - sent[group->getRank()]) * row_bytes;
  count("all_to_all_bytes", bytes);
  const Transfer transfer(op, bytes);
  if (row_bytes == 0) return output;
  at::Tensor in = rows.view(at::kByte), out = output.view(at::kByte);  // every dtype travels
  auto out_splits = received, in_splits = sent;
#pragma GCC diagnostic push  // its newer name is missing in the oldest torch that is supported
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  group->alltoall_base(out, in, out_splits, in_splits)->wait();
#pragma GCC diagnostic pop
  return output;
}

std::map<std::string, int64_t> collective_counts() {
  std::lock_guard<std::mutex> lock(state_mutex);
  return counts;
}

void reset_collective_counts() {
  std::lock_guard<std::mutex> lock(state_mutex);
  counts.clear();
}

bool order_check() { return order_check_flag().load(); }

void set_order_check(bool on) { order_check_flag().store(on); }

void set_shared_memory(bool on) {
  shared_memory_flag().store(on);
  std::lock_guard<std::mutex> lock(state_mutex);
  for (auto& [name, known] : groups) {
    known.met = false;
    known.memory = nullptr;
  }
}

}  // namespace parallel_ext
