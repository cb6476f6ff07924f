// The exchange of moe/exchange.h by plain ATen calls, for any device; rows are moved and summed by
// CUDA kernels where the build has them.
#pragma once

#include "moe/exchange.h"

namespace parallel_ext {

AtExperts bring_to_experts_aten(const char* op, const at::Tensor& input, const at::Tensor& weights,
                                const Route& route, const ExchangePlan& plan);

at::Tensor bring_to_experts_again_aten(const char* op, const at::Tensor& input,
                                       const at::Tensor& tokens, const at::Tensor& origins,
                                       const ExchangePlan& plan);

AtTokens bring_back_aten(const char* op, const at::Tensor& rows,
                         const std::optional<at::Tensor>& weights, const at::Tensor& origins,
                         const at::Tensor& rows_of_choices, const ExchangePlan& plan);

}  // namespace parallel_ext
