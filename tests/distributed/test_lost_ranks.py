"""A rank that is killed, stopped or fails during a save or load is named on the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from disk_faults import full, kill
from ranks import Raised, Ranks, pool
from reference import Tiny, parallel

import parallel_ext as px
from parallel_ext import _C, ops
from parallel_ext.io import safetensors_reader, stream
from parallel_ext.sharding import reshard

TIMEOUT_S = 4.0
LOST = 1

ENDS: dict[str, Callable[[], Any]] = {
    "killed": kill,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
# Where it happens: the function that is called there, and the call of it that does not return.
PLACES: dict[str, tuple[Any, str, int]] = {
    "a save, making files": (stream.SafetensorsWriter, "_header", 1),
    "a save, before rows are sent": (reshard, "shard_views", 5),
    "a save, writing": (stream.SafetensorsWriter, "append", 3),
    "a save, closing a file": (stream.SafetensorsWriter, "close", 1),
    "a load, opening": (safetensors_reader.SafetensorsFile, "_read_header", 1),
    "a load, reading": (safetensors_reader.SafetensorsFile, "read_box", 4),
}


def _model_and_mesh() -> tuple[Any, px.Mesh]:
    mesh = px.init_mesh(tp=dist.get_world_size(), timeout=TIMEOUT_S)
    return parallel(Tiny(heads=6, key_value_heads=3).model(), mesh), mesh


def _at_call(place: tuple[Any, str, int], action: Callable[[], Any]) -> Any:
    """A patch that runs ``action`` when the function of a place is called so many times."""
    where, name, at_call = place
    original, calls = getattr(where, name), 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            action()
        return original(*args, **kwargs)

    return mock.patch.object(where, name, counting)


def _lose(what: str, how: str, directory: Path) -> None:
    model, mesh = _model_and_mesh()
    model.save_pretrained(directory)
    start = time.monotonic()
    action = ENDS[how] if dist.get_rank() == LOST else lambda: None
    try:
        with _at_call(PLACES[what], action):
            if what.startswith("a save"):
                model.save_pretrained(directory)
            else:
                px.from_pretrained(directory, mesh)
    except px.CollectiveTimeout as error:
        raise px.CollectiveTimeout(f"{error} [{time.monotonic() - start:.1f} s]") from error


# Each place with one end by default.
LOSSES = list(product(PLACES, ENDS))
SOME = [(what, [*ENDS][place % 2]) for place, what in enumerate(PLACES)]
OTHERS = [loss for loss in LOSSES if loss not in SOME]


@pytest.mark.parametrize("losses", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_the_others_name_a_rank_that_is_lost(tmp_path: Path, losses: list[tuple[str, str]]) -> None:
    outs = [tmp_path / f"{what} {how}" for what, how in losses]
    with ThreadPoolExecutor(3) as threads:  # most of the time is waiting
        lives = [
            threads.submit(Ranks(3).run_losing, LOST, _lose, *loss, out)
            for loss, out in zip(losses, outs, strict=True)
        ]
        survivors = [life.result() for life in lives]
    for (what, how), out, raised in zip(losses, outs, survivors, strict=True):
        for survivor in raised:
            case = f"{what}, {how}: {survivor}"
            assert isinstance(survivor, Raised), case
            assert survivor.type == "CollectiveTimeout", case
            if "making" in what or "closing" in what:  # by a disk, which may be slow
                assert f"rank {LOST} has shown no sign of life" in survivor.text, case
            else:
                assert f"but rank {LOST} did not" in survivor.text, case
            seconds = float(survivor.text.rsplit("[", 1)[1].removesuffix(" s]"))
            assert seconds < TIMEOUT_S + 5, case
        names = {path.name for path in out.iterdir()}
        assert {"config.json", "model.safetensors.index.json"} <= names


def _sum_twice_without(lost: int) -> list[str]:
    """The errors of sums of this rank's tokens, which gloo sends where no memory is shared."""
    mesh = px.init_mesh(tp=dist.get_world_size(), timeout=TIMEOUT_S)
    group = mesh.tp
    _C.set_shared_memory(False)
    tokens = torch.ones(group.size, 3)
    ops.sum_tokens(tokens, [1] * group.size, group)
    if dist.get_rank() == lost:
        kill()
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            ops.sum_tokens(tokens, [1] * group.size, group)
        errors.append(str(raised.value))
    return errors


def test_every_exchange_without_a_lost_rank_names_it() -> None:
    """The first one breaks off, the next one cannot begin."""
    (errors,) = Ranks(2).run_losing(LOST, _sum_twice_without, LOST)
    for error in errors:
        assert error.startswith("sum_tokens: "), errors
        assert f"but rank {LOST} did not" in error, errors


def _fail(what: str, directory: Path) -> None:
    model, mesh = _model_and_mesh()
    model.save_pretrained(directory)

    try:
        with _at_call(PLACES[what], full if dist.get_rank() == LOST else lambda: None):
            if what.startswith("a save"):
                model.save_pretrained(directory)
            else:
                px.from_pretrained(directory, mesh)
    finally:
        model.save_pretrained(directory)  # the ranks can still work together
        px.full_state_dict(model)
        px.from_pretrained(directory, mesh)


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("what", PLACES)
def test_all_raise_what_one_rank_raises(tmp_path: Path, what: str) -> None:
    results = pool(3).run_raising(_fail, what, tmp_path / "out")
    assert all(isinstance(raised, Raised) for raised in results), results
    assert [raised.type for raised in results] == ["OSError"] * 3
    for rank in (0, 2):
        assert f"failed on rank {LOST}" in results[rank].text, results[rank]
        assert "No space left on device" in results[rank].text
    assert os.listdir(tmp_path) == ["out"], "no temporary directory may stay"
    assert _contents(tmp_path / "out")


class _OwnError(Exception):
    """An error that this package does not know."""


class _OwnValueError(ValueError):
    """A ValueError of somebody else."""


FAILURES: dict[str, tuple[dict[int, Exception], list[str]]] = {
    "a class of Python's": ({1: KeyError("q")}, ["KeyError"] * 3),
    "a class of this package": ({2: px.CheckpointError("torn")}, ["CheckpointError"] * 3),
    "a class under one of Python's": (
        {1: _OwnValueError("not finite")},
        ["ValueError", "_OwnValueError", "ValueError"],
    ),
    "a class that wants more than a text": (
        {0: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")},
        ["UnicodeDecodeError", "UnicodeError", "UnicodeError"],
    ),
    "a class that no other rank knows": ({1: _OwnError("odd")}, ["RuntimeError"] * 3),
    "several classes": ({1: TypeError("list"), 2: ValueError("-1")}, ["TypeError"] * 3),
}


def _fail_by(name: str) -> None:
    mesh = px.init_mesh(timeout=TIMEOUT_S)
    own = FAILURES[name][0].get(mesh.rank)

    def act() -> None:
        if own is not None:
            raise own

    try:
        mesh.control.run_on_all("a step", act)
    finally:
        mesh.control.run_on_all("the next step", lambda: None)  # the ranks can still work together


@pytest.mark.parametrize("name", FAILURES)
def test_one_except_clause_catches_an_error_on_every_rank(name: str) -> None:
    failures, classes = FAILURES[name]
    results = pool(3).run_raising(_fail_by, name)
    assert [raised.type for raised in results] == classes
    for rank in {0, 1, 2} - set(failures):
        for failed, error in failures.items():
            assert f"rank {failed}: {type(error).__name__}: " in results[rank].text


def _save_slowly(directory: Path) -> None:
    model, _ = _model_and_mesh()
    slow = {LOST: lambda: time.sleep(TIMEOUT_S + 1)}.get(dist.get_rank(), lambda: None)
    with _at_call((os, "fsync", 1), slow):
        model.save_pretrained(directory)


def test_a_disk_slower_than_the_timeout_fails_no_save(tmp_path: Path) -> None:
    pool(3).run(_save_slowly, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_what_a_rank_failed_by_is_in_the_error_when_others_are_lost_meanwhile() -> None:
    mesh = px.init_mesh()
    lost = mock.patch.object(
        mesh.control, "all_gather_bytes", side_effect=px.CollectiveTimeout("rank 1 is lost")
    )
    with lost, pytest.raises(px.CollectiveTimeout, match=r"rank 1 is lost.*No space left"):
        mesh.control.run_on_all("a save", full)
