"""Every benchmark runs once, at its smallest sizes, and prints the rows that it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
# By the command line: beginnings of lines of its tables, and how many lines begin so.
PROMISED = {
    "checkpoint.py": {"parallel_ext, default": 2, "transformers": 2, "DCP": 2},
    "cogagent.py --part layers": {"float32, default": 2, "parallel_ext, float32": 1},
    "generation.py": {"greedy, 2 x, default": 1},
    "lora.py --part linear": {"32 -> 64, r=4, float32, default": 3},
    "moe.py": {"float32, zipf, default": 4},
    "train_step.py": {"float32, default": 3},
    "training_checkpoint.py --part speed": {
        **{"parallel_ext, default": 2, "DCP, default": 2, "torch.save, a file a rank, default": 2},
    },
    "training_checkpoint.py --part planner": {"replicated over dp": 1, "ZeRO over dp": 1},
    "vocab.py --part cross_entropy": {
        **{"parallel_ext: V = 509, float32, default": 1, "V = 509, float32, default": 2},
    },
    "vocab.py --part embedding": {"V = 508, float32, default": 3},
}
SLOW = {  # each some processes more, which import for seconds
    "cogagent.py --part towers": {"EVA2-CLIP-E": 2},
    "lora.py --part step": {"float32, default": 3},
    "training_checkpoint.py --part memory": {"parallel_ext |": 1, "DCP |": 1},
    "training_checkpoint.py --part asynchronous": {"no save": 1, "save |": 1, "asynchronous": 1},
    "vocab.py --part linear": {"V = 508, float32, default": 5},
}


def test_all_benchmarks_are_run_here() -> None:
    found = {path.name for path in BENCHMARKS.glob("*.py") if "harness.publish" in path.read_text()}
    assert found == {command.split()[0] for command in PROMISED}


@pytest.mark.parametrize(
    "command", [*PROMISED, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_it_prints_its_tables(command: str) -> None:
    script, *options = command.split()
    run = [sys.executable, str(BENCHMARKS / script), "--smallest", *options]
    result = subprocess.run(run, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    for row, count in (PROMISED | SLOW)[command].items():
        found = sum(line.startswith(f"| {row}") for line in lines)
        assert found >= count, f"{row}: {found} of {count} in\n{result.stdout}"
