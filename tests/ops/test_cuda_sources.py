"""CUDA sources on a machine without a GPU: they compile, and their threads do what they must."""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from cuda_threads import CSRC, ROOT, STANDARD, TORCH_INCLUDE, joined, of_type
from reference_ops import ALL_DTYPES
from torch.utils import cpp_extension

from parallel_ext import _C
from parallel_ext.ops import Dropout, lora_linear

KERNELS = sorted(str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cu"))

# A wheel of torch for the CPU has all that the kernels include but this file, which CMake makes.
CMAKE_MACROS = "c10/cuda/impl/cuda_cmake_macros.h"


def _nvcc() -> str | None:
    if "LD_PRELOAD" in os.environ:  # of `make sanitize`: nvcc does not run with a sanitizer
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin", os.environ.get("PATH", "")]))


needs_nvcc = pytest.mark.skipif(
    _nvcc() is None, reason="there is no nvcc in CUDA_HOME or on PATH that runs here"
)


OLDEST, *OTHERS = (f"arch=compute_{arch},code=sm_{arch}" for arch in ("80", "90a", "100"))
INSTANCE = re.compile(r"^PARALLEL_EXT_INSTANTIATE\((.+)\);?\n", re.MULTILINE)


def _of_one_type(name: str, folder: Path) -> Path:
    """A copy of a source whose kernels are made for bf16 alone, which takes the most registers.

    Or for fp32, where sums are all that they see. The tests of each file make the other types of
    its kernels for a CPU.
    """
    text = (CSRC / name).read_text()
    found = INSTANCE.findall(text)
    kept = "c10::BFloat16" if "c10::BFloat16" in found else "float"
    assert kept in found or not found
    copy = folder / Path(name).name
    copy.write_text(INSTANCE.sub(lambda each: each[0] if each[1] == kept else "", text))
    return copy


def _nvcc_errors(source: Path, folder: Path, gpu: str = OLDEST, to: str = "-cubin") -> str:
    """What nvcc says against a source; nothing where it makes an object of it without spills.

    Registers that a kernel spills to memory slow it down. In fp64 nobody trains.
    """
    macros = folder / CMAKE_MACROS
    macros.parent.mkdir(parents=True)
    macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    command = [
        *(_nvcc(), to, source, "-o", folder / "object", STANDARD, "-O3"),
        *cpp_extension.COMMON_NVCC_FLAGS,
        *(f"-gencode={gpu}", "-Xptxas", "-v"),
        # A call of a host function by the device, for one, is only a warning otherwise.
        *("-Werror", "all-warnings", "-Xcompiler", "-fPIC,-O0"),
        *("-I", CSRC, "-I", folder, "-isystem", TORCH_INCLUDE),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode:
        return output
    spilled = re.findall(
        r"Function properties for (?!\S*kernelId)(\S+)\n.* ([1-9]\d*) bytes spill", output
    )
    return "\n".join(f"{kernel} spills {count} bytes" for kernel, count in spilled)


@needs_nvcc
def test_kernels_compile_without_a_gpu_and_with_a_torch_for_the_cpu(tmp_path):
    sources = [_of_one_type(name, tmp_path) for name in KERNELS]
    assert _nvcc_errors(joined(sources, tmp_path / "joined.cu"), tmp_path) == ""


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("gpu", [OLDEST, *OTHERS])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_all_types_compile_for_all_gpus(name, gpu, tmp_path):
    assert _nvcc_errors(CSRC / name, tmp_path, gpu, "-c") == ""


@needs_nvcc
def test_an_error_in_a_kernel_is_noticed(tmp_path):
    broken = tmp_path / "broken.cu"
    kernel = "__global__ void broken(int* x) { *x = on_host(); }"
    broken.write_text(f"int on_host() {{ return *new int(1); }}\n{kernel}\n")
    assert "calling a __host__ function" in _nvcc_errors(broken, tmp_path)


@needs_nvcc
def test_a_kernel_that_spills_is_noticed(tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text(
        "__global__ void __launch_bounds__(1024, 2) greedy(const float* x, float* y) {\n"
        "  float kept[64];\n"
        "  for (int i = 0; i < 64; ++i) kept[i] = x[i * blockDim.x + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int i = 0; i < 64; ++i) y[i * blockDim.x + threadIdx.x] = kept[63 - i] / kept[i];\n"
        "}\n"
    )
    assert re.search("greedy.* spills", _nvcc_errors(broken, tmp_path))


LIGHT = re.compile(
    r"<(c10/(cuda|macros)/\w+\.h|c10/util/(BFloat16|Half|Exception)\.h"  # of torch
    r"|cu(da|b/)[\w/]*\.c?u?h|[a-z_]+)>"  # of CUDA and C++
)


def _heavy_includes(name: str) -> list[str]:
    """What a file of csrc, and what it includes of csrc, include that kernels should not."""
    heavy: list[str] = []
    for include in re.findall(r"^\s*#\s*include\s+(\S+)", (CSRC / name).read_text(), re.MULTILINE):
        if include.startswith('"'):
            heavy += _heavy_includes(include.strip('"'))
        elif not LIGHT.fullmatch(include):
            heavy.append(f"{name}: {include}")
    return heavy


def test_kernels_include_nothing_heavy():
    assert [heavy for name in KERNELS for heavy in _heavy_includes(name)] == []
    assert "linear/dropout.h: <ATen/core/Tensor.h>" in _heavy_includes("linear/dropout.cpp")
    c10d = "<torch/csrc/distributed/c10d/GroupRegistry.hpp>"
    assert f"comm/known_groups.cpp: {c10d}" in _heavy_includes("comm/known_groups.cpp")


def test_no_two_sources_have_the_same_stem():
    """They would compile into the same object."""
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".cu")]
    stems = Counter(path.with_suffix("") for path in sources)
    assert stems.most_common(1)[0][1] == 1


# What the threads of the dropout kernels do, run one after the other on the CPU.


class _MaskPart(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("key0", "key1", "step", "threshold", "token")),
        *((name, ctypes.c_int64) for name in ("feature", "rows", "size")),
    ]


SOURCE = "base/dropout_mask.h"

# Runs a grid of num_x by num_y threads.
EXPORTS = """
#define EXPORT(name, scalar_t, wide_t)                                                      \\
  extern "C" void drop_##name(const KERNELS::MaskPart* part, int64_t num_x, int64_t num_y,  \\
                              const scalar_t* input, scalar_t* output,                      \\
                              const scalar_t* addend, double factor, scalar_t* target) {    \\
    const auto at = [](const scalar_t* data) { return reinterpret_cast<uintptr_t>(data); };  \\
    const bool whole = KERNELS::has_whole_runs<scalar_t>(                                   \\
        *part, at(input) | at(output) | at(addend) | at(target));                           \\
    const auto drop = whole ? KERNELS::drop_in_thread<true, scalar_t>                       \\
                            : KERNELS::drop_in_thread<false, scalar_t>;                     \\
    const auto add = whole ? KERNELS::drop_and_add_in_thread<true, scalar_t>                \\
                           : KERNELS::drop_and_add_in_thread<false, scalar_t>;              \\
    for (int64_t x = 0; x < num_x; ++x) {                                                   \\
      for (int64_t y = 0; y < num_y; ++y) {                                                 \\
        const parallel_ext::GridThread thread{x, y, num_x, num_y};                          \\
        if (target == nullptr) {                                                            \\
          drop(*part, thread, input, factor, output);                                       \\
        } else {                                                                            \\
          add(*part, thread, input, output, addend, factor, target);                        \\
        }                                                                                   \\
      }                                                                                     \\
    }                                                                                       \\
  }
"""

FP64 = torch.float64
ROWS, FACTOR = 5, 0.5  # a factor whose products are exact: only the sum rounds, fused or not
DROPOUT = Dropout(p=0.3, key=0x123456789ABCDEF, step=7, token=2**32 - ROWS, feature=37)
GRIDS = [(2, 1), (6, 2), (512, 8)]  # fewer threads than there is work, and more


def _mask(size: int, dropout: Dropout) -> torch.Tensor:
    """Of the loops for the CPU: True where they keep an element."""
    eye = torch.eye(size, dtype=FP64)
    ones = torch.ones(ROWS, size, dtype=FP64)
    return lora_linear(ones, torch.zeros_like(eye), eye, eye, dropout=dropout) != 0


def _wrong_elements(
    grid: ctypes.CDLL,
    dtype: torch.dtype,
    size: int,
    dropout: Dropout,
    threads: tuple[int, int],
    add: bool = False,
) -> int:
    """How many elements the threads make otherwise than the CPU does."""
    torch.manual_seed(0)
    values, addend, before = (torch.randn(ROWS, size).to(dtype) for _ in range(3))
    output, target = torch.full_like(values, torch.nan), before.clone()
    part = _MaskPart(
        *(dropout.key & 0xFFFFFFFF, dropout.key >> 32, dropout.step, round(dropout.p * 65536)),
        *(dropout.token, dropout.feature, ROWS, size),
    )
    tensors = [ctypes.c_void_p(t.data_ptr()) for t in (values, output, addend, target)]
    of_type(grid, "drop", dtype)(
        *(ctypes.byref(part), *map(ctypes.c_int64, threads), *tensors[:3]),
        *(ctypes.c_double(FACTOR), tensors[3] if add else None),
    )
    kept = _mask(size, dropout)
    scaled = values if add else (FACTOR * values.to(torch.promote_types(dtype, torch.float32)))
    wrong = output != scaled.to(dtype).masked_fill(~kept, 0)
    wide = torch.promote_types(dtype, torch.float32)
    total = (before.to(wide) + FACTOR * addend.to(wide)).to(dtype)
    expected = torch.where(kept, total, before) if add else before
    return int((wrong | (target != expected)).sum())


@ALL_DTYPES
def test_threads_of_any_grid_make_what_the_cpu_makes(kernels, dtype):
    features, sizes, adds = (0, 37, 127, 128, 1000), (1, 16, 129, 300), (False, True)
    for feature, size, threads, add in product(features, sizes, GRIDS, adds):
        dropout = DROPOUT._replace(feature=feature)
        wrong = _wrong_elements(kernels, dtype, size, dropout, threads, add)
        assert wrong == 0, f"feature {feature} of {size}, {threads} threads, add {add}"


@pytest.mark.parametrize("p", [0.0, 1e-6, 1.0])
def test_threads_keep_and_drop_everything_as_the_cpu_does(kernels, p):
    assert _wrong_elements(kernels, FP64, 300, DROPOUT._replace(p=p), GRIDS[1], True) == 0


MUTATIONS = {
    "one lane for all": ("lane + j)", "lane)"),
    "another word": ("bits[j].word[s / 2]", "bits[j].word[3 - s / 2]"),
    "neighbours that are not neighbours": ("column + s * kMaskLanes", "column + s * kMaskRun"),
    "a part that starts with its block": ("lane - part.inside(), {}", "lane, {}"),
    "a row too few": ("row < part.rows", "row < part.rows - 1"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_threads(mutants, mutation):
    broken = mutants[mutation]
    assert any(_wrong_elements(broken, FP64, 300, DROPOUT, GRIDS[0], add) for add in (False, True))


# The choice of setup.py, with torches and toolkits that are not there.


def _extension(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, home: Path | None, force: str | None = None
) -> Any:
    """What setup.py would build with torch for this CUDA and the toolkit in ``home``."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", home and str(home))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked for a GPU"))
    if force is None:
        monkeypatch.delenv("FORCE_CUDA", raising=False)
    else:
        monkeypatch.setenv("FORCE_CUDA", force)
    runpy.run_path(str(ROOT / "setup.py"))
    return asked["ext_modules"][0]


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A folder that looks like one with nvcc."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    return tmp_path


def _has_kernels(extension: Any) -> bool:
    kernels = {f"csrc/{name}" for name in KERNELS}
    has = kernels <= set(extension.sources)
    assert has or not kernels & set(extension.sources)
    assert has == ("PARALLEL_EXT_WITH_CUDA" in dict(extension.define_macros))
    assert has == ("cudart" in extension.libraries)
    return has


def test_setup_takes_the_kernels_where_torch_and_nvcc_do(monkeypatch, toolkit):
    assert _has_kernels(_extension(monkeypatch, "13.0", toolkit))
    assert _has_kernels(_extension(monkeypatch, "13.0", toolkit, force="1"))
    for cuda, home, force in [
        ("13.0", toolkit, "0"),
        ("13.0", None, None),
        ("13.0", toolkit / "elsewhere", None),
        (None, toolkit, None),
        (None, None, ""),
    ]:
        assert not _has_kernels(_extension(monkeypatch, cuda, home, force))


def test_setup_refuses_what_it_cannot_do(monkeypatch, toolkit):
    with pytest.raises(SystemExit, match=r"FORCE_CUDA=1, but torch .* is not built for CUDA"):
        _extension(monkeypatch, None, None, "1")
    with pytest.raises(SystemExit, match="FORCE_CUDA=1, but there is no nvcc in .*elsewhere"):
        _extension(monkeypatch, "13.0", toolkit / "elsewhere", "1")
    with pytest.raises(SystemExit, match="FORCE_CUDA must be 0 .* or 1 .*, got 'yes'"):
        _extension(monkeypatch, "13.0", toolkit, "yes")


@pytest.mark.parametrize(
    ("chosen", "found", "known", "expected"),
    [
        (None, 0, "sm_75 sm_80 sm_90 sm_100 sm_120", "8.0;9.0;10.0+PTX"),
        (None, 0, "sm_80 sm_90", "8.0;9.0+PTX"),
        (None, 0, None, "8.0;9.0+PTX"),
        ("8.6", 0, "sm_80 sm_90", "8.6"),
        (None, 1, "sm_80 sm_90", None),  # which torch asks for its number
    ],
)
def test_setup_builds_for_gpus_that_are_not_there(
    monkeypatch, toolkit, chosen, found, known, expected
):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen or "")
    if not chosen:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    if known is None:  # a torch for the CPU
        monkeypatch.delattr(torch._C, "_cuda_getArchFlags", raising=False)
    else:
        monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: known, raising=False)
    _extension(monkeypatch, "13.0", toolkit)
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == expected
    if expected:
        flags = cpp_extension._get_cuda_arch_flags()
        assert any(flag.endswith("sm_90") for flag in flags) or chosen
        assert any("code=compute_" in flag for flag in flags) == (not chosen)


def test_only_tensors_on_the_cpu_reach_the_loops_for_it():
    """Loops that get the address of a GPU's memory crash, and no machine without one can tell."""
    found = 0
    for source in CSRC.rglob("*.cpp"):
        lines = source.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            # What is not indented declares or defines a function.
            if re.match(r" +[^/]*\b\w+(?<!is)(?<!_on)_cpu\b", line):
                assert re.search("use_cpu_loops|DispatchKey::CPU", before + line), source.name
                found += 1
    assert found > 3


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_an_sdist_holds_all_sources_wherever_it_is_made(monkeypatch, toolkit, cuda):
    extension = _extension(monkeypatch, cuda, toolkit)
    files = {f"csrc/{p.relative_to(CSRC)}" for p in CSRC.rglob("*") if p.is_file()}
    assert {*extension.sources, *extension.depends} == files


def test_build_info_tells_whether_the_kernels_are_in():
    assert _C.build_info()["cuda_kernels"] in (False, torch.version.cuda is not None)
