#include "comm/known_groups.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <utility>

namespace parallel_ext {

ProcessGroup find_group(const char* op, const Group& named) {
  ProcessGroup group;
  try {
    group = c10d::resolve_process_group(named.name);
  } catch (const std::exception&) {
    TORCH_CHECK_VALUE(false, op, ": no live process group is named '", named.name,
                      "'; pass the name of a group that this process belongs to");
  }
  TORCH_CHECK_VALUE(group->getSize() == named.size, op, ": group '", named.name, "' has ",
                    group->getSize(), " ranks, but group_size is ", named.size,
                    "; pass the size of the same group");
  return group;
}

at::Tensor empty_for_all(const ProcessGroup& group, const at::Tensor& part) {
  std::vector<int64_t> shape{group->getSize()};
  shape.insert(shape.end(), part.sizes().begin(), part.sizes().end());
  return at::empty(shape, part.options());
}

at::Tensor gather_into_new(const ProcessGroup& group, const at::Tensor& part,
                           const c10d::AllgatherOptions& options) {
  at::Tensor all = empty_for_all(group, part);
  std::vector<at::Tensor> inputs{part};
  std::vector<std::vector<at::Tensor>> outputs{all.unbind(0)};
  group->allgather(outputs, inputs, options)->wait();
  return all;
}

namespace {

std::mutex groups_mutex;

// What this process knows of a group.
struct KnownGroup {
  // To tell a group from a destroyed one of the same name.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  Token::weak_type thread = {};                      // that the group belongs to
  int64_t collectives = 0;                           // of that thread
  Token::weak_type collective = {};                  // the last of them
  bool contested = false;                            // a second thread came too early: see claim()
  int64_t compared = 0;                              // collectives whose order was checked
  std::shared_ptr<const Sharing> sharing = nullptr;  // null until the ranks have found it out
  pid_t process = getpid();                          // that has joined it
};
std::map<std::string, KnownGroup> groups;  // by name, guarded by groups_mutex

// What is known of a group, nothing at first. The caller holds groups_mutex.
KnownGroup& known_of(const ProcessGroup& group) {
  const std::string name = group->getGroupName();
  auto found = groups.find(name);
  if (found == groups.end() || found->second.group.lock() != group) {
    for (auto each = groups.begin(); each != groups.end();) {  // of destroyed groups
      each = each->second.group.expired() ? groups.erase(each) : std::next(each);
    }
    KnownGroup fresh{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)};
    found = groups.insert_or_assign(name, std::move(fresh)).first;
  }
  return found->second;
}

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

// The records of all ranks of a group, in rank order.
template <typename Record>
std::vector<Record> gather_records(const ProcessGroup& group, const Record& own,
                                   const at::Device& device) {
  at::Tensor part = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(part.mutable_data_ptr(), &own, sizeof(own));
  const at::Tensor all = gather_into_new(group, part.to(device)).cpu();
  std::vector<Record> records(group->getSize());
  std::memcpy(records.data(), all.const_data_ptr(), all.nbytes());
  return records;
}

// What a rank is about to run, of fixed size so that ranks that disagree can still exchange it.
struct OrderRecord {
  char what[48];
  int64_t number;
  int64_t bytes;
};

void compare_order(const char* op, const char* kind, int64_t bytes, const at::Device& device,
                   const ProcessGroup& group) {
  OrderRecord own{};
  std::snprintf(own.what, sizeof(own.what), "%s/%s", op, kind);
  own.bytes = bytes;
  {
    std::lock_guard<std::mutex> lock(groups_mutex);
    own.number = known_of(group).compared++;
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
  C10_THROW_ERROR(NotImplementedError,
                  std::string(op) + ": group '" + group_name +
                      "' is used by another thread; ops of one group belong to one thread: load, "
                      "train, run and generate with a model in the same one");
}

// Reserves the group for this thread: the collectives of two threads could run in another order on
// another rank. A group belongs to the first thread that uses it, until that thread ends. If
// another thread comes before the first one's second collective, other ranks may have matched the
// wrong thread's collective already: then no thread can use the group any more.
Token claim(const char* op, const ProcessGroup& group) {
  using std::chrono::steady_clock;
  thread_local const Token self = std::make_shared<const bool>(true);
  const auto deadline = steady_clock::now() + std::chrono::seconds(1);
  std::unique_lock<std::mutex> lock(groups_mutex);
  for (;;) {
    KnownGroup& known = known_of(group);
    TORCH_CHECK(known.process == getpid(), op, ": this process was forked from a rank of group '",
                group->getGroupName(), "', and cannot take its place; call it in that one, not in ",
                "a worker of a DataLoader");
    const Token owner = known.thread.lock();
    if (!owner) known.collectives = 0;
    if (!owner || owner == self) {
      if (known.contested) refuse_thread(op, group->getGroupName());
      ++known.collectives;
      known.thread = self;
      const Token collective = std::make_shared<const bool>(true);
      known.collective = collective;
      return collective;
    }
    // Python's join() returns a moment before the thread has ended.
    const bool ending = known.collective.expired() && steady_clock::now() < deadline;
    if (!ending) {
      if (known.collectives < 2) {
        known.contested = true;
        if (known.sharing && known.sharing->memory) known.sharing->memory->abandon();
      }
      refuse_thread(op, group->getGroupName());
    }
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
}

bool is_contested(const ProcessGroup& group) {
  std::lock_guard<std::mutex> lock(groups_mutex);
  return groups.at(group->getGroupName()).contested;
}

// Names the processes that see each other in /proc: those of a container on a machine that runs.
std::string own_host() {
  std::string name;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), name);
  char target[64];
  const ssize_t length = readlink("/proc/self/ns/pid", target, sizeof(target));
  if (length > 0) name.append(target, static_cast<size_t>(length));
  return name;
}

// Finds out which ranks of a group are on the same host, and lets those map the same memory, in
// three exchanges. Throws on every rank if a second thread has used the group on one of them
// meanwhile.
std::shared_ptr<const Sharing> meet_host_peers(const char* op, const ProcessGroup& group) {
  struct Presence {
    char host[127];
    bool willing;
  } presence{};
  struct Offer {
    SharedMemory::Place place;
    bool made;
  } own{};
  struct Answer {
    bool have, contested;
  } answer{};
  const int64_t rank = group->getRank();
  const auto backend = group->getBackend(at::kCPU);
  presence.willing = shared_memory_flag().load() && backend->getBackendName() == "gloo";
  std::snprintf(presence.host, sizeof(presence.host), "%s", own_host().c_str());
  bool all = true;
  std::map<std::string, std::vector<int64_t>> hosts;
  const auto presences = gather_records(group, presence, at::kCPU);
  Sharing sharing;
  for (int64_t peer = 0; peer < group->getSize(); ++peer) {
    auto& ranks = hosts[presences[peer].host];
    if (ranks.empty()) sharing.leaders.push_back(peer);
    ranks.push_back(peer);
    all = all && presences[peer].willing;
  }
  for (const auto& [host, ranks] : hosts) all = all && ranks.size() > 1;
  const std::vector<int64_t>& ranks = hosts[presence.host];
  const auto size = static_cast<int64_t>(ranks.size());
  if (all && rank == ranks[0]) {
    sharing.memory = SharedMemory::create(size);
    own.made = sharing.memory != nullptr;
    if (own.made) own.place = sharing.memory->place();
  }
  const Offer offer = gather_records(group, own, at::kCPU)[ranks[0]];
  if (offer.made && rank != ranks[0]) {
    const int64_t index = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    sharing.memory = SharedMemory::open(offer.place, index, size);
  }
  answer = {sharing.memory != nullptr, is_contested(group)};
  for (const Answer& other : gather_records(group, answer, at::kCPU)) {
    answer.have = answer.have && other.have;
    answer.contested = answer.contested || other.contested;
  }
  std::lock_guard<std::mutex> lock(groups_mutex);
  KnownGroup& known = groups.at(group->getGroupName());
  known.contested = known.contested || answer.contested;
  if (answer.contested) refuse_thread(op, group->getGroupName());
  if (!answer.have) sharing.memory = nullptr;
  if (sharing.memory) sharing.memory->name_ranks(ranks);
  known.sharing = std::make_shared<const Sharing>(std::move(sharing));
  return known.sharing;
}

}  // namespace

std::shared_ptr<const Sharing> sharing_of(const char* op, const ProcessGroup& group) {
  {
    std::lock_guard<std::mutex> lock(groups_mutex);
    const KnownGroup& known = groups.at(group->getGroupName());
    if (known.sharing) return known.sharing;
  }
  return in_process_group(op, group, [&] { return meet_host_peers(op, group); });
}

std::shared_ptr<SharedMemory> shared_memory_of(const char* op, const ProcessGroup& group) {
  const auto sharing = sharing_of(op, group);
  return sharing->on_one_host() ? sharing->memory : nullptr;
}

// Off the CPU autograd has a thread of its own for each device and the host communicates nothing
// itself, so that a group belongs to no thread.
Turn begin_turn(const char* op, const char* kind, int64_t bytes, const at::Device& device,
                const Group& named) {
  ProcessGroup group = find_group(op, named);
  Turn turn{group, device.is_cpu() ? claim(op, group) : nullptr};
  if (order_check()) compare_order(op, kind, bytes, device, group);
  return turn;
}

bool order_check() { return order_check_flag().load(); }

void set_order_check(bool on) { order_check_flag().store(on); }

void set_shared_memory(bool on) {
  shared_memory_flag().store(on);
  std::lock_guard<std::mutex> lock(groups_mutex);
  for (auto& [name, known] : groups) known.sharing = nullptr;
}

}  // namespace parallel_ext
