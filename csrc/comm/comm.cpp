#include "comm/comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "base/layout.h"
#include "base/sum_rows.h"
#include "comm/known_groups.h"
#include "comm/lost_ranks.h"
#include "comm/profiler_range.h"

namespace parallel_ext {
namespace {

std::mutex counts_mutex;
std::map<std::string, int64_t> counts;  // guarded by counts_mutex

// A piece of what one rank sends to another: the memory itself, or a copy of several spans.
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

// Splits by the number of bytes alone, so that sender and receiver get the same pieces.
std::vector<Message> messages_of(const std::vector<Span>& spans) {
  constexpr int64_t kMost = int64_t{4} << 20;
  std::vector<std::vector<Span>> pieces;
  int64_t room = 0;
  for (Span span : spans) {
    while (span.bytes > 0) {
      if (room == 0) {
        pieces.emplace_back();
        room = kMost;
      }
      const int64_t bytes = std::min(room, span.bytes);
      pieces.back().push_back({span.data, bytes});
      span.data = static_cast<char*>(span.data) + bytes;
      span.bytes -= bytes;
      room -= bytes;
    }
  }
  std::vector<Message> messages;
  for (auto& piece : pieces) {
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

double timeout_of(const ProcessGroup& group) {
  return std::chrono::duration<double>(group->getBackend(at::kCPU)->getBackendOptions()->timeout)
      .count();
}

void count(const std::string& what, int64_t number) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts[what] += number;
}

// One transfer of an op between ranks: counts its bytes and its time on the host.
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

// Begins a collective and counts it.
Turn begin(const char* op, const char* kind, int64_t bytes, const at::Device& device,
           const Group& group) {
  Turn turn = begin_turn(op, kind, bytes, device, group);
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts[kind] += 1;
  counts[std::string(kind) + "_bytes"] += bytes;
  return turn;
}

// Up to here the way over the network takes so long to begin that it pays to send less often.
// Above, a group computes what comes next while its process group sends.
constexpr int64_t kMostBytesByHost = int64_t{1} << 20;

// Sums over the hosts what each host has summed for itself: the first rank of each for all of them.
// Every host adds in the order of the hosts, so that all get the same bits.
void sum_over_hosts(const char* op, at::Tensor& tensor, const ProcessGroup& group,
                    const Sharing& sharing) {
  const int64_t rank = group->getRank();
  SharedMemory& memory = *sharing.memory;
  const double timeout_s = timeout_of(group);
  const auto& leaders = sharing.leaders;
  if (std::find(leaders.begin(), leaders.end(), rank) != leaders.end()) {
    std::vector<at::Tensor> sums;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    try {
      for (const int64_t leader : leaders) {
        sums.push_back(leader == rank ? tensor : at::empty_like(tensor));
        if (leader == rank) continue;
        std::vector<at::Tensor> incoming{sums.back()}, outgoing{tensor};
        works.push_back(group->recv(incoming, static_cast<int>(leader), 0));
        works.push_back(group->send(outgoing, static_cast<int>(leader), 0));
      }
      const std::chrono::milliseconds timeout(static_cast<int64_t>(timeout_s * 1000));
      for (const auto& work : works) work->wait(timeout);
    } catch (const std::exception& error) {
      memory.abandon();  // ends the wait of the other ranks of the host
      throw_with_lost_ranks(op, group->getGroupName(), error);
    }
    std::vector<const void*> parts;
    for (const at::Tensor& sum : sums) parts.push_back(sum.const_data_ptr());
    sum_in_rank_order(tensor.scalar_type(), parts, 0, tensor.numel(), tensor.mutable_data_ptr());
  }
  try {
    memory.start(op, "all_reduce over hosts", tensor.const_data_ptr(), tensor.nbytes(), timeout_s);
    memory.finish_broadcast(tensor.mutable_data_ptr());
  } catch (const c10::Error& error) {  // whoever gave up here may have waited for another host
    throw_with_lost_ranks(op, group->getGroupName(), error);
  }
}

// Starts a sum that has begun, and returns the function that waits for it.
std::function<void()> start_sum(const char* op, at::Tensor& tensor, const Turn& turn) {
  TORCH_INTERNAL_ASSERT(tensor.is_contiguous(), op, ": the sum needs a contiguous buffer");
  const ProcessGroup& process_group = turn.group;
  const auto sharing = tensor.is_cpu() ? sharing_of(op, process_group) : nullptr;
  const bool here = sharing && sharing->on_one_host();
  const bool fits = here || static_cast<int64_t>(tensor.nbytes()) <= kMostBytesByHost;
  if (sharing && sharing->memory && fits && can_sum_in_rank_order(tensor.scalar_type())) {
    count("in_shared_memory", 1);
    // The dtype too must be equal on all ranks.
    const std::string kind = std::string("all_reduce ") + c10::toString(tensor.scalar_type());
    sharing->memory->start(op, kind.c_str(), tensor.const_data_ptr(), tensor.nbytes(),
                           timeout_of(process_group));
    return [op, turn, sharing, tensor, here]() mutable {
      sharing->memory->finish_sum(tensor.mutable_data_ptr(), tensor.scalar_type());
      if (!here) sum_over_hosts(op, tensor, turn.group, *sharing);
    };
  }
  std::vector<at::Tensor> tensors{tensor};
  const auto work =
      in_process_group(op, process_group, [&] { return process_group->allreduce(tensors); });
  return
      [op, turn, work, tensors] { in_process_group(op, turn.group, [&] { return work->wait(); }); };
}

}  // namespace

std::function<void()> start_all_reduce_sum(const char* op, at::Tensor& tensor, const Group& group) {
  if (group.alone()) return [] {};
  const Turn turn = begin(op, "all_reduce", tensor.nbytes(), tensor.device(), group);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const ProfilerRange range("start_all_reduce", bytes, *turn.group);
  return [finish = start_sum(op, tensor, turn), group = turn.group, bytes] {
    const ProfilerRange range("finish_all_reduce", bytes, *group);
    finish();
  };
}

void all_reduce_sum(const char* op, at::Tensor& tensor, const Group& group) {
  if (group.alone()) return;
  const Turn turn = begin(op, "all_reduce", tensor.nbytes(), tensor.device(), group);
  const ProfilerRange range("all_reduce", tensor.nbytes(), *turn.group);
  start_sum(op, tensor, turn)();
}

int64_t rank_in_group(const char* op, const Group& group) {
  return group.alone() ? 0 : find_group(op, group)->getRank();
}

void check_rank(const char* op, int64_t rank, const Group& group) {
  const int64_t own = rank_in_group(op, group);
  TORCH_CHECK_VALUE(rank == own, op, ": rank ", rank, " was given, but this process is rank ", own,
                    " of group '", group.name, "'; pass its own rank");
}

at::Tensor all_gather(const char* op, const at::Tensor& part, const Group& group) {
  if (group.alone()) return part.unsqueeze(0);
  TORCH_INTERNAL_ASSERT(part.is_contiguous(), op, ": the gather needs a contiguous buffer");
  const Turn turn = begin(op, "all_gather", part.nbytes(), part.device(), group);
  const ProfilerRange range("all_gather", part.nbytes(), *turn.group);
  const ProcessGroup& process_group = turn.group;
  auto memory = part.is_cpu() ? shared_memory_of(op, process_group) : nullptr;
  if (!memory) {
    return in_process_group(op, process_group,
                            [&] { return gather_into_new(process_group, part); });
  }
  count("in_shared_memory", 1);
  at::Tensor all = empty_for_all(process_group, part);
  memory->start(op, "all_gather", part.const_data_ptr(), part.nbytes(), timeout_of(process_group));
  memory->finish_gather(all.mutable_data_ptr());
  return all;
}

std::vector<std::string> exchange_bytes(const std::string& record, const Group& group,
                                        double timeout_s) {
  if (group.alone()) return {record};
  const auto size = static_cast<int64_t>(record.size());
  const Turn turn = begin("exchange_bytes", "all_gather", size, at::kCPU, group);
  const ProfilerRange range("exchange_bytes", size, *turn.group);
  at::Tensor part = at::empty({size}, at::kByte);
  std::memcpy(part.mutable_data_ptr(), record.data(), record.size());
  c10d::AllgatherOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  at::Tensor all = gather_into_new(turn.group, part, options);
  std::vector<std::string> records;
  for (int64_t rank = 0; rank < group.size; ++rank) {
    records.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * size, size);
  }
  return records;
}

void swap_bytes(const char* op, const std::vector<std::vector<Span>>& outgoing,
                const std::vector<std::vector<Span>>& incoming, const Group& group,
                std::optional<double> own_timeout_s) {
  if (group.alone()) return;
  // The order check compares the bytes, which here differ from rank to rank.
  const Turn turn = begin(op, "swap", 0, at::kCPU, group);
  const ProcessGroup& process_group = turn.group;
  const double timeout_s = own_timeout_s.value_or(timeout_of(process_group));
  int64_t bytes = 0;
  for (int64_t peer = 0; peer < group.size; ++peer) {
    if (peer == process_group->getRank()) continue;
    for (const Span& span : outgoing[peer]) bytes += span.bytes;
  }
  count("swap_bytes", bytes);
  const Transfer transfer(op, bytes);
  const ProfilerRange range("swap", bytes, *process_group);
  const auto memory = shared_memory_of(op, process_group);
  if (memory) {
    count("in_shared_memory", 1);
    memory->swap(op, outgoing, incoming, timeout_s);
    return;
  }
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<Message> arriving;
  const auto send_and_receive = [&] {
    for (int64_t peer = 0; peer < group.size; ++peer) {
      if (peer == process_group->getRank()) continue;
      for (Message& message : messages_of(incoming[peer])) {
        std::vector<at::Tensor> tensors{message.bytes};
        works.push_back(process_group->recv(tensors, static_cast<int>(peer), 0));
        arriving.push_back(std::move(message));
      }
    }
    for (int64_t peer = 0; peer < group.size; ++peer) {
      if (peer == process_group->getRank()) continue;
      for (const Message& message : messages_of(outgoing[peer])) {
        message.copy(
            [](char* packed, char* span, int64_t size) { std::memcpy(packed, span, size); });
        std::vector<at::Tensor> tensors{message.bytes};
        works.push_back(process_group->send(tensors, static_cast<int>(peer), 0));
      }
    }
    const std::chrono::milliseconds timeout(static_cast<int64_t>(timeout_s * 1000));
    for (const auto& work : works) work->wait(timeout);
  };
  // Whoever gives a time of its own finds out itself who is missing.
  if (own_timeout_s) {
    send_and_receive();
  } else {
    in_process_group(op, process_group, send_and_receive);
  }
  for (const Message& message : arriving) {
    message.copy([](char* packed, char* span, int64_t size) { std::memcpy(span, packed, size); });
  }
}

at::Tensor all_to_all_rows(const char* op, const at::Tensor& rows, const std::vector<int64_t>& sent,
                           const std::vector<int64_t>& received, const Group& group) {
  if (group.alone()) return rows;
  const Turn turn = begin(op, "all_to_all", 0, rows.device(), group);
  const ProcessGroup& process_group = turn.group;
  const int64_t num_rows = sum_of(received);
  at::Tensor output = at::empty({num_rows, rows.size(1)}, rows.options());
  const int64_t row_bytes = rows.size(1) * rows.element_size();
  const int64_t bytes = (rows.size(0) - sent[process_group->getRank()]) * row_bytes;
  count("all_to_all_bytes", bytes);
  const Transfer transfer(op, bytes);
  const ProfilerRange range("all_to_all", bytes, *process_group);
  if (row_bytes == 0) return output;
  at::Tensor in = rows.view(at::kByte), out = output.view(at::kByte);  // every dtype travels
  auto out_splits = received, in_splits = sent;
#pragma GCC diagnostic push  // its newer name is missing in the oldest torch that is supported
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  in_process_group(op, process_group, [&] {
    return process_group->alltoall_base(out, in, out_splits, in_splits)->wait();
  });
#pragma GCC diagnostic pop
  return output;
}

std::map<std::string, int64_t> collective_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return counts;
}

void reset_collective_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts.clear();
}

}  // namespace parallel_ext
