"""CUDA sources on a machine without a GPU: where they are, and their threads as a CPU library."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import torch

from parallel_ext import _C

SOURCE = Path(__file__).parents[1]
CSRC = SOURCE / "csrc"
TORCH_INCLUDE = Path(torch.__file__).parent / "include"
STANDARD = f"-std=c++{_C.build_info()['cxx_standard'] // 100 % 100}"


def compiled(text: str, folder: Path, csrc: Path = CSRC) -> ctypes.CDLL:
    """The C functions of a C++ source that includes headers of ``csrc``."""
    source, library = folder / "threads.cpp", folder / "threads.so"
    source.write_text(text)
    compiler = os.environ.get("CXX", "c++")
    include = [f"-I{csrc}", f"-isystem{TORCH_INCLUDE}"]
    command = [compiler, "-shared", "-fPIC", "-O1", STANDARD, *include, source, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))
