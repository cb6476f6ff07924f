"""Every benchmark runs once, at its smallest sizes, and prints the rows that it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# Beginnings of lines of the tables, each with the number of tables that have it.
PROMISED = {
    "checkpoint.py": {"parallel_ext, default": 2, "transformers": 2, "DCP": 2},
    "cogagent.py": {"float32, default": 2, "parallel_ext, float32": 1, "EVA2-CLIP-E": 2},
    "generation.py": {"greedy, 2 x, default": 1},
    "lora.py": {"32 -> 64, r=4, float32, default": 3, "float32, default": 3},
    "moe.py": {"float32, zipf, default": 4},
    "train_step.py": {"float32, default": 3},
    "training_checkpoint.py": {
        **{"parallel_ext, default": 2, "DCP, default": 2, "torch.save, a file a rank, default": 2},
        **{"parallel_ext |": 1, "DCP |": 1, "no save": 1, "save |": 1, "asynchronous save": 1},
        **{"replicated over dp": 1, "ZeRO over dp": 1},
    },
    "vocab.py": {"parallel_ext: V = 509, float32, default": 1, "V = 509, float32, default": 9},
}


def test_all_benchmarks_are_run_here() -> None:
    found = {path.name for path in BENCHMARKS.glob("*.py") if "harness.publish" in path.read_text()}
    assert found == PROMISED.keys()


@pytest.mark.parametrize("script", PROMISED)
def test_it_prints_its_tables(script: str) -> None:
    command = [sys.executable, str(BENCHMARKS / script), "--smallest"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    for row, count in PROMISED[script].items():
        found = sum(line.startswith(f"| {row}") for line in lines)
        assert found >= count, f"{row}: {found} of {count} in\n{result.stdout}"
