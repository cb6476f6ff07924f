#include "vocab_shard.h"

#include "kernel_choice.h"

namespace parallel_ext {
namespace {

bool use_cpu_loops(const at::Tensor& logits) { return logits.is_cpu() && !aten_path_on_cpu(); }

}  // namespace

at::Tensor vocab_shard_record(const VocabShard& shard, const RecordRows& rows) {
  return (use_cpu_loops(shard.logits) ? vocab_shard_record_cpu : vocab_shard_record_aten)(shard,
                                                                                          rows);
}

void vocab_shard_gradient(const VocabShard& shard, const at::Tensor& normalizer,
                          const at::Tensor& factors, at::Tensor& grad_logits) {
  (use_cpu_loops(shard.logits) ? vocab_shard_gradient_cpu : vocab_shard_gradient_aten)(
      shard, normalizer.contiguous(), factors.contiguous(), grad_logits);
}

}  // namespace parallel_ext
