"""A save that is killed, or whose disk fails, leaves the checkpoint before it or its own, whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from disk_faults import SmallJob, at_operation, broken, full, in_child, kill
from power_loss import read
from ranks import pool

import parallel_ext as px

NEVER = 10**9
QUICK_DISK = mock.patch.object(os, "fsync", mock.Mock())
"""What was written outlives a process, durable or not."""
NEW = 30  # the number of the values that the save in question writes as step 3


def used_root(root: Path, job: SmallJob) -> None:
    """Step 2 is the last of 1 and 2; 3 is of another run; dead saves and a user left things."""
    for step in (1, 2):
        job.save(root, step, step)
    last = (root / "LATEST").read_bytes()
    job.mesh.control.all_gather_object(None)
    job.save(root, 3, 33)
    if job.mesh.rank != 0:
        return
    (root / "LATEST").write_bytes(last)
    shutil.copytree(root / "step-00000001", root / f".tmp-step-00000003-{1:032x}")
    shutil.copytree(root / "step-00000001", root / f".trash-step-00000001-{2:032x}")
    (root / f".LATEST-{3:032x}").write_text("step")
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (root / ".lock").write_text(f"process 1 on a ({boot_id}) since today\n")
    (root / "step-00000000").mkdir()
    (root / "notes").write_text("a user's")


FOREIGN = {"step-00000000", "notes"}


def _names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def _check_then_go_on(job: SmallJob, root: Path, used: bool, case: str) -> tuple[int, int] | None:
    """The last checkpoint, which must be whole; then a restarted job saves there as usual."""
    last = px.latest_checkpoint(root)
    found = None
    if last is not None:
        px.verify_checkpoint(last)
        found = job.load(root)
    assert found in ([(2, 2), (3, NEW)] if used else [None, (3, NEW)]), (case, found)
    following = 4 if found == (3, NEW) else 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.save(root, following, 40, keep_last=2)
    assert px.verify_checkpoint(px.latest_checkpoint(root)) == following
    kept = {f"step-{step:08}" for step in ({following} if found is None else {found[0], following})}
    assert _names(root) == kept | {"LATEST"} | (FOREIGN if used else set()), case
    return found


def _save(job: SmallJob, root: Path) -> None:
    job.save(root, 3, NEW, keep_last=2)


def different(operations: list[str]) -> list[tuple[int, str]]:
    """All operations, but of many writes one after the other only the first and the last."""
    return [
        (number, name)
        for number, name in enumerate(operations)
        if operations[number - 1 : number + 2] != ["write"] * 3
    ]


@QUICK_DISK
def _crash_everywhere(folder: Path, fault: str, used: bool) -> dict[str, Any]:
    """One process saves step 3; the fault hits each operation in turn. Counts what was found."""
    job = SmallJob(px.init_mesh())
    template = folder / "template"
    if used:
        used_root(template, job)
    counted = folder / "counted"
    if used:
        shutil.copytree(template, counted)
    with at_operation(NEVER, kill) as operations:
        _save(job, counted)
    _check_then_go_on(job, counted, used, "no fault")
    outcomes: dict[str, Any] = {"operations": list(operations), "old": 0, "new": 0}
    for number, name in different(operations):
        root = folder / "root"
        if used:
            shutil.copytree(template, root)
        raised = None
        if fault == "kill":

            def save() -> None:
                with at_operation(number, kill):  # noqa: B023 (it runs at once)
                    _save(job, root)  # noqa: B023

            assert in_child(save) is None
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what could not be removed
                try:
                    with at_operation(
                        number, {"full": full, "broken": broken}[fault], fault == "broken"
                    ):
                        _save(job, root)
                except px.CheckpointError as error:
                    raised = error
        case = f"{fault} at operation {number}, {name}"
        found = _check_then_go_on(job, root, used, case)
        assert raised or fault == "kill" or found == (3, NEW), case
        outcomes["new" if found == (3, NEW) else "old"] += 1
        shutil.rmtree(root)
    return outcomes


@pytest.mark.parametrize(
    ("fault", "used"),
    [
        *((fault, True) for fault in ("kill", "full", "broken")),
        ("kill", False),
        *(pytest.param(fault, False, marks=pytest.mark.slow) for fault in ("full", "broken")),
    ],
)
def test_the_last_or_the_new_checkpoint_is_whole(fault: str, used: bool, tmp_path: Path) -> None:
    (outcomes,) = pool(1).run(_crash_everywhere, tmp_path, fault, used)
    assert outcomes["old"] > 30
    assert outcomes["new"] >= 3
    assert {"write", "sync", "sync_path", "rename", "remove"} <= set(outcomes["operations"])


def used_directory(directory: Path, job: SmallJob) -> None:
    """A saved model, to which a user has added something."""
    job.fill(1)
    job.model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "more").mkdir()
    (directory / "more" / "notes").write_text("a user's")


def model_of(entries: dict[str, Any]) -> dict[str, Any]:
    """The files of a model among those of a directory, with what they hold."""
    names = ("config.json", "generation_config.json", "model.safetensors")
    return {name: entries.get(name) for name in names}


@QUICK_DISK
def _kill_everywhere(folder: Path) -> int:
    """Kill ``save_pretrained`` at each operation in turn; return how many there are."""
    job = SmallJob(px.init_mesh())
    used_directory(folder / "template" / "model", job)
    job.fill(2)
    shutil.copytree(folder / "template", folder / "new")
    with at_operation(NEVER, kill) as operations:
        job.model.save_pretrained(folder / "new" / "model")
    models = [model_of(read(folder / name / "model")) for name in ("template", "new")]
    kills = different(operations)
    for number, name in kills:
        case, parent = f"operation {number}, {name}", folder / "root"
        shutil.copytree(folder / "template", parent)

        def save() -> None:
            with at_operation(number, kill):  # noqa: B023 (it runs at once)
                job.model.save_pretrained(parent / "model")  # noqa: B023

        assert in_child(save) is None
        found = {path.name: model_of(read(path)) for path in parent.iterdir()}
        assert found["model"] in models, case
        assert len(list(parent.rglob("notes"))) == 1, case
        assert list(parent.rglob("tokenizer.json")), case
        job.model.save_pretrained(parent / "model")
        assert model_of(read(parent / "model")) == models[1], case
        shutil.rmtree(parent)
    return len(kills)


def test_a_killed_save_pretrained_leaves_a_whole_model(tmp_path: Path) -> None:
    (kills,) = pool(1).run(_kill_everywhere, tmp_path)
    assert kills > 15


def _run_until_killed(job: SmallJob, root: Path) -> None:
    step, _ = job.load(root)
    while True:
        step += 1
        job.save(root, step, step, keep_last=2, keep_every=5)


def _killed_at_random_times(root: Path, times: int) -> list[int]:
    """The last step after each kill of a job that saves all the time, and is started again."""
    job, choose, last = SmallJob(px.init_mesh()), random.Random(9), [1]
    began = time.monotonic()
    job.save(root, 1, 1)
    job.load(root)
    seconds = time.monotonic() - began
    for _ in range(times):
        child = os.fork()
        if child == 0:
            try:
                _run_until_killed(job, root)
            finally:
                os._exit(1)
        time.sleep(choose.uniform(0, 6) * seconds)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the job failed by itself"
        step = px.verify_checkpoint(px.latest_checkpoint(root))
        assert job.load(root) == (step, step)
        last.append(step)
    return last


def test_a_job_that_is_killed_at_random_times_goes_on_each_time(tmp_path: Path) -> None:
    (last,) = pool(1).run(_killed_at_random_times, tmp_path, 20)
    assert last == sorted(last)
    assert last[-1] > 1
    steps = {int(path.name[5:]) for path in tmp_path.glob("step-*")}
    assert {step for step in steps if step % 5} <= set(range(last[-1] - 2, last[-1] + 2))
