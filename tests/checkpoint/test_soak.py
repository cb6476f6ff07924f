"""A short soak: faults at random, after which the last checkpoint is there and right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soak
import torch
from hosts import need_hosts
from reference_mixtral import Layout
from reference_training import LLAMA, MIXTRAL, Job

PLAIN = Job(LLAMA, Layout(1, 2, 1))
JOBS = [PLAIN, replace(PLAIN, lora=True), Job(MIXTRAL, Layout(2, 1, 2), zero=2, lora=True)]


def _all_steps(job: Job, fault: str = "none") -> soak.Attempt:
    return soak.Attempt(job, 5, True, fault, 0, 1, 0)


def test_jobs_with_faults_at_random_lose_no_checkpoint() -> None:
    report = soak.soak(seed=3, faults=6, steps=0, seconds=15)
    assert report.faults.total() > 0
    assert report.problems == [], report


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_an_attempt_without_a_fault_comes_to_the_end(job: Job, tmp_path: Path) -> None:
    report = soak.Report()
    one = soak.Round(job, tmp_path / "root", report)
    one.run(_all_steps(job))
    assert (report.problems, one.step, report.steps) == ([], soak.STEPS, soak.STEPS)


def _sgd(model: Any, name: str) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("job", JOBS[:2], ids=str)
def test_a_soak_notices_weights_of_another_training(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = soak.Report()
    monkeypatch.setattr(soak, "optimizer_of", _sgd)  # of the single process
    soak.Round(job, tmp_path / "root", report).run(_all_steps(job))
    assert "differs by" in report.problems[0], report


def test_a_soak_notices_a_checkpoint_that_is_lost(tmp_path: Path) -> None:
    report = soak.Report()
    one = soak.Round(PLAIN, tmp_path / "root", report)
    one.step = 3  # was there
    one._look(_all_steps(PLAIN))
    assert report.problems[0].startswith("step 3 is lost")


def test_a_cut_cable_ends_both_hosts_in_time(tmp_path: Path) -> None:
    need_hosts()
    report = soak.Report()
    one = soak.Round(PLAIN, tmp_path / "root", report)
    one.run(_all_steps(PLAIN, soak.CUT))
    assert (report.problems, report.faults) == ([], {soak.CUT: 1})
    assert one.step < soak.STEPS


def test_a_soak_notices_hosts_that_wait_for_each_other_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_hosts()
    report = soak.Report()
    monkeypatch.setattr(soak, "LONGEST_S", soak.TIMEOUT_S - 2)
    soak.Round(PLAIN, tmp_path / "root", report).run(_all_steps(PLAIN, soak.CUT))
    assert report.problems[0].startswith("rank 0 hangs"), report


def test_a_machine_without_namespaces_has_all_other_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soak, "why_no_hosts", lambda: "unshare: not permitted")
    assert set(soak.FAULTS) - set(soak.faults_here()) == {soak.CUT}
