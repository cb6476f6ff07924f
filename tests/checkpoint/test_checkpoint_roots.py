"""Who may save into a root, which steps stay there, and that all is written through one layer."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import warnings
from io import FileIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from disk_faults import SmallJob, in_child
from ranks import pool

import parallel_ext as px
from parallel_ext.checkpoint import lock, steps
from parallel_ext.checkpoint.lock import one_writer
from parallel_ext.checkpoint.manifest import Manifest
from parallel_ext.checkpoint.steps import steps_to_remove
from parallel_ext.io import disk

# One writer.


def test_a_second_writer_raises_who_is_there(tmp_path: Path) -> None:
    holder = f"process {os.getpid()} on .* since 20..-"
    with one_writer(tmp_path):
        for _ in range(2):
            with pytest.raises(px.CheckpointError, match=holder), one_writer(tmp_path):
                pass
        assert in_child(lambda: one_writer(tmp_path).__enter__()) == 1
    assert list(tmp_path.iterdir()) == []
    with one_writer(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def _save_twice(root: Path) -> None:
    """Only rank 0 holds the lock, but all ranks are refused."""
    job = SmallJob(px.init_mesh(tp=2))
    job.save(root, 1, 1)
    if job.mesh.rank == 0:
        with one_writer(root):
            job.save(root, 2, 2)
    else:
        job.save(root, 2, 2)


def test_all_ranks_of_a_second_writer_are_refused(tmp_path: Path) -> None:
    pool(2).assert_raises(_save_twice, tmp_path, words="another save is going on there, by process")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000001"]


def _hold_until_killed(root: Path) -> None:
    with one_writer(root):
        (root / "held").touch()
        time.sleep(60)


def _killed_holder(root: Path) -> str:
    child = os.fork()
    if child == 0:
        try:
            _hold_until_killed(root)
        finally:
            os._exit(1)
    while not (root / "held").exists():
        time.sleep(0.01)
    with pytest.raises(px.CheckpointError, match=f"process {child} "), one_writer(root):
        pass
    os.kill(child, 9)
    os.waitpid(child, 0)
    left = (root / ".lock").read_text()
    with one_writer(root):
        return left


def test_a_dead_holder_blocks_nobody(tmp_path: Path) -> None:
    (left,) = pool(1).run(_killed_holder, tmp_path)
    assert left.startswith("process ")
    assert not (tmp_path / ".lock").exists()


def _leave_a_child(root: Path) -> None:
    with one_writer(root):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        (root / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_of_a_dead_holder_blocks_nobody(tmp_path: Path) -> None:
    assert in_child(lambda: _leave_a_child(tmp_path)) is None, "it was killed"
    child = int((tmp_path / "child").read_text())
    try:
        with one_writer(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("left", ["", "process 1 on anoth", "\0\0\0\0"])
def test_a_lock_that_was_never_complete_blocks_nobody(left: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(left)
    with mock.patch.object(lock, "_watch", side_effect=AssertionError), one_writer(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_holder_elsewhere_counts_as_long_as_it_touches_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of another machine is not asked here: its holder has not locked the file."""
    monkeypatch.setattr(lock, "_BEAT_S", 0.05)
    monkeypatch.setattr(lock, "_WATCH_S", 1.0)
    monkeypatch.setattr(lock, "_lock", lambda *_: True)
    with one_writer(tmp_path):
        monkeypatch.setattr(lock, "machine", lambda: "another")
        with (
            pytest.raises(px.CheckpointError, match=f"process {os.getpid()} "),
            one_writer(tmp_path),
        ):
            pass
    (tmp_path / ".lock").write_text("process 7 on a-host (its-boot-id) since then\n")
    with pytest.warns(UserWarning, match="the lock of 'process 7 on a-host"), one_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_for_a_moment_does_not_end_the_touching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched, calls = threading.Event(), []

    def touch(file: FileIO) -> None:
        calls.append(file)
        if len(calls) < 3:
            raise OSError(errno.EIO, "Input/output error")
        touched.set()

    monkeypatch.setattr(lock, "_BEAT_S", 0.01)
    monkeypatch.setattr(lock.disk, "touch", touch)
    with pytest.warns(UserWarning, match="cannot be touched") as warned, one_writer(tmp_path):
        assert touched.wait(10)
    assert len(warned) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_file_system_without_locks_lets_nobody_in_twice(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_BEAT_S", 0.05)
    monkeypatch.setattr(lock, "_WATCH_S", 1.0)
    number = errno.ENOLCK if not known else errno.EIO
    monkeypatch.setattr(lock.fcntl, "flock", mock.Mock(side_effect=OSError(number, "no")))
    if known:
        with pytest.raises(OSError, match="no"), one_writer(tmp_path):
            pass
        return
    with (
        one_writer(tmp_path),
        pytest.raises(px.CheckpointError, match="another save"),
        one_writer(tmp_path),
    ):
        pass
    with one_writer(tmp_path):
        pass


# Which steps stay.


def test_the_steps_that_stay_are_those_asked_for() -> None:
    numbers = {0: 1, 5: 2, 10: 3, 40: 4, 15: 5, 20: 6, 25: 7}  # back to 10 after 40
    assert steps_to_remove(numbers, None, None) == []
    assert steps_to_remove(numbers, 1, None) == [0, 5, 10, 40, 15, 20]
    assert steps_to_remove(numbers, 3, None) == [0, 5, 10, 40]
    assert steps_to_remove(numbers, 3, 10) == [5]
    assert steps_to_remove(numbers, 9, None) == []
    assert steps_to_remove({25: 1}, 1, None) == []


def test_after_going_back_the_steps_that_were_given_up_go_first(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    for step in (10, 20, 30, 15, 25):
        job.save(tmp_path, step, step, keep_last=2)
    assert _steps(tmp_path) == [15, 25]
    (tmp_path / "step-00000015" / "COMMIT").write_text("damaged")  # nobody knows whose it is
    job.save(tmp_path, 35, 35, keep_last=1)
    assert _steps(tmp_path) == [15, 35]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"keep_last": 0}, "keep_last must be a whole number from 1 on, or None, got 0"),
        ({"keep_last": True}, "keep_last must be a whole number from 1 on, or None, got True"),
        ({"keep_last": 2, "keep_every": 2.0}, "keep_every must be .* got 2.0"),
        ({"keep_every": 5}, "keep_every=5 says which .* pass keep_last too"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    keep: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(px.CheckpointError, match=message):
        SmallJob(px.init_mesh()).save(tmp_path / "root", 1, 1, **keep)
    assert not (tmp_path / "root").exists()


def _keep_by_rank(root: Path) -> None:
    job = SmallJob(px.init_mesh(tp=2))
    job.save(root, 1, 1, keep_last=1 + job.mesh.rank)


def test_ranks_that_keep_different_steps_are_refused(tmp_path: Path) -> None:
    for raised in pool(2).run_raising(_keep_by_rank, tmp_path):
        assert "DisagreementError" in raised.classes
        assert "keep_last must be equal on all ranks, but is " in raised.text


def _steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_old_steps_are_removed_and_the_last_never(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    for step in range(1, 8):
        job.save(tmp_path, step, step, keep_last=2, keep_every=3)
    assert _steps(tmp_path) == [3, 6, 7]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "step-00000003").rename(elsewhere / "three")
    (tmp_path / "step-00000003").symlink_to(elsewhere / "three")  # not ours to remove
    (tmp_path / "step-00000001").mkdir()  # no checkpoint
    job.save(tmp_path, 8, 8, keep_last=1)
    assert _steps(tmp_path) == [1, 3, 8]
    assert px.verify_checkpoint(elsewhere / "three") == 3
    assert px.verify_checkpoint(px.latest_checkpoint(tmp_path)) == 8


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    job.save(tmp_path, 1, 1)
    with (
        mock.patch.object(disk, "remove_tree", side_effect=OSError(errno.EIO, "broken")),
        pytest.warns(
            UserWarning, match=r"\.trash-step-00000001-.* could not be removed: .*Errno 5"
        ),
    ):
        job.save(tmp_path, 2, 2, keep_last=1)
    assert _steps(tmp_path) == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.save(tmp_path, 3, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LATEST",
        "step-00000002",
        "step-00000003",
    ]


# A step that is there already.


def test_only_the_last_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    for step in (1, 2, 3):
        job.save(tmp_path, step, step)
    with pytest.raises(px.CheckpointError, match="step-00000003 is there already, and is the last"):
        job.save(tmp_path, 3, 33)
    job.save(tmp_path, 2, 22)  # the run was given up for step 1
    assert job.load(tmp_path) == (2, 22)
    job.save(tmp_path, 3, 33)
    assert job.load(tmp_path) == (3, 33)
    assert _steps(tmp_path) == [1, 2, 3]


def test_without_latest_the_last_save_counts(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    for step in (1, 2):
        job.save(tmp_path, step, step)
    (tmp_path / "LATEST").unlink()
    with pytest.raises(px.CheckpointError, match="step-00000002 is there already, and is the last"):
        job.save(tmp_path, 2, 22)
    job.save(tmp_path, 1, 11)
    (tmp_path / "LATEST").unlink()
    assert job.load(tmp_path) == (1, 11)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    job.save(tmp_path, 1, 1)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000003").symlink_to("step-00000001")
    for step in (2, 3):
        with pytest.raises(
            px.CheckpointError, match=f"{step} is there already, and is no training"
        ):
            job.save(tmp_path, step, step)


def test_a_root_has_a_name() -> None:
    with pytest.raises(px.CheckpointError, match="root is empty"):
        SmallJob(px.init_mesh()).save("", 1, 1)


def test_a_step_is_no_root(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    job.save(tmp_path, 1, 1)
    words = f"step-00000001 is a checkpoint of one step, .*; pass the root of all steps, {tmp_path}"
    with pytest.raises(px.CheckpointError, match=words):
        job.save(tmp_path / "step-00000001", 2, 2)
    assert job.load(tmp_path) == (1, 1)


def test_a_process_that_looks_on_never_finds_a_step_that_was_just_removed(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    job.save(tmp_path, 1, 1)
    manifest_of_step, saved = steps.manifest_of_step, []

    def meanwhile(path: Path) -> Any:
        if not saved:
            saved.append(2)
            px.save_checkpoint(tmp_path, 2, job.model, job.optimizer, keep_last=1)
        return manifest_of_step(path)

    with mock.patch.object(steps, "manifest_of_step", meanwhile):
        assert px.latest_checkpoint(tmp_path).name == "step-00000002"
    assert px.verify_checkpoint(tmp_path / "step-00000002") == 2


def test_a_step_that_is_removed_while_it_is_read_is_named(tmp_path: Path) -> None:
    SmallJob(px.init_mesh()).save(tmp_path, 1, 1)
    path, check_names = tmp_path / "step-00000001", Manifest.check_names

    def meanwhile(manifest: Manifest, directory: Path) -> None:
        path.rename(tmp_path / "elsewhere")
        check_names(manifest, directory)

    with (
        mock.patch.object(Manifest, "check_names", meanwhile),
        pytest.raises(px.CheckpointError, match="step-00000001: cannot be read: .*No such file"),
    ):
        px.verify_checkpoint(path)


def test_a_last_checkpoint_that_was_removed_is_named(tmp_path: Path) -> None:
    job = SmallJob(px.init_mesh())
    for step in (1, 2):
        job.save(tmp_path, step, step)
    disk.remove_tree(tmp_path / "step-00000002")
    message = "LATEST names step-00000002, but there is no such directory; load a step by its"
    with pytest.raises(px.CheckpointError, match=message):
        px.latest_checkpoint(tmp_path)
    job.save(tmp_path, 2, 22)
    assert job.load(tmp_path) == (2, 22)


# One layer.

CHANGES = {"mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod", "utime"}


def _changes_past_the_layer(root: Path, found: Path, what: str) -> None:
    """Note every change below ``root`` that is not made by disk.py; in a process that ends then."""
    job = SmallJob(px.init_mesh())
    seen: list[str] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event.removeprefix("os.") in CHANGES
        if not changes:
            return
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.append(os.path.basename(frame.f_code.co_filename))
            frame = frame.f_back
        named = [os.fsdecode(a) for a in args[: 1 + (event != "open")] if not isinstance(a, int)]
        inside = any(name.startswith(str(root)) for name in named)
        in_folder = any(not os.path.isabs(name) for name in named) and "tempfile.py" not in files
        if (inside or in_folder) and "disk.py" not in files:
            seen.append(f"{event} {named} by {files[:4]}")

    with mock.patch.object(lock, "_BEAT_S", 0.001):
        sys.addaudithook(audit)
        for number in (1, 2, 3):
            if what == "save_checkpoint":
                job.save(root, number, number, keep_last=1)
            else:
                job.model.save_pretrained(root / "plain")
                (root / "plain" / "folder").mkdir(exist_ok=True)
                (root / "plain" / "tokenizer.json").write_text("{}")
    found.write_text("\n".join(seen))


@pytest.mark.parametrize("what", ["save_checkpoint", "save_pretrained"])
def test_all_changes_of_a_save_go_through_one_layer(what: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    (status,) = pool(1).run(_in_child, tmp_path / "root", found, what)
    assert status == 0
    seen = [line for line in found.read_text().splitlines() if "test_checkpoint_roots" not in line]
    assert seen == []


def _in_child(*args: Any) -> int | None:
    return in_child(lambda: _changes_past_the_layer(*args))
