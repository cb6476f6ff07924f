#include "base/kernel_choice.h"

#include <atomic>

namespace parallel_ext {
namespace {
std::atomic<bool> flag{false};
}

bool aten_path_on_cpu() { return flag.load(); }
void set_aten_path_on_cpu(bool on) { flag.store(on); }

}  // namespace parallel_ext
