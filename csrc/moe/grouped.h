// One product for all experts, where torch has one that needs no host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace parallel_ext {

// Whether grouped products serve rows [N, K] and weights [e, F, K] of experts. They do in bf16 with
// K and F of multiples of 8 (16 bytes), on GPUs for which torch has them; and on the CPU on the
// path that a GPU takes, for tests.
bool use_grouped_products(const at::Tensor& rows, const at::Tensor& weight);

// counts of rows -> int32 [e] on the device of `like`: where the rows of each expert end.
at::Tensor ends_of(at::IntArrayRef counts, const at::Tensor& like);
at::Tensor ends_of(const at::Tensor& counts, const at::Tensor& like);  // int64 [e], there already

// rows [N, K], weight [e, F, K] -> [N, F]: each row times the transposed weight of its expert.
at::Tensor grouped_rows(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& ends);

// grad [N, F], rows [N, K] -> [e, F, K]: of each expert the transposed grad times the rows, zeros
// for an expert without rows.
at::Tensor grouped_weights(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& ends,
                           at::IntArrayRef counts);
at::Tensor grouped_weights(const at::Tensor& grad, const at::Tensor& rows, const at::Tensor& ends,
                           const at::Tensor& counts);

}  // namespace parallel_ext
