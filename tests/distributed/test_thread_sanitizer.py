"""The shared memory of ranks under ThreadSanitizer: no access without an order between the ranks.

Processors that keep the order of writes hide such a fault from every other test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
CSRC = TESTS.parents[1] / "csrc"
SOURCE = CSRC / "comm" / "shared_memory.cpp"
TORCH = Path(torch.__file__).parent


def _has_sanitizer() -> bool:
    if shutil.which("g++") is None:
        return False
    command = ["g++", "-print-file-name=libtsan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Path(found.strip()).is_absolute()


COMPILE = [
    *("g++", "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"),
    "-U__gnu_linux__",  # no loops of which the loader chooses one, before the sanitizer can run
    *(f"-I{CSRC}", f"-I{TORCH / 'include'}"),
]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object that both programs are linked with."""
    compiled = tmp_path_factory.mktemp("sums") / "sum_rows.o"
    command = [*COMPILE, "-c", str(CSRC / "base" / "sum_rows.cpp"), "-o", str(compiled)]
    subprocess.run(command, check=True, timeout=600)
    return compiled


def _run(source: Path, sums: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ranks as threads, with ``source`` for their shared memory."""
    program = folder / "ranks"
    command = [
        *(*COMPILE, f'-DSHARED_MEMORY="{source}"'),
        *(str(TESTS / "shared_memory_threads.cpp"), str(sums)),
        *(f"-L{TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}", "-o", str(program)),
    ]
    subprocess.run(command, check=True, timeout=600)
    at_the_first = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([program], capture_output=True, text=True, timeout=300, env=at_the_first)


pytestmark = pytest.mark.skipif(not _has_sanitizer(), reason="there is no g++ with libtsan")


def test_ranks_order_all_accesses(sums: Path, tmp_path: Path) -> None:
    done = _run(SOURCE, sums, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def test_an_arrival_that_orders_nothing_is_noticed(sums: Path, tmp_path: Path) -> None:
    arrival = "own.arrivals.store(arrivals_"
    text = SOURCE.read_text()
    assert text.count(arrival) == 1
    broken = tmp_path / "shared_memory.cpp"
    broken.write_text(text.replace(arrival, f"{arrival}, std::memory_order_relaxed"))
    assert "ThreadSanitizer: data race" in _run(broken, sums, tmp_path).stderr
