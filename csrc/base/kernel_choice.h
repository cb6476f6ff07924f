// Which kernel serves a tensor: loops for the CPU, compiled for several instruction sets, CUDA
// kernels where the build has them, or the path of plain ATen calls that serves every other device.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>

// One build holds a loop for AVX-512, for AVX2 and for any x86-64; the loader takes the best one.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define PARALLEL_EXT_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define PARALLEL_EXT_HAS_MULTIVERSION true
#else
#define PARALLEL_EXT_MULTIVERSION
#define PARALLEL_EXT_HAS_MULTIVERSION false
#endif

namespace parallel_ext {

// setup.py defines PARALLEL_EXT_WITH_CUDA where it compiles the .cu files.
#ifdef PARALLEL_EXT_WITH_CUDA
inline constexpr bool kWithCudaKernels = true;
#else
inline constexpr bool kWithCudaKernels = false;
#endif

// Off by default; the tests switch it on to run the ATen path on a CPU.
inline std::atomic<bool> aten_path_switch{false};
inline bool aten_path_on_cpu() { return aten_path_switch.load(); }
inline void set_aten_path_on_cpu(bool on) { aten_path_switch.store(on); }

// Whether a CUDA kernel serves the tensor, for an op that has CUDA kernels.
inline bool use_cuda_kernel(const at::Tensor& tensor) {
  return kWithCudaKernels && tensor.is_cuda();
}

// Whether the loops for the CPU serve the tensor. What neither these nor CUDA kernels serve, as
// everything but the CPU for an op without CUDA kernels, takes the path of ATen calls.
inline bool use_cpu_loops(const at::Tensor& tensor) {
  return tensor.is_cpu() && !aten_path_on_cpu();
}

// Whether one of them does, for an op that has both.
inline bool use_own_kernel(const at::Tensor& tensor) {
  return use_cpu_loops(tensor) || use_cuda_kernel(tensor);
}

}  // namespace parallel_ext
