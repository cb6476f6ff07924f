"""Builds parallel_ext._C against the torch of the running environment."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools

INSTALL_COMMAND = "pip install --no-build-isolation ."

if sys.platform != "linux":
    sys.exit(f"parallel_ext runs on Linux only, and this is {sys.platform}")

try:
    import torch
    from torch.utils.cpp_extension import (
        CUDA_HOME,
        BuildExtension,
        CppExtension,
        CUDAExtension,
        get_cxx_compiler,
    )
except ImportError:
    sys.exit(
        "parallel_ext compiles against the torch that will run it, and torch is not importable "
        f"here. Install torch first, then run: {INSTALL_COMMAND}"
    )

if int(setuptools.__version__.split(".")[0]) < 77:  # torch 2.11 is content with 65
    sys.exit(
        f"parallel_ext is built by setuptools 77 or later, and {setuptools.__version__} is "
        f"installed. Run: pip install 'setuptools>=77', then: {INSTALL_COMMAND}"
    )

ROOT = Path(__file__).parent


def with_cuda() -> bool:
    """Whether to compile the CUDA kernels: by torch and nvcc, since a GPU may come later."""
    wanted = os.environ.get("FORCE_CUDA") or None
    if wanted not in (None, "0", "1"):
        sys.exit(f"FORCE_CUDA must be 0 (no CUDA kernels) or 1 (fail without them), got {wanted!r}")
    if wanted == "0":
        return False
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} is not built for CUDA"
    elif CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        missing = f"there is no nvcc in the bin folder of CUDA_HOME, which is {CUDA_HOME}"
    else:
        return True
    if wanted == "1":
        sys.exit(f"FORCE_CUDA=1, but {missing}")
    if torch.version.cuda is not None:
        print(f"parallel_ext is built without CUDA kernels: {missing}", file=sys.stderr)
    return False


def csrc(ending: str) -> list[str]:
    """The files of csrc with that ending."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"csrc/**/*{ending}"))


def choose_gpus() -> None:
    """Name the GPUs to compile for where torch would ask the one of this machine and finds none."""
    if os.environ.get("TORCH_CUDA_ARCH_LIST") or torch.cuda.device_count() > 0:
        return
    known = getattr(torch._C, "_cuda_getArchFlags", lambda: "")() or ""
    names = {"8.0": "sm_80", "9.0": "sm_90", "10.0": "sm_100"}
    gpus = [number for number, name in names.items() if name in known.split()] or ["8.0", "9.0"]
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(gpus) + "+PTX"
    print(
        "parallel_ext is built for GPUs of compute capability "
        f"{os.environ['TORCH_CUDA_ARCH_LIST']}, since there is none here to ask; "
        "TORCH_CUDA_ARCH_LIST chooses others",
        file=sys.stderr,
    )


def sanitizer_flags() -> list[str]:
    """Flags of a build that `make sanitize` runs, by SANITIZE=address,undefined."""
    chosen = os.environ.get("SANITIZE")
    return [f"-fsanitize={chosen}", "-fno-omit-frame-pointer"] if chosen else []


class Build(BuildExtension):
    """Lets GCC read torch's headers once: for each source again a build takes twice as long."""

    def build_extension(self, ext: setuptools.Extension) -> None:
        """Compile an extension."""
        version = [*shlex.split(get_cxx_compiler()), "--version"]
        if "Free Software Foundation" in subprocess.check_output(version, text=True):
            self.compile_headers(ext)
        super().build_extension(ext)

    def compile_headers(self, ext: setuptools.Extension) -> None:
        """Compile the headers by the flags of the sources, and put them in front of these."""
        header = Path(self.build_temp).absolute() / "torch_headers" / "torch_headers.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / "csrc" / header.name, header)
        self.compiler.src_extensions = [*self.compiler.src_extensions, ".h"]
        (compiled,) = self.compiler.compile(
            [f"csrc/{header.name}"],
            output_dir=str(header.parent),
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_preargs=["-w", "-x", "c++-header"],
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        shutil.copyfile(compiled, f"{header}.gch")  # which GCC looks for
        ext.extra_compile_args["cxx"] += ["-include", str(header), "-Winvalid-pch"]


CUDA = with_cuda()
SANITIZER = sanitizer_flags()
if CUDA:
    choose_gpus()

setuptools.setup(
    ext_modules=[
        (CUDAExtension if CUDA else CppExtension)(
            "parallel_ext._C",
            csrc(".cpp") + (csrc(".cu") if CUDA else []),
            # An sdist holds what stands here: of a machine without CUDA, the kernels too.
            depends=csrc(".h") + csrc(".cu"),
            include_dirs=[str(ROOT / "csrc")],
            define_macros=[("PARALLEL_EXT_WITH_CUDA", None)] if CUDA else [],
            # No -std (torch picks it) and no -march (the hot loops are compiled for several). The
            # GPUs are those of TORCH_CUDA_ARCH_LIST, or what torch finds. -g0 against the -g that
            # most builds of Python ask for: it takes half of the time and most of the library.
            # Without -fopenmp at::parallel_for runs everything in one thread.
            extra_compile_args={
                "cxx": [
                    *("-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
                    *("-Wall", "-Wextra", "-Wno-unused-parameter"),
                    *(["-O1", "-g1", *SANITIZER] if SANITIZER else []),
                ],
                "nvcc": ["-O3"],
            },
            extra_link_args=["-fopenmp", *SANITIZER],
        )
    ],
    cmdclass={"build_ext": Build},
)
