#include "comm.h"

#include <ATen/ops/empty.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace parallel_ext {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::mutex state_mutex;
std::map<std::string, int64_t> counts;           // guarded by state_mutex
std::map<std::string, int64_t> running_numbers;  // by group name, guarded by state_mutex

std::atomic<bool>& order_check_flag() {
  static std::atomic<bool> flag = [] {
    const char* value = std::getenv("PARALLEL_EXT_DEBUG");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
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

at::Tensor gather_into_new(const Group& group, const at::Tensor& part,
                           const c10d::AllgatherOptions& options = {}) {
  std::vector<int64_t> shape{group->getSize()};
  shape.insert(shape.end(), part.sizes().begin(), part.sizes().end());
  at::Tensor all = at::empty(shape, part.options());
  std::vector<at::Tensor> inputs{part};
  std::vector<std::vector<at::Tensor>> outputs{all.unbind(0)};
  group->allgather(outputs, inputs, options)->wait();
  return all;
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
  at::Tensor record = at::empty({static_cast<int64_t>(sizeof(own))}, at::kByte);
  std::memcpy(record.mutable_data_ptr(), &own, sizeof(own));
  at::Tensor all = gather_into_new(group, record.to(device)).cpu();
  for (int64_t rank = 0; rank < group->getSize(); ++rank) {
    OrderRecord other;
    std::memcpy(&other, static_cast<const char*>(all.const_data_ptr()) + rank * sizeof(other),
                sizeof(other));
    TORCH_CHECK(std::memcmp(&own, &other, sizeof(own)) == 0, op, ": order check: rank ",
                group->getRank(), " is about to run ", own.what, " as number ", own.number,
                " with ", own.bytes, " bytes, but rank ", rank, " runs ", other.what, " as number ",
                other.number, " with ", other.bytes,
                " bytes; all ranks must create the same collectives in the same order");
  }
}

// What comes before every collective: the optional order check, then the counters.
Group begin(const char* op, const char* kind, int64_t bytes, const at::Device& device,
            int64_t group_size, const std::string& group_name) {
  Group group = find_group(op, group_size, group_name);
  if (order_check()) compare_order(op, kind, bytes, device, group);
  std::lock_guard<std::mutex> lock(state_mutex);
  counts[kind] += 1;
  counts[std::string(kind) + "_bytes"] += bytes;
  return group;
}

}  // namespace

std::function<void()> start_all_reduce_sum(const char* op, at::Tensor& tensor, int64_t group_size,
                                           const std::string& group_name) {
  if (group_size == 1) return [] {};
  TORCH_INTERNAL_ASSERT(tensor.is_contiguous(), op, ": the sum needs a contiguous buffer");
  Group group = begin(op, "all_reduce", tensor.nbytes(), tensor.device(), group_size, group_name);
  std::vector<at::Tensor> tensors{tensor};
  auto work = group->allreduce(tensors);
  return [work, tensors] { work->wait(); };
}

void all_reduce_sum(const char* op, at::Tensor& tensor, int64_t group_size,
                    const std::string& group_name) {
  start_all_reduce_sum(op, tensor, group_size, group_name)();
}

at::Tensor all_gather(const char* op, const at::Tensor& part, int64_t group_size,
                      const std::string& group_name) {
  if (group_size == 1) return part.unsqueeze(0);
  TORCH_INTERNAL_ASSERT(part.is_contiguous(), op, ": the gather needs a contiguous buffer");
  Group group = begin(op, "all_gather", part.nbytes(), part.device(), group_size, group_name);
  return gather_into_new(group, part);
}

std::vector<std::string> exchange_bytes(const std::string& record, int64_t group_size,
                                        const std::string& group_name, double timeout_s) {
  if (group_size == 1) return {record};
  const auto size = static_cast<int64_t>(record.size());
  Group group = begin("exchange_bytes", "all_gather", size, at::kCPU, group_size, group_name);
  at::Tensor part = at::empty({size}, at::kByte);
  std::memcpy(part.mutable_data_ptr(), record.data(), record.size());
  c10d::AllgatherOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  at::Tensor all = gather_into_new(group, part, options);
  std::vector<std::string> records;
  for (int64_t rank = 0; rank < group_size; ++rank) {
    records.emplace_back(static_cast<const char*>(all.const_data_ptr()) + rank * size, size);
  }
  return records;
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

}  // namespace parallel_ext
