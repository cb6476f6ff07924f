"""Jobs start within the time limit, naming who is absent, and end with the right exit code."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import short_jobs
import torch
import torch.distributed as dist
from launch import TORCHRUN
from ranks import Raised, pool
from reference import Tiny, batch, parallel

import parallel_ext as px
from parallel_ext import _C, ops
from parallel_ext.distributed import mesh
from parallel_ext.distributed.barrier import join_job, long_step
from parallel_ext.distributed.errors import CollectiveTimeout
from parallel_ext.distributed.hosts import Hosts
from parallel_ext.distributed.limited_store import LimitedStore

Jobs = dict[str, list[list[tuple[int, str]]]]
LOST = 1
OFTEN = 2  # of each case that is run again and again


@functools.cache
def _jobs(loops: int) -> Jobs:
    script = str(Path(short_jobs.__file__))
    command = [sys.executable, "-W", "ignore", script, str(loops)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    return json.loads(done.stdout)


def _without_threads(jobs: list[list[tuple[int, str]]]) -> None:
    for ranks in jobs:
        assert [code for code, _ in ranks] == [0, 0], ranks
        for _, output in ranks:
            assert "threads: 1\n" in output, output  # the ones of gloo have ended by then


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("loops", [OFTEN, pytest.param(50, marks=pytest.mark.slow)])
def test_jobs_end_without_threads_and_with_exit_code_0(loops: int, shared_memory: bool) -> None:
    jobs = _jobs(loops)[f"ends, {shared_memory}"]
    assert len(jobs) == loops
    _without_threads(jobs)


def test_a_job_may_shut_down_twice() -> None:
    (ranks,) = _jobs(OFTEN)["shuts_down"]
    _without_threads([ranks])
    assert all("initialized: False" in output for _, output in ranks)


def test_the_group_of_the_caller_is_left_to_him() -> None:
    (ranks,) = _jobs(OFTEN)["group_of_the_caller"]
    assert [code for code, _ in ranks] == [0, 0], ranks
    assert all("initialized: True" in output for _, output in ranks)


def test_a_job_that_raises_fails() -> None:
    (ranks,) = _jobs(OFTEN)["raises"]
    assert [code for code, _ in ranks] == [1, 1], ranks
    assert all("KeyError: 'after all'" in output for _, output in ranks)


@pytest.mark.parametrize(
    ("case", "waits", "words"),
    [
        ("lost_after_the_store", 0, "init_mesh: every rank must call it, but rank 1 did not"),
        ("lost_without_a_word", 0, "init_mesh: every rank must call it, but rank 1 did not"),
        ("lost_with_the_store", 1, "init_mesh: rank 1 does not reach the store of the job at"),
        ("lost_before_the_groups", 0, "init_mesh: every rank must call it, but rank 1 did not"),
        ("lost_among_the_groups", 0, "init_mesh: ranks 0, 1 must connect, but rank 1 did not"),
    ],
)
def test_a_rank_that_is_lost_at_the_start_is_named(case: str, waits: int, words: str) -> None:
    (ranks,) = _jobs(OFTEN)[case]
    output = ranks[waits][1]
    assert f"CollectiveTimeout: {words}" in output
    assert float(re.search("seconds: (.*)", output)[1]) < short_jobs.TIMEOUT_S + 10


def _start_with_few_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == LOST:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    try:
        px.init_mesh(tp=2, timeout=8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_that_cannot_connect_says_why() -> None:
    raised = pool(2).run_raising(_start_with_few_files)
    pool(2).close()
    assert "this rank had failed by RuntimeError: " in raised[LOST].text
    assert "Too many open files" in raised[LOST].text


def _be_one_of_two(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", **place}.items():
        monkeypatch.setenv(name, value)


def test_a_port_of_another_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        _be_one_of_two(monkeypatch, 0, port)
        with pytest.raises(OSError, match=f"another process has the port {port} of MASTER_PORT"):
            join_job("gloo", 60)


def test_a_store_that_nobody_keeps_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    _be_one_of_two(monkeypatch, 1, port)
    began = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=f"rank 1 does not reach .*127.0.0.1:{port}"):
        join_job("gloo", 6)
    assert time.monotonic() - began < 8, "a TCPStore takes twice its timeout"


def _join_differently(what: str) -> None:
    other = dist.get_rank() == LOST
    before = _C.order_check(), mesh.VERSION
    if other and what == "debugging":
        _C.set_order_check(True)
    elif other:
        mesh.VERSION = "0.0"
    try:
        px.init_mesh(tp=2, timeout=20)
    finally:
        _C.set_order_check(before[0])
        mesh.VERSION = before[1]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("debugging", "rank 0: init_mesh; rank 1: init_mesh, PARALLEL_EXT_DEBUG=1"),
        ("version", "init_mesh: parallel_ext must be equal on all ranks, but is "),
    ],
)
def test_ranks_that_were_started_differently_are_named(what: str, words: str) -> None:
    pool(2).assert_raises(_join_differently, what, error="DisagreementError", words=words)


def _call_in_a_fork(agreement: bool) -> str:
    model = parallel(Tiny().model(), px.init_mesh(tp=2, timeout=6.0), agreement=agreement)
    model(**batch(Tiny().vocab_size))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            model(**batch(Tiny().vocab_size))
        except BaseException as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    text, _ = os.read(read, 1000).decode(), os.waitpid(child, 0)
    model(**batch(Tiny().vocab_size))  # the ranks can still work together
    return text


@pytest.mark.parametrize("agreement", [True, False])
def test_a_forked_process_is_told_that_it_is_no_rank(agreement: bool) -> None:
    for rank, text in enumerate(pool(2).run(_call_in_a_fork, agreement, timeout_s=60)):
        by = f"forward: this process was forked from rank {rank}, and"
        assert (by if agreement else ": this process was forked from a rank of group ") in text


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _meshes(closing: bool) -> list[tuple[int, int]]:
    counts = []
    for number in range(21):
        mesh = px.init_mesh(tp=2, timeout=60)
        ops.reduce_from_region(torch.ones(3), mesh.tp)
        if number % 5 == 0:
            mesh.background.connect()
        mesh.control.run_on_all("a long step", lambda: None, patient=True)
        if closing:
            mesh.close()
        del mesh
        if number in (0, 20):
            counts.append(_held())
    return counts


def test_meshes_that_are_closed_keep_nothing() -> None:
    for before, after in pool(2).run(_meshes, True):
        assert after[1] <= before[1], "threads"
        assert after[0] <= before[0] + 20, (
            "file descriptors"
        )  # one a mesh: csrc/comm/shared_memory.h


def _close_twice_then_use() -> None:
    mesh = px.init_mesh(tp=2, timeout=60)
    mesh.close()
    mesh.close()
    mesh.control.all_gather_object(1)


def test_a_closed_mesh_says_that_it_is_gone() -> None:
    pool(2).assert_raises(_close_twice_then_use, error="RuntimeError", words="was destroyed before")


class _LostStore:
    """A store whose process has died."""

    def __getattr__(self, name: str) -> object:
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_died_during_a_long_step_is_an_error() -> None:
    with (
        pytest.raises(TimeoutError, match="the process that kept it has died"),
        long_step(LimitedStore(_LostStore(), 5), 1, 0, Hosts.unknown(2), timeout=0.1),
    ):
        pass


def _train_without(zero: int, backward: bool) -> None:
    mesh = px.init_mesh(timeout=6.0)
    model = px.data_parallel(parallel(Tiny().model(), mesh), mesh, zero=zero)
    loss = model(**batch(Tiny().vocab_size)).loss
    if mesh.rank == LOST and backward:
        os._exit(1)
    loss.backward()
    if mesh.rank == LOST:
        os._exit(1)
    model(**batch(Tiny().vocab_size))


@pytest.mark.parametrize(("zero", "backward"), [(3, False), (2, True)])
def test_a_rank_that_is_lost_in_fsdp_is_named(zero: int, backward: bool) -> None:
    (raised,) = pool(2).run_losing(LOST, _train_without, zero, backward)
    assert isinstance(raised, Raised)
    assert raised.type == "CollectiveTimeout"
    assert "training with data_parallel: every dp rank of tp_rank 0" in raised.text
    assert f"rank {LOST} did not" in raised.text


TOGETHER_AGAIN = """
import os
import torch
import parallel_ext as px
for _ in range(2):
    mesh = px.init_mesh(tp=2, timeout=60)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and mesh.rank == 1:
        os._exit(3)
    total = px.ops.reduce_from_region(torch.ones(1), mesh.tp).item()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        os.write(1, f"sum {total}\\n".encode())
    torch.distributed.destroy_process_group()
"""


def test_ranks_come_together_though_the_store_holds_what_others_wrote(tmp_path: Path) -> None:
    """The store of torchrun outlives ranks that it starts again, and jobs that a rank ends."""
    script = tmp_path / "script.py"
    script.write_text(TOGETHER_AGAIN)
    done = subprocess.run(
        [*TORCHRUN, "--max-restarts=1", str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sum 2.0") == 4


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), None, "60", True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match="init_mesh: timeout must be seconds, more than 0, got"):
        px.init_mesh(timeout=timeout)


def test_what_is_missing_of_the_variables_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="RANK is set, but not .*WORLD_SIZE"):
        join_job("gloo", 60)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "x", "RANK is 'x', which is not a number"),
        ("WORLD_SIZE", "", "WORLD_SIZE is '', which is not a number"),
        ("MASTER_PORT", "-1", "MASTER_PORT is '-1', which is not a number"),
        ("RANK", "2", "RANK is 2, counted from 0, of WORLD_SIZE=2 ranks"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for each, text in {**right, name: value}.items():
        monkeypatch.setenv(each, text)
    with pytest.raises(ValueError, match=words):
        px.init_mesh()


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_of_several_tasks_without_a_rank_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.raises(RuntimeError, match="started 4 tasks without RANK"):
        px.init_mesh()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert px.init_mesh().world_size == 1
