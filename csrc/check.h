// Argument checks shared by the ops. Every text names the op, the rule and the offending value.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace parallel_ext {

inline constexpr const char* kNoSecondDerivative =
    ": second derivatives are not implemented; call backward without create_graph=True";

// The dtype in which sums of the tensor's numbers are computed.
inline at::ScalarType wide_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_floating(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.is_floating_point(), op, ": ", name, " must be floating point, got ",
                   tensor.scalar_type());
}

inline void check_int64(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong, op, ": ", name, " must be int64 (Long), got ",
                   tensor.scalar_type());
}

inline void check_dim(const char* op, const char* name, const at::Tensor& tensor, int64_t dim) {
  TORCH_CHECK_VALUE(tensor.dim() == dim, op, ": expected ", dim, " dimensions in ", name,
                    ", got shape ", tensor.sizes());
}

inline void check_same_dtype(const char* op, const char* name, const at::Tensor& tensor,
                             const char* other_name, const at::Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), op, ": ", name, " is ",
                   tensor.scalar_type(), " but ", other_name, " is ", other.scalar_type(),
                   "; cast one of them");
}

// A tensor of sums of the numbers of another one.
inline void check_wide_dtype(const char* op, const char* name, const at::Tensor& tensor,
                             const char* other_name, const at::Tensor& other) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == wide_type(other), op, ": ", name, " must be ",
                   wide_type(other), " for ", other_name, " in ", other.scalar_type(), ", got ",
                   tensor.scalar_type());
}

inline void check_shape(const char* op, const char* name, const at::Tensor& tensor,
                        at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.sizes() == shape, op, ": ", name, " must have the shape ", shape,
                    ", got ", tensor.sizes());
}

// The sum of an argument's numbers, which are counts.
inline int64_t sum_of_counts(const char* op, const char* name, at::IntArrayRef counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) {
    TORCH_CHECK_VALUE(count >= 0, op, ": ", name, " ", counts, " has a negative number");
    TORCH_CHECK_VALUE(!__builtin_add_overflow(sum, count, &sum), op, ": the sum of ", name, " ",
                      counts, " does not fit into 64 bits");
  }
  return sum;
}

// The number of experts on all ranks. The bound keeps small what is allocated for each expert.
inline int64_t num_experts_of(const char* op, at::IntArrayRef experts_per_rank) {
  constexpr int64_t kMost = int64_t{1} << 20;
  const int64_t num_experts = sum_of_counts(op, "experts_per_rank", experts_per_rank);
  TORCH_CHECK_VALUE(1 <= num_experts && num_experts <= kMost, op, ": experts_per_rank ",
                    experts_per_rank, " are ", num_experts, " experts; there must be 1 to ", kMost);
  return num_experts;
}

// `vocab_start` and `vocab_stop` are the half-open range of ids that this rank holds in `rows`
// rows.
inline void check_vocab_range(const char* op, const char* name, int64_t rows, int64_t vocab_size,
                              int64_t vocab_start, int64_t vocab_stop) {
  TORCH_CHECK_VALUE(0 <= vocab_start && vocab_start <= vocab_stop && vocab_stop <= vocab_size, op,
                    ": the shard [", vocab_start, ", ", vocab_stop, ") is not inside [0, ",
                    vocab_size, ")");
  TORCH_CHECK_VALUE(rows == vocab_stop - vocab_start, op, ": ", name, " hold ", rows,
                    " of the vocabulary, but this rank's shard is [", vocab_start, ", ", vocab_stop,
                    ") of ", vocab_size, ", which is ", vocab_stop - vocab_start,
                    "; pass this rank's shard, neither gathered nor padded");
}

}  // namespace parallel_ext
