// How ops take the options of the loss: as the last arguments of their schemas, which kernels and
// callers in C++ have as one VocabLoss, their first argument.
#pragma once

#include "dispatch.h"
#include "vocab/loss.h"

namespace parallel_ext {

inline constexpr const char* kVocabLossSchema =
    "Tensor? weight, int vocab_size, int vocab_start, int vocab_stop, int ignore_index, "
    "str reduction, float label_smoothing, float z_loss, float? softcap, float logit_scale";

template <typename Function>
class VocabLossOp;

template <typename Result, typename... Args>
class VocabLossOp<Result (*)(const VocabLoss&, Args...)> {
 public:
  explicit VocabLossOp(const char* name) : handle_(op_handle<Signature>(name)) {}

  Result call(const VocabLoss& loss, Args... args) const {
    return handle_.call(args..., loss.weight, loss.vocab_size, loss.vocab_start, loss.vocab_stop,
                        loss.ignore_index, loss.reduction, loss.label_smoothing, loss.z_loss,
                        loss.softcap, loss.logit_scale);
  }

  template <Result (*function)(const VocabLoss&, Args...)>
  static Result kernel(Args... args, const std::optional<at::Tensor>& weight, int64_t vocab_size,
                       int64_t vocab_start, int64_t vocab_stop, int64_t ignore_index,
                       const std::string& reduction, double label_smoothing, double z_loss,
                       std::optional<double> softcap, double logit_scale) {
    return function({weight, vocab_size, vocab_start, vocab_stop, ignore_index, reduction,
                     label_smoothing, z_loss, softcap, logit_scale},
                    args...);
  }

 private:
  using Signature = Result(Args..., const std::optional<at::Tensor>&, int64_t, int64_t, int64_t,
                           int64_t, const std::string&, double, double, std::optional<double>,
                           double);

  c10::TypedOperatorHandle<Signature> handle_;
};

// What is registered for a function that takes a VocabLoss.
template <auto function>
constexpr auto* vocab_loss_kernel = &VocabLossOp<decltype(function)>::template kernel<function>;

}  // namespace parallel_ext
