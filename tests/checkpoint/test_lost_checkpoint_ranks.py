"""In every exchange of a save or load of a training checkpoint, a rank that is lost is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import parallel
from reference_training import LLAMA, optimizer_of, scheduler_of

import parallel_ext as px
from parallel_ext.distributed.control import ControlPlane

TIMEOUT_S = 3.0
LOST = 1
CALLS = ("barrier", "run_on_all", "all_gather_object")  # what a save or load exchanges by


def _raise() -> None:
    raise RuntimeError("something else went wrong")


ENDS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raising": _raise,
}


@contextmanager
def _at_exchange(number: int, action: Callable[[], Any]) -> Iterator[list[str]]:
    """Run ``action`` before the exchange of this number, the first being 0; the list counts."""
    made: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            if len(made) == number + 1:
                action()
            return original(*args, **kwargs)

        return call

    patches = [
        mock.patch.object(ControlPlane, n, counting(n, getattr(ControlPlane, n))) for n in CALLS
    ]
    for patch in patches:
        patch.start()
    try:
        yield made
    finally:
        for patch in patches:
            patch.stop()


def _job() -> tuple[Any, Any, Any]:
    mesh = px.init_mesh(tp=dist.get_world_size(), timeout=TIMEOUT_S)
    model = parallel(replace(LLAMA, dtype=torch.float32).model(), mesh)
    optimizer = optimizer_of(model, "AdamW")
    return model, optimizer, scheduler_of(optimizer)


def _call(what: str, root: Path, job: tuple[Any, Any, Any]) -> None:
    if what == "save":
        px.save_checkpoint(root, 2, *job)
    elif what == "load":
        px.load_checkpoint(root, *job)
    else:
        px.save_checkpoint(root, 2, *job, asynchronous=True)
        px.wait_for_checkpoint(job[0])


def _count(what: str, root: Path) -> int:
    job = _job()
    px.save_checkpoint(root, 1, *job)
    with _at_exchange(10**6, lambda: None) as made:
        _call(what, root, job)
    return len(made)


def _lose(what: str, number: int, end: str, lost: int, root: Path) -> str:
    job = _job()
    px.save_checkpoint(root, 1, *job)
    start = time.monotonic()
    try:
        with _at_exchange(number, ENDS[end] if dist.get_rank() == lost else lambda: None):
            _call(what, root, job)
    except px.CheckpointError as error:
        seconds = time.monotonic() - start
        assert seconds < 2 * TIMEOUT_S + 6, f"{seconds:.1f} s"
        return str(error)
    return "nothing was raised"


def _check_lost(what: str, number: int, end: str, lost: int, root: Path) -> None:
    """The survivors say who is missing, and the checkpoint before is whole."""
    args = (_lose, what, number, end, lost, root)
    if end == "raising":
        errors = pool(3).run(*args)
        del errors[lost]
        pool(3).close()  # the ranks are out of step
    else:
        errors = pool(3).run_losing(lost, *args)
    for error in errors:
        assert isinstance(error, str), error
        assert f"rank {lost}" in error or f"ranks {lost}" in error, error
    assert px.verify_checkpoint(px.latest_checkpoint(root)) in (1, 2)


@pytest.mark.parametrize(
    ("what", "number", "end", "lost"),
    [("save", 9, "killed", 1), ("save", 12, "stopped", 0), ("load", 6, "killed", 2)],
)
def test_a_lost_rank_is_named_on_the_others(
    what: str, number: int, end: str, lost: int, tmp_path: Path
) -> None:
    _check_lost(what, number, end, lost, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("what", ["save", "load", "asynchronous save"])
def test_a_lost_rank_is_named_in_every_exchange(what: str, end: str, tmp_path: Path) -> None:
    exchanges = pool(3).run(_count, what, tmp_path / "count")[LOST]
    assert exchanges > 6
    for number in range(exchanges):
        _check_lost(what, number, end, LOST, tmp_path / str(number))


def _stay_away(what: str, root: Path) -> str:
    job = _job()
    px.save_checkpoint(root, 1, *job)
    if dist.get_rank() == LOST:
        return ""
    with pytest.raises(px.CheckpointError) as raised:
        _call(what, root, job)
    assert isinstance(raised.value, px.CollectiveTimeout)
    return str(raised.value)


@pytest.mark.parametrize("what", ["save", "load"])
def test_an_absent_rank_is_named(what: str, tmp_path: Path) -> None:
    for error in pool(2).run(_stay_away, what, tmp_path)[:LOST]:
        assert f"every rank must call it, but rank {LOST} did not within" in error
    pool(2).close()  # their barriers are out of step


# Ranks that disagree ------------------------------------------------------------------------------


def _differing(case: str, root: Path) -> tuple[str, list[str]]:
    """The class of the error, and what it says; ranks go on together afterwards."""
    model, optimizer, scheduler = job = _job()
    px.save_checkpoint(root, 1, *job)
    other = dist.get_rank() == LOST
    sgd = optimizer_of(model, "SGD")
    cases: dict[str, Callable[[], Any]] = {
        "step": lambda: px.save_checkpoint(root, 2 + other, *job),
        "root": lambda: px.save_checkpoint(f"{root}{'x' * other}", 2, *job),
        "working directory": lambda: _save_in(root.parent / str(other), *job),
        "data": lambda: px.save_checkpoint(root, 2, *job, data_state=other),
        "data that is no JSON": lambda: px.save_checkpoint(
            root, 2, *job, data_state={1} if other else 1
        ),
        "optimizer": lambda: px.save_checkpoint(root, 2, model, sgd if other else optimizer),
        "no optimizer": lambda: px.save_checkpoint(root, 2, model, None if other else optimizer),
        "no scheduler": lambda: px.save_checkpoint(
            root, 2, model, optimizer, None if other else scheduler
        ),
        "keep_last": lambda: px.save_checkpoint(root, 2, *job, keep_last=1 + other),
        "keep_last of a wrong kind": lambda: px.save_checkpoint(
            root, 2, *job, keep_last=-1 if other else 1
        ),
        "asynchronous": lambda: px.save_checkpoint(root, 2, *job, asynchronous=other),
        "dtype": lambda: px.save_checkpoint(
            root, 2, model.double() if other else model, optimizer, scheduler
        ),
        "dtype of the state": lambda: px.save_checkpoint(
            root, 2, model, _with_state(model, optimizer, other), scheduler
        ),
        "rate": lambda: px.save_checkpoint(root, 2, model, _with_rate(optimizer, other)),
        "function": lambda: (px.load_checkpoint if other else px.full_state_dict)(
            *((root, *job) if other else (model,))
        ),
        "load: step": lambda: px.load_checkpoint(root, *job, step=1 if other else None),
        "load: no optimizer": lambda: px.load_checkpoint(root, model, None if other else optimizer),
        "load: no scheduler": lambda: px.load_checkpoint(
            root, model, optimizer, None if other else scheduler
        ),
        "load: optimizer": lambda: px.load_checkpoint(root, model, sgd if other else optimizer),
        "load: dtype": lambda: px.load_checkpoint(
            root, model.double() if other else model, optimizer
        ),
    }
    with pytest.raises((px.CheckpointError, px.DisagreementError)) as raised:
        cases[case]()
    job = _job()
    px.save_checkpoint(root, 7, *job)
    px.load_checkpoint(root, *job)
    return str(raised.value), [cls.__name__ for cls in type(raised.value).__mro__]


def _save_in(folder: Path, *job: Any) -> None:
    before = Path.cwd()
    folder.mkdir()
    os.chdir(folder)
    try:
        px.save_checkpoint("ckpts", 2, *job)
    finally:
        os.chdir(before)


def _with_state(model: Any, optimizer: Any, other: bool) -> Any:
    for parameter in model.parameters():
        dtype = torch.float64 if other else torch.float32
        optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter, dtype=dtype)}
    return optimizer


def _with_rate(optimizer: Any, other: bool) -> Any:
    optimizer.param_groups[0]["lr"] += other
    return optimizer


DIFFERING = {
    "step": "rank 1: save_checkpoint of step 3",
    "root": "rank 1: save_checkpoint of step 2 to ",
    "working directory": "True/ckpts on rank 1",
    "data": "data_state must be equal on all ranks, but is ",
    "data that is no JSON": "data_state",
    "optimizer": "with optimizer SGD",
    "no optimizer": "with optimizer NoneType",
    "no scheduler": "scheduler NoneType",
    "keep_last": "keep_last must be equal on all ranks, but is ",
    "keep_last of a wrong kind": "keep_last",
    "asynchronous": "asynchronous True",
    "dtype": "the tensor lm_head.weight must be equal on all ranks, but is of torch.",
    "dtype of the state": "{'exp_avg': ['F64']} on rank 1",
    "rate": "optimizer must be equal on all ranks, but is {",
    "function": "rank 1: load_checkpoint",
    "load: step": "step 1",
    "load: no optimizer": "into optimizer NoneType",
    "load: no scheduler": "scheduler NoneType",
    "load: optimizer": "into optimizer SGD",
    "load: dtype": "the model has torch.float64",
}


@pytest.mark.parametrize("case", DIFFERING)
def test_a_rank_that_differs_is_named_on_all(case: str, tmp_path: Path) -> None:
    for text, classes in pool(2).run(_differing, case, tmp_path / "root"):
        assert DIFFERING[case] in text
        assert "CheckpointError" in classes or case == "function"
        assert "rank 1" in text or "load: dtype" in case or "wrong kind" in case or "JSON" in case
