"""The C++ sources compile as the C++ of every torch that is served."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cuda_threads import CSRC, joined
from torch.utils import cpp_extension

OLDEST_STANDARD = "-std=c++17"  # of torch 2.11; 2.13 compiles as C++20


def _errors(sources: Sequence[Path], folder: Path) -> str:
    """What the compiler says against the sources, with what they do in a build for GPUs."""
    source = joined(sources, folder / "joined.cpp")
    command = [
        *(os.environ.get("CXX", "c++"), OLDEST_STANDARD, "-fsyntax-only", "-w", source),
        *("-DPARALLEL_EXT_WITH_CUDA", "-DTORCH_EXTENSION_NAME=_C", "-fopenmp", f"-I{CSRC}"),
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        f"-isystem{sysconfig.get_path('include')}",
    ]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="its headers refuse C++17")
def test_sources_are_of_the_oldest_standard(tmp_path: Path) -> None:
    sources = sorted(CSRC.rglob("*.cpp"))
    assert sources
    assert _errors(sources, tmp_path) == ""


def test_what_is_newer_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "newer.cpp"
    source.write_text('#include <string>\nbool b = std::string("a").ends_with("a");\n')
    assert "ends_with" in _errors([source], tmp_path)
