"""Saves behind training."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import quietly
from reference_mixtral import Layout
from reference_training import LLAMA, MIXTRAL, Job, build, train

import parallel_ext as px
from parallel_ext.io import disk

JOBS = [
    Job(),
    Job(layout=Layout(1, 2, 1)),
    Job(layout=Layout(2, 2, 1), zero=2),
    Job(MIXTRAL, Layout(2, 1, 2), zero=3),
]


def _files(step: Path) -> dict[str, bytes]:
    """The content of a checkpoint but for what is new in each save."""
    return {
        str(path.relative_to(step)): path.read_bytes().replace(_save_id(step), b"")
        for path in step.rglob("*")
        if path.is_file() and path.name not in ("COMMIT", "manifest.json")
    }


def _save_id(step: Path) -> bytes:
    return (step / "COMMIT").read_bytes().split(b'"save_id": "')[1][:32]


@contextmanager
def _slow_disk(gate: threading.Event) -> Any:
    """No tensor reaches a file before ``gate`` is open."""
    write = disk.write

    def later(file: Any, memory: memoryview, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        write(file, memory, offset)

    with mock.patch.object(disk, "write", later):
        yield


def _save_both_ways(job: Job, root: Path) -> None:
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(2))
    data_state = {"samples": [8]}
    px.save_checkpoint(root / "sync", 2, model, optimizer, scheduler, data_state)
    gate = threading.Event()
    with _slow_disk(gate):
        path = px.save_checkpoint(
            root / "async", 2, model, optimizer, scheduler, data_state, asynchronous=True
        )
        assert not path.exists()
        data_state["samples"].append(9)  # nothing of this reaches the files
        model.config.hidden_act = "relu"
        train(model, optimizer, scheduler, mesh, range(2, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        torch.manual_seed(99)
        assert not path.exists()
        gate.set()
        px.wait_for_checkpoint(model)
    assert px.verify_checkpoint(path) == 2


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(
    job: Job, tmp_path: Path
) -> None:
    pool(job.layout.world).run(_save_both_ways, job, tmp_path)
    expected = _files(tmp_path / "sync" / "step-00000002")
    assert len(expected) >= 6
    assert _files(tmp_path / "async" / "step-00000002") == expected


def _train_while_it_saves(root: Path) -> list[float]:
    job = Job(layout=Layout(1, 2, 1))
    model, optimizer, scheduler, mesh = build(job)
    for step in range(3):
        train(model, optimizer, scheduler, mesh, range(step, step + 1))
        if root.name == "saves":
            px.save_checkpoint(root, step + 1, model, optimizer, scheduler, asynchronous=True)
    px.wait_for_checkpoint(model)
    return [float(p.double().sum()) for p in model.parameters()]


def test_training_is_the_same_whether_it_is_saved_or_not(tmp_path: Path) -> None:
    saved = pool(2).run(_train_while_it_saves, tmp_path / "saves")
    assert saved == pool(2).run(_train_while_it_saves, tmp_path / "none")
    assert px.latest_checkpoint(tmp_path / "saves").name == "step-00000003"
    for step in (1, 2, 3):
        assert px.verify_checkpoint(tmp_path / "saves" / f"step-0000000{step}") == step
    assert not list((tmp_path / "saves").glob(".tmp*"))


def _the_next_call_raises(root: Path, guilty: int, call: str) -> tuple[str, str, bool]:
    model, optimizer, scheduler, mesh = build(Job(layout=Layout(1, 2, 1)))

    def full(file: Any, size: int) -> None:
        if mesh.rank == guilty and threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")

    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(disk, "reserve", full),
    ):
        warnings.simplefilter("always")
        px.save_checkpoint(root, 1, model, optimizer, asynchronous=True)
        mesh.background._thread.join()
    warned = " ".join(str(each.message) for each in caught)
    calls = {
        "save": lambda: px.save_checkpoint(root, 2, model, optimizer),
        "load": lambda: px.load_checkpoint(root, model, optimizer),
        "wait": lambda: px.wait_for_checkpoint(model),
    }
    with pytest.raises(px.CheckpointError) as raised:
        calls[call]()
    px.save_checkpoint(root, 3, model, optimizer)
    return str(raised.value), warned, getattr(raised.value.__cause__, "errno", None) == 28


@pytest.mark.parametrize(("guilty", "call"), [(0, "save"), (1, "load"), (0, "wait")])
def test_the_next_call_raises_what_went_wrong_once(tmp_path: Path, guilty: int, call: str) -> None:
    answers = pool(2).run(_the_next_call_raises, tmp_path, guilty, call)
    for rank, (error, warned, is_its_own) in enumerate(answers):
        assert "No space left" in error
        assert "save_checkpoint of step 1 to" in error
        assert "in the background" in warned
        assert "No space left" in warned
        assert is_its_own == (rank == guilty)
        assert rank == guilty or f"rank {guilty}" in error
    assert px.latest_checkpoint(tmp_path).name == "step-00000003"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step-00000003"]


def _fails_at_once(root: Path) -> str:
    """A thread that fails before its work is a save that failed."""
    model, optimizer, _, _ = build(Job())

    def refuse(*_: int) -> None:
        raise RuntimeError("Operation not permitted")

    with quietly(), mock.patch.object(os, "setpriority", refuse):
        px.save_checkpoint(root, 1, model, optimizer, asynchronous=True)
        with pytest.raises(px.CheckpointError) as raised:
            px.wait_for_checkpoint(model)
    return str(raised.value)


def test_a_thread_that_fails_before_it_writes_raises(tmp_path: Path) -> None:
    assert "Operation not permitted" in pool(1).run(_fails_at_once, tmp_path)[0]


def _go_elsewhere(root: Path) -> Path:
    model, optimizer, _, mesh = build(Job(layout=Layout(1, 2, 1)))
    gate, before = threading.Event(), Path.cwd()
    os.chdir(root)
    try:
        with _slow_disk(gate):
            path = px.save_checkpoint("ckpts", 1, model, optimizer, asynchronous=True)
            os.chdir("/")
            gate.set()
            px.wait_for_checkpoint(model)
    finally:
        os.chdir(before)
    return path


def test_the_root_is_where_it_was_when_it_was_named(tmp_path: Path) -> None:
    assert pool(2).run(_go_elsewhere, tmp_path) == [Path("ckpts/step-00000001")] * 2
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path / "ckpts")) == 1
    assert not list((tmp_path / "ckpts").glob(".*"))


def _end_while_it_saves(root: Path) -> None:
    model, optimizer, *_ = build(Job(layout=Layout(1, 2, 1)))
    gate = threading.Event()
    with _slow_disk(gate):
        px.save_checkpoint(root, 1, model, optimizer, asynchronous=True)
        threading.Timer(0.3, gate.set).start()
        dist.destroy_process_group()
        assert px.verify_checkpoint(root / "step-00000001") == 1


def test_the_end_of_the_job_waits_for_a_save(tmp_path: Path) -> None:
    try:
        pool(2).run(_end_while_it_saves, tmp_path)
    finally:
        pool(2).close()  # its groups are gone


def _drifted(root: Path, job: Job, what: str) -> None:
    model, optimizer, scheduler, mesh = build(job)
    train(model, optimizer, scheduler, mesh, range(1))
    norm = model.model.norm.weight
    if mesh.rank == 1:
        (norm.data if what == "weight" else optimizer.state[norm]["exp_avg"])[0] += 1e-9
    px.save_checkpoint(root, 1, model, optimizer)


@pytest.mark.parametrize(
    ("what", "name"), [("weight", "model.norm.weight"), ("state", "exp_avg/model.norm.weight")]
)
def test_replicas_that_have_drifted_apart_are_not_saved(
    what: str, name: str, tmp_path: Path
) -> None:
    root = tmp_path / "ckpts"
    pool(2).assert_raises(
        _drifted,
        root,
        Job(layout=Layout(1, 2, 1)),
        what,
        error="CheckpointDisagreement",
        words=f"{name} differs between ranks 0 and 1",
    )
    assert not root.exists()


def _save_while_one_is_slow(root: Path) -> bool:
    model, optimizer, scheduler, mesh = build(Job(layout=Layout(1, 2, 1)))
    gate = threading.Event()
    with _slow_disk(gate):
        px.save_checkpoint(root, 1, model, optimizer, asynchronous=True)
        threading.Timer(0.3, gate.set).start()
        px.save_checkpoint(root, 2, model, optimizer)
    return (root / "step-00000001" / "COMMIT").exists()


def test_the_next_save_waits_for_the_one_in_flight(tmp_path: Path) -> None:
    assert pool(2).run(_save_while_one_is_slow, tmp_path) == [True, True]
    assert px.latest_checkpoint(tmp_path).name == "step-00000002"


def _copied(job: Job, root: Path) -> tuple[int, int]:
    """Bytes that a rank copies for a save, and that it holds."""
    model, optimizer, *_ = build(job)
    plans: list[Any] = []
    from parallel_ext.checkpoint import save

    copy_values = save._Plan.copy_values

    def spy(plan: Any, mesh: px.Mesh) -> None:
        held = sum(value.nbytes for value in plan.values.values())
        copy_values(plan, mesh)
        copied = sum(v.nbytes for v in plan.values.values() if v.device.type == "cpu")
        plans.append((copied, held))

    with mock.patch.object(save._Plan, "copy_values", spy):
        px.save_checkpoint(root, 1, model, optimizer, asynchronous=True)
        px.wait_for_checkpoint(model)
    return plans[0]


def test_replicas_share_the_copies_that_are_made(tmp_path: Path) -> None:
    job = Job(replace(LLAMA, vocab_size=301), Layout(4, 1, 1))
    copied = pool(4).run(_copied, job, tmp_path)
    whole = copied[0][1]
    assert sum(c for c, _ in copied) == whole
    assert max(c for c, _ in copied) < 0.5 * whole
