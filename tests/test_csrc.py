"""The C++ sources compile as the C++ of every torch that is served."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cuda_threads import CSRC
from torch.utils import cpp_extension

OLDEST_STANDARD = "-std=c++17"  # of torch 2.11; 2.13 compiles as C++20
# Each is compiled as one source, so that torch's headers are read twice and not for each file.
FOLDERS = [(".", "base", "comm", "linear", "moe"), ("vocab",)]


def _errors(sources: Sequence[Path], folder: Path) -> str:
    """What the compiler says against the sources, with what they do in a build for GPUs."""
    joined = folder / "joined.cpp"
    joined.write_text("".join(f'#include "{source}"\n' for source in sources))
    command = [
        *(os.environ.get("CXX", "c++"), OLDEST_STANDARD, "-fsyntax-only", "-w", joined),
        *("-DPARALLEL_EXT_WITH_CUDA", "-DTORCH_EXTENSION_NAME=_C", "-fopenmp", f"-I{CSRC}"),
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        f"-isystem{sysconfig.get_path('include')}",
    ]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="its headers refuse C++17")
@pytest.mark.parametrize("folders", FOLDERS, ids=" ".join)
def test_sources_are_of_the_oldest_standard(folders: tuple[str, ...], tmp_path: Path) -> None:
    sources = [each for name in folders for each in sorted((CSRC / name).glob("*.cpp"))]
    assert _errors(sources, tmp_path) == ""


def test_all_sources_are_among_them() -> None:
    compiled = {CSRC / name for folders in FOLDERS for name in folders}
    assert {each.parent for each in CSRC.rglob("*.cpp")} == compiled


def test_what_is_newer_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "newer.cpp"
    source.write_text('#include <string>\nbool b = std::string("a").ends_with("a");\n')
    assert "ends_with" in _errors([source], tmp_path)
