// Process groups and the collectives that the ops use. No other file includes c10d. On the CPU
// those of a group belong to one thread. Every function must be called by every rank of the group,
// in the same order. A group of size 1 needs no name and costs nothing. All throw if no live group
// has this name, or if its size is not `group_size`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/shared_memory.h"

namespace parallel_ext {

// This process' own; asks nobody.
int64_t rank_in_group(const char* op, int64_t group_size, const std::string& group_name);

// Sums `tensor` over the group in place; the bits are the same on every rank.
void all_reduce_sum(const char* op, at::Tensor& tensor, int64_t group_size,
                    const std::string& group_name);

// Starts the same sum and returns the function that waits for it. `tensor` must not be touched
// before that call, which must come before the op returns.
[[nodiscard]] std::function<void()> start_all_reduce_sum(const char* op, at::Tensor& tensor,
                                                         int64_t group_size,
                                                         const std::string& group_name);

// Contiguous `part`, equal shape on every rank -> [group_size, *part.shape], in rank order.
at::Tensor all_gather(const char* op, const at::Tensor& part, int64_t group_size,
                      const std::string& group_name);

// `record` of every rank, in rank order. `timeout_s` bounds the wait for a rank that does not come.
std::vector<std::string> exchange_bytes(const std::string& record, int64_t group_size,
                                        const std::string& group_name, double timeout_s);

// Brings the bytes of `outgoing[r]` to rank r and fills `incoming[r]` with what rank r sends; CPU
// memory. What two ranks have for each other must be as many bytes, in any number of spans.
// `timeout_s` bounds the wait for a rank that does not come; without it the group's own time does.
void swap_bytes(const char* op, const std::vector<std::vector<Span>>& outgoing,
                const std::vector<std::vector<Span>>& incoming, int64_t group_size,
                const std::string& group_name, std::optional<double> timeout_s = {});

// Contiguous `rows` [N, H], the first sent[0] of them for rank 0 and so on -> received[0] rows of
// rank 0 and so on; any dtype, any device.
at::Tensor all_to_all_rows(const char* op, const at::Tensor& rows, const std::vector<int64_t>& sent,
                           const std::vector<int64_t>& received, int64_t group_size,
                           const std::string& group_name);

// Collectives since the last reset, by kind; "<kind>_bytes" holds the payload of one rank;
// "in_shared_memory" how many of them no process group carried. Of swap_bytes and all_to_all_rows,
// "<op>/bytes" is what the op brought to other ranks, and "<op>/us" the microseconds in it, the
// wait for other ranks included; on CUDA only those of the host.
std::map<std::string, int64_t> collective_counts();
void reset_collective_counts();

// With the order check on, every collective first compares (op, running number, bytes) over its
// group and throws on all ranks where they differ. Starts as PARALLEL_EXT_DEBUG=1 says.
bool order_check();
void set_order_check(bool on);

// Whether CPU tensors go through memory that the ranks share where all ranks of a group run on one
// host (csrc/shared_memory.h), instead of through the group. Starts as on, or off with
// PARALLEL_EXT_SHARED_MEMORY=0; every rank of a job must call this before the same collective.
void set_shared_memory(bool on);

}  // namespace parallel_ext
