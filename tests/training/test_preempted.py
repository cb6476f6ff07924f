"""Jobs that are told to end, and save the step that all ranks are at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launch import TORCHRUN
from ranks import pool
from reference import quietly
from reference_mixtral import Layout
from reference_training import Job, build

import parallel_ext as px
from parallel_ext.training import preemption


def _asked(rank_asked: int) -> list[bool]:
    model, _, _, mesh = build(Job(layout=Layout(1, 2, 1)))
    before = signal.getsignal(signal.SIGTERM)
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with (
            mock.patch.object(preemption, "_requested", False),
            mock.patch.object(preemption, "_listening", False),
        ):
            answers = [px.stop_requested(model)]
            if mesh.rank == rank_asked:
                os.kill(os.getpid(), signal.SIGTERM)
                assert seen == [signal.SIGTERM], "the handler of before was dropped"
            answers += [px.stop_requested(model), px.stop_requested(model)]
    finally:
        signal.signal(signal.SIGTERM, before)
    return answers


@pytest.mark.parametrize("rank_asked", [0, 1])
def test_all_ranks_learn_at_the_same_step_that_one_was_asked_to_end(rank_asked: int) -> None:
    assert pool(2).run(_asked, rank_asked) == [[False, True, True]] * 2


def _asked_again_and_again() -> list[bool]:
    """A signal at each line of what handles the one before."""
    model, _, _, _ = build(Job())
    before, sent = signal.getsignal(signal.SIGTERM), []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if event == "line" and len(sent) < 20:
            sent.append(frame.f_lineno)
            signal.raise_signal(signal.SIGTERM)
        return trace

    try:
        with (
            mock.patch.object(preemption, "_requested", False),
            mock.patch.object(preemption, "_listening", False),
        ):
            answers = [px.stop_requested(model)]
            handler = signal.getsignal(signal.SIGTERM)
            sys.settrace(trace)
            handler(signal.SIGTERM, None)
            sys.settrace(None)
            return [*answers, len(sent) > 1, px.stop_requested(model)]
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGTERM, before)


def test_a_signal_may_come_while_another_is_handled() -> None:
    assert pool(1).run(_asked_again_and_again, timeout_s=30) == [[False, True, True]]


def _fork_and_end() -> int:
    model, _, _, _ = build(Job())
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            mock.patch.object(preemption, "_requested", False),
            mock.patch.object(preemption, "_listening", False),
        ):
            px.stop_requested(model)
            told, tell = os.pipe()
            child = os.fork()
            if child == 0:  # a signal before here would be lost
                os.write(tell, b"1")
                time.sleep(30)
                os._exit(7)
            os.read(told, 1)
            os.kill(child, signal.SIGTERM)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_process_still_ends_by_sigterm() -> None:
    assert pool(1).run(_fork_and_end) == [-signal.SIGTERM]


def _on_another_thread() -> str:
    model, _, _, _ = build(Job())
    errors: list[Exception] = []

    def ask() -> None:
        try:
            px.stop_requested(model)
        except RuntimeError as error:
            errors.append(error)

    with mock.patch.object(preemption, "_listening", False):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    return str(errors[0])


def test_only_the_main_thread_can_listen() -> None:
    assert "main thread" in pool(1).run(_on_another_thread)[0]


_SCRIPT = """
import sys, time
import torch
sys.path.insert(0, {tests!r})
from reference_mixtral import Layout
from reference_training import Job, build, train
import parallel_ext as px

root = {root!r}
torch.distributed.init_process_group("gloo")  # which Layout asks for
model, optimizer, scheduler, mesh = build(Job(layout=Layout(1, 2, 1)))
px.stop_requested(model)
for step in range(1, 10_000):
    train(model, optimizer, scheduler, mesh, range(step, step + 1))
    if step % 3 == 0:
        px.save_checkpoint(root, step, model, optimizer, scheduler, asynchronous=True)
        open(root + f"/saved-by-{{mesh.rank}}", "w").close()
    if px.stop_requested(model):
        px.wait_for_checkpoint(model)
        if step % 3:
            px.save_checkpoint(root, step, model, optimizer, scheduler)
        open(root + f"/ended-{{mesh.rank}}", "w").write(str(step))
        break
"""


def test_a_job_under_torchrun_saves_one_step_when_it_is_asked_to_end(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        _SCRIPT.format(tests=str(Path(__file__).parents[1] / "support"), root=str(tmp_path))
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with quietly():
        job = subprocess.Popen(
            [*TORCHRUN, str(script)], env=environment, stderr=subprocess.PIPE, text=True
        )
    try:
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("saved-by-*"))) < 2:
            assert job.poll() is None, job.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
    finally:
        job.terminate()  # and with it the ranks, which a kill would leave behind
        job.wait(60)
    ended = [int(path.read_text()) for path in tmp_path.glob("ended-*")]
    assert len(ended) == 2, errors
    assert ended[0] == ended[1]
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == ended[0]
