"""Builds parallel_ext._C against the torch of the running environment."""

import itertools
import os
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
    """Compiles up to six sources of a folder as one: torch's headers take longer than the rest."""

    def build_extension(self, ext: setuptools.Extension) -> None:
        """Compile an extension."""
        by_folder = sorted(csrc(".cpp"), key=os.path.dirname)
        for folder, files in itertools.groupby(by_folder, os.path.dirname):
            sources = list(files)
            for start in range(0, len(sources), 6):
                self.join(ext, f"{folder}/from_{start}.cpp", sources[start : start + 6])
        super().build_extension(ext)

    def join(self, ext: setuptools.Extension, name: str, sources: list[str]) -> None:
        """Let the extension have one source for several, which includes them."""
        joined = Path(self.build_temp) / name
        joined.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(f'#include "{ROOT / source}"\n' for source in sources)
        if not joined.exists() or joined.read_text() != content:  # else it need not be compiled
            joined.write_text(content)
        ext.sources = [each for each in ext.sources if each not in sources] + [str(joined)]


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
