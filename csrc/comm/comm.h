// The collectives that the ops use. No other folder includes c10d. Every rank of a group must call
// the same functions in the same order; on the CPU, from one thread. A rank that is alone
// communicates nothing. All functions throw if no live group has this name and size.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/shared_memory.h"

namespace parallel_ext {

// Rows travel as bytes, whatever their dtype. as_bytes returns a view where `tensor` is contiguous;
// as_strided makes it one where a tensor of one number has another stride than 1.
inline at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.contiguous().as_strided({tensor.numel()}, {1}).view(at::kByte);
}
inline int64_t row_bytes(const at::Tensor& rows) { return rows.size(1) * rows.element_size(); }

// What names a process group. In the schema of an op: group_size and group_name.
struct Group {
  int64_t size;
  std::string name;

  // No group at all. One of a single rank communicates: so one GPU runs NCCL's collectives.
  bool alone() const { return size == 1 && name.empty(); }

  using Fields = std::tuple<int64_t, const std::string&>;
  Fields fields() const { return {size, name}; }
};

// The rank of this process; communicates nothing.
int64_t rank_in_group(const char* op, const Group& group);

// Throws unless `rank` is this process's. For kernels: Meta kernels may name groups of others.
void check_rank(const char* op, int64_t rank, const Group& group);

// Sums `tensor` over the group in place; the bits are the same on every rank.
void all_reduce_sum(const char* op, at::Tensor& tensor, const Group& group);

// Starts the same sum and returns the function that waits for it, which must be called before the
// op returns. `tensor` must not be read or written until then.
[[nodiscard]] std::function<void()> start_all_reduce_sum(const char* op, at::Tensor& tensor,
                                                         const Group& group);

// Contiguous `part`, equal shape on every rank -> [group_size, *part.shape], in rank order.
at::Tensor all_gather(const char* op, const at::Tensor& part, const Group& group);

// `record` of every rank, in rank order. `timeout_s` bounds the wait for an absent rank.
std::vector<std::string> exchange_bytes(const std::string& record, const Group& group,
                                        double timeout_s);

// Sends the bytes of `outgoing[r]` to rank r and fills `incoming[r]` with the bytes from rank r;
// CPU memory. Sender and receiver must name equally many bytes, in any number of spans. `timeout_s`
// bounds the wait for an absent rank; without it the group's own timeout does.
void swap_bytes(const char* op, const std::vector<std::vector<Span>>& outgoing,
                const std::vector<std::vector<Span>>& incoming, const Group& group,
                std::optional<double> timeout_s = {});

// Contiguous `rows` [N, H], sent[0] for rank 0, then sent[1] for rank 1 and so on -> received[0]
// rows of rank 0, then received[1] of rank 1 and so on; any dtype, any device.
at::Tensor all_to_all_rows(const char* op, const at::Tensor& rows, const std::vector<int64_t>& sent,
                           const std::vector<int64_t>& received, const Group& group);

// Counts since the last reset: "<kind>" the collectives of a kind, "<kind>_bytes" this rank's
// payload, "in_shared_memory" those that went through shared memory. For swap_bytes and
// all_to_all_rows also "<op>/bytes", sent to other ranks, and "<op>/us", the microseconds of the
// host in the transfer, the wait for other ranks included.
std::map<std::string, int64_t> collective_counts();
void reset_collective_counts();

// With the order check, the ranks compare (op, running number, bytes) before every collective, and
// all of them raise if these differ. Off at the start, or on with PARALLEL_EXT_DEBUG=1.
bool order_check();
void set_order_check(bool on);

// Whether CPU tensors go through shared memory (comm/shared_memory.h), where all ranks of a group
// are on one host, and short sums where each of its hosts has several. On at the start, or off with
// PARALLEL_EXT_SHARED_MEMORY=0. Every rank of a job must call this before the same collective.
void set_shared_memory(bool on);

}  // namespace parallel_ext
