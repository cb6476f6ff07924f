// CUDA kernels for the rows of a mixture of experts. They exist in builds with
// PARALLEL_EXT_WITH_CUDA; scalar_t is float, double, c10::BFloat16 or c10::Half.
#pragma once

#include <cstdint>

#include "base/number.h"

namespace parallel_ext {

// All pointers are to contiguous memory of the device; outputs overlap nothing else. The kernels
// run on the current stream of the device. They use no atomics: same inputs, same bits.

// rows [num_out, most]: for each of num_out outputs the numbers of up to `most` of num_in rows.
struct RowPicks {
  const int64_t* rows;
  int64_t num_out, most, num_in;
};

// in [num_in, row_bytes] -> out [num_out, row_bytes], with one pick for each.
void gather_rows_on_cuda(const RowPicks& picks, int64_t row_bytes, const void* in, void* out,
                         int device);

// in [num_in, size] -> out [num_out, size], the sum of the rows picked for each output: in their
// order, in fp32 or wider, rounded once. The number num_in stands for no row.
template <typename scalar_t>
void sum_rows_on_cuda(const RowPicks& picks, int64_t size, const scalar_t* in, scalar_t* out,
                      int device);

// moe_gated_silu: gate_up [rows, 2 * inner], weights [rows] -> out [rows, inner].
template <typename scalar_t>
void gate_rows_on_cuda(int64_t rows, int64_t inner, const scalar_t* gate_up,
                       const wide_of<scalar_t>* weights, scalar_t* out, int device);

// grad [rows, inner] -> grad_gate_up [rows, 2 * inner], grad_weights [rows].
template <typename scalar_t>
void gate_rows_backward_on_cuda(int64_t rows, int64_t inner, const scalar_t* grad,
                                const scalar_t* gate_up, const wide_of<scalar_t>* weights,
                                scalar_t* grad_gate_up, wide_of<scalar_t>* grad_weights,
                                int device);

// Fills the part [bytes] of out [num_experts, bytes] of each expert whose count is 0 with zeros,
// and touches no other.
void zero_unused_on_cuda(const int64_t* counts, int64_t num_experts, int64_t bytes, void* out,
                         int device);

// A stable counting sort: ids [size] -> counts [num_experts]; sources [size], the positions of
// expert 0's ids, then of expert 1's, and so on; and slots [size], where among the sources each
// position is. Ids outside of [0, num_experts) are left out: their slots are 0, and so are as many
// sources at the end. `workspace` has room for so many numbers:
int64_t sort_workspace(int64_t size, int64_t num_experts);
void sort_ids_on_cuda(const int64_t* ids, int64_t size, int64_t num_experts, int64_t* workspace,
                      int64_t* counts, int64_t* sources, int64_t* slots, int device);

}  // namespace parallel_ext
