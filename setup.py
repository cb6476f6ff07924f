"""Builds parallel_ext._C against the torch of the running environment."""

import sys
from pathlib import Path

from setuptools import setup

INSTALL_COMMAND = "pip install --no-build-isolation ."

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        "parallel_ext compiles against the torch that will run it, and torch is not importable "
        f"here. Install torch first, then run: {INSTALL_COMMAND}"
    )

ROOT = Path(__file__).parent

setup(
    ext_modules=[
        CppExtension(
            "parallel_ext._C",
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h")),
            # No -std (torch picks it) and no -march (the hot loops are compiled for several).
            extra_compile_args=[
                *("-O3", "-fno-math-errno", "-fno-trapping-math"),
                *("-Wall", "-Wextra", "-Wno-unused-parameter"),
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
