"""`make test-gpu` where there is no GPU, and what it would do where there is one."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_forked

ROOT = Path(__file__).parents[1]
GPU_TESTS = ROOT / "tests" / "gpu"


def _tests() -> int:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", str(GPU_TESTS)]
    listed = run_forked(command, cwd=GPU_TESTS).stdout
    return sum("::" in line for line in listed.splitlines())


def test_without_a_gpu_it_says_how_many_tests_it_skips_and_builds_nothing(tmp_path: Path) -> None:
    outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL"}  # of the make that runs this test
    result = subprocess.run(
        ["make", "test-gpu", f"PYTHON={sys.executable}", f"WORK={tmp_path}/work"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in outer} | {"CUDA_VISIBLE_DEVICES": ""},
    )
    count = _tests()
    assert count > 50
    assert result.stdout == f"0 passed, 0 failed, {count} skipped: no CUDA device\n"
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir())


def _run(monkeypatch: pytest.MonkeyPatch, target: Path, fails: bool) -> tuple[Any, list[Any]]:
    """Run the script as on an H200; return its status, and what it starts."""
    started: list[Any] = []

    def start(command: list[str], env: dict[str, str], check: bool) -> None:
        started.append((command, env["TORCH_CUDA_ARCH_LIST"], env["FORCE_CUDA"], check))

    def run_pytest(arguments: list[str]) -> int:
        started.append((arguments, os.environ["PYTHONPATH"].split(os.pathsep)[0], sys.path[0]))
        return int(fails)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(pytest, "main", run_pytest)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return runpy.run_path(str(GPU_TESTS / "run.py"))["main"](target), started


@pytest.mark.parametrize("fails", [False, True])
def test_with_a_gpu_it_builds_offline_for_it_and_tests_that_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    target = tmp_path / "gpu"
    status, ((build, gpus, force, check), (arguments, first, imported)) = _run(
        monkeypatch, target, fails
    )
    assert (gpus, force, check, status) == ("9.0", "1", True, int(fails))
    assert {"--no-index", "--no-deps", "--no-build-isolation"} < set(build)
    assert build[-2:] == [str(target), str(ROOT)]
    assert first == imported == str(target)
    assert arguments[-3:] == ["--device", "cuda", str(GPU_TESTS)]
    assert 1 <= int(arguments[arguments.index("-n") + 1]) <= 11  # xdist is here


def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    with pytest.raises(SystemExit, match="/dev/nvidia0 is there, but torch .* sees no GPU"):
        runpy.run_path(str(GPU_TESTS / "run.py"))["compute_capability"]()
