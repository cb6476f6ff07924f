"""A short soak: faults at random, after which the last checkpoint is there and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import soak
import torch
from reference_mixtral import Layout
from reference_training import LLAMA, Job

ALL_STEPS = soak.Attempt(Job(LLAMA, Layout(1, 2, 1)), 5, True, "none", 0, 0, 0)


def test_jobs_with_faults_at_random_lose_no_checkpoint() -> None:
    report = soak.soak(seed=3, faults=6, seconds=25)
    assert report.problems == [], report


def test_an_attempt_without_a_fault_comes_to_the_end(tmp_path: Path) -> None:
    report = soak.Report()
    one = soak.Round(LLAMA, tmp_path / "root", report)
    one.run(ALL_STEPS)
    assert (report.problems, one.step, report.steps) == ([], soak.STEPS, soak.STEPS)


def _sgd(model: Any, name: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def test_a_soak_notices_weights_of_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = soak.Report()
    monkeypatch.setattr(soak, "optimizer_of", _sgd)  # of the single process
    soak.Round(LLAMA, tmp_path / "root", report).run(ALL_STEPS)
    assert "differs by" in report.problems[0], report


def test_a_soak_notices_a_checkpoint_that_is_lost(tmp_path: Path) -> None:
    report = soak.Report()
    one = soak.Round(LLAMA, tmp_path / "root", report)
    one.step = 3  # was there
    one._look(ALL_STEPS)
    assert report.problems[0].startswith("step 3 is lost")
