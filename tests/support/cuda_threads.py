"""CUDA sources on a machine without a GPU: where they are, and their threads as a CPU library."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from parallel_ext import _C

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
TORCH_INCLUDE = Path(torch.__file__).parent / "include"
STANDARD = f"-std=c++{_C.build_info()['cxx_standard'] // 100 % 100}"


# What sources call by one name, each for itself.
OWN_NAME = re.compile(r"\bk[A-Z]\w*(?= = )|(?<=^GridShape )\w+", re.MULTILINE)


def joined(sources: Sequence[Path], to: Path) -> Path:
    """One source of all of these, of which a compiler reads the headers once: they take longest."""
    lines = []
    for number, source in enumerate(sources):
        names = sorted(set(OWN_NAME.findall(source.read_text())))
        lines += [f"#define {name} {name}_{number}" for name in names]
        lines += [f'#include "{source}"', "#undef PARALLEL_EXT_INSTANTIATE"]
        lines += [f"#undef {name}" for name in names]
    to.write_text("\n".join([*lines, ""]))
    return to


def compiled(text: str, folder: Path, csrc: Path = CSRC) -> ctypes.CDLL:
    """The C functions of a C++ source that includes headers of ``csrc``."""
    source, library = folder / "threads.cpp", folder / "threads.so"
    source.write_text(text)
    compiler = os.environ.get("CXX", "c++")
    include = [f"-I{csrc}", f"-isystem{TORCH_INCLUDE}"]
    command = [compiler, "-shared", "-fPIC", "-O0", STANDARD, *include, source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


# What nvcc knows by itself, as far as the kernels use it. The threads of a block run in turns, each
# as far as the next barrier, and backwards from there on: what lacks a barrier reads what is not
# there yet. A failed check of the kernels is counted, as are a barrier that not all threads see and
# a pack where CUDA could not read it.
CUDA = """
#include <c10/macros/Macros.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define C10_CUDA_KERNEL_LAUNCH_CHECK()

static int64_t failed_checks = 0;
#undef CUDA_KERNEL_ASSERT_MSG
#define CUDA_KERNEL_ASSERT_MSG(condition, text) \\
  if (!(condition)) {                           \\
    ++failed_checks;                            \\
    return;                                     \\
  }

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
  unsigned x, y;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool ended = false;
};
static ucontext_t block_context;
static Thread* running;
static std::function<void()> of_thread;

static void run_thread() {
  of_thread();
  running->ended = true;
}
static void __syncthreads() { swapcontext(&running->context, &block_context); }

template <typename Number>
static Number atomicAdd(Number* sum, Number number) {
  const Number before = *sum;
  *sum += number;
  return before;
}

template <typename Number>
static Number __shfl_xor_sync(unsigned, Number value, int mask) {
  static Number of_thread_number[1024];
  const unsigned own = threadIdx.y * blockDim.x + threadIdx.x;
  of_thread_number[own] = value;
  __syncthreads();
  const Number other = of_thread_number[own ^ mask];
  __syncthreads();
  return other;
}

static void run_block(std::vector<Thread>& threads) {
  for (Thread& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &block_context;
    makecontext(&thread.context, run_thread, 0);
    thread.ended = false;
  }
  size_t ended = 0;
  for (bool forwards = true; ended < threads.size(); forwards = !forwards) {
    for (size_t i = 0; i < threads.size(); ++i) {
      const size_t number = forwards ? i : threads.size() - 1 - i;
      running = &threads[number];
      threadIdx = {unsigned(number % blockDim.x), unsigned(number / blockDim.x)};
      if (!running->ended) swapcontext(&block_context, &running->context);
    }
    ended = 0;
    for (const Thread& thread : threads) ended += thread.ended;
    failed_checks += 0 < ended && ended < threads.size();
  }
}

template <typename Kernel, typename... Args>
void run_grid(Kernel* kernel, dim3 blocks, dim3 threads, Args... args) {
  of_thread = [=] { kernel(args...); };
  blockDim = threads;
  gridDim = blocks;
  std::vector<Thread> of_block(threads.x * threads.y);
  for (unsigned j = 0; j < blocks.x * blocks.y; ++j) {
    blockIdx = {j % blocks.x, j / blocks.x};
    run_block(of_block);
  }
}

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(signed char) {}
};
}  // namespace c10::cuda
namespace c10 {
using DeviceIndex = signed char;
}
"""

# Behind the source.
TAIL = """
extern "C" int64_t take_failed_checks() {
  const int64_t count = failed_checks;
  failed_checks = 0;
  return count;
}
"""


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
    return text.replace(old, new)


def _csrc_for_cpu(folder: Path) -> Path:
    """A copy of ``csrc`` whose kernels are functions, in small grids."""
    csrc = shutil.copytree(CSRC, folder / "csrc")
    grid = csrc / "base/cuda_grid.h"
    text = grid.read_text()
    # Few blocks, so that each works in turns, and of few threads, which a CPU runs faster.
    for limit, smaller in [("0xffff;", "2;"), ("0x7fffffff", "2"), ("= 256;", "= 32;")]:
        text = _replaced(text, limit, smaller)
    text = re.sub(r"#include <c10/cuda/.*", "", text)
    text, launches = re.subn(r"kernel<<<(.*), (.*), 0, .*>>>\(", r"run_grid(kernel, \1, \2, ", text)
    # A CPU reads packs wherever they lie.
    check = "failed_checks += address(data) % sizeof(Pack<scalar_t, size>) != 0;\n  "
    text, packs = re.subn(r"(?=return reinterpret_cast<(const )?Pack)", check, text)
    assert (launches, packs) == (1, 2)
    grid.write_text(text)
    return csrc


def kernels_on_cpu(name: str, exports: str, folder: Path) -> ctypes.CDLL:
    """The kernels of a .cu file for a CPU.

    Args:
        name: The file in ``csrc``.
        exports: C++ behind it, which gives its functions names without types.
        folder: An empty one to build in.
    """
    csrc = _csrc_for_cpu(folder)
    text = _without_instances((csrc / name).read_text())
    return compiled(f"{CUDA}\n{text}\n{exports}\n{TAIL}", folder, csrc)


def _without_instances(text: str) -> str:
    return re.sub(r"^PARALLEL_EXT_INSTANTIATE.*", "", text, flags=re.MULTILINE)


class Mutant:
    """Broken kernels, with functions of the same names as the right ones."""

    def __init__(self, library: ctypes.CDLL, number: int) -> None:
        self._library, self._number = library, number
        self.take_failed_checks = library.take_failed_checks

    def __getattr__(self, name: str) -> Callable[..., None]:
        return getattr(self._library, f"{name}_{self._number}")


def mutants_on_cpu(
    name: str, exports: str, folder: Path, mutations: dict[str, tuple[str, str]]
) -> dict[str, Mutant]:
    """The kernels of a .cu file, broken in one way after the other, in fp64; in one library.

    Args:
        name: The file in ``csrc``.
        exports: Defines ``EXPORT(name, scalar_t, wide_t)``, which calls functions of ``KERNELS``.
        folder: An empty one to build in.
        mutations: What stands in the file, and what is to stand there.
    """
    csrc = _csrc_for_cpu(folder)
    source = _without_instances((csrc / name).read_text())
    includes = "\n".join(re.findall(r"^#include.*", source, re.MULTILINE))
    parts = [CUDA, includes, exports]
    for number, mutation in enumerate(mutations.values()):
        own = f"namespace mutant_{number} {{\nusing namespace parallel_ext;"
        text = re.sub(r"^#(include|undef).*", "", _replaced(source, *mutation), flags=re.MULTILINE)
        parts += [
            _replaced(text, "namespace parallel_ext {", own),
            f"#undef KERNELS\n#define KERNELS mutant_{number}",
            f"EXPORT(float64_{number}, double, double)\n#undef PARALLEL_EXT_INSTANTIATE",
        ]
    library = compiled("\n".join([*parts, TAIL]), folder, csrc)
    return {each: Mutant(library, number) for number, each in enumerate(mutations)}


# By their names in C++: the type of numbers, and that of their sums.
C_TYPES = {
    torch.float64: ("double", "double"),
    torch.float32: ("float", "float"),
    torch.bfloat16: ("c10::BFloat16", "float"),
    torch.float16: ("c10::Half", "float"),
}


def exports_of(dtypes: list[torch.dtype]) -> str:
    """``EXPORT(name, scalar_t, wide_t)`` of each dtype."""
    return "\n".join(f"EXPORT({_name(dtype)}, {', '.join(C_TYPES[dtype])})" for dtype in dtypes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def of_type(kernels: ctypes.CDLL, name: str, dtype: torch.dtype) -> Callable[..., None]:
    """What ``EXPORT`` has made for a dtype."""
    return getattr(kernels, f"{name}_{_name(dtype)}")


def call(function: Callable[..., None], *args: float | torch.Tensor | None) -> None:
    """Calls a C function of int64, double and pointers; None is the null pointer."""
    function(*map(_argument, args))


def _argument(arg: float | torch.Tensor | None) -> object:
    if arg is None or isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(None if arg is None else arg.data_ptr())
    return ctypes.c_double(arg) if isinstance(arg, float) else ctypes.c_int64(arg)


def placed(offset: int, tensor: torch.Tensor, more: int = 0) -> torch.Tensor:
    """A copy that begins so many elements behind an address that all packs fit.

    Rows lie ``more`` elements further apart than they are long.
    """
    stride = tensor.size(-1) + more
    rows = tensor.numel() // max(tensor.size(-1), 1)
    room = torch.empty(rows * stride + offset, dtype=tensor.dtype)
    strides = [stride, 1] if tensor.dim() == 2 else [1]
    return room.as_strided(tensor.shape, strides, offset).copy_(tensor)
