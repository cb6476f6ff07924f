"""One of two ranks is killed in a save, or its disk fails: the other names it, and continues."""

from __future__ import annotations

import shutil
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from disk_faults import SmallJob, at_operation, broken, full, kill
from ranks import Raised, Ranks, pool
from test_crashes import NEVER, QUICK_DISK, different

import parallel_ext as px

TIMEOUT_S = 4.0


def _operations(template: Path, root: Path) -> list[str]:
    job = SmallJob(px.init_mesh(tp=2))
    for step in (1, 2):
        job.save(template, step, step)
        job.save(root, step, step)
    with at_operation(NEVER, kill) as operations:
        job.save(root, 3, 3, keep_last=2)
    return list(operations)


@QUICK_DISK
def _fail_everywhere(root: Path) -> list[int]:
    """The disk of a rank fails in each of its operations in turn; the last step after each."""
    mesh = px.init_mesh(tp=2)
    job = SmallJob(mesh)
    job.save(root, 1, 1)
    job.save(root, 2, 2)
    with at_operation(NEVER, kill) as operations:
        job.save(root, 3, 3, keep_last=2)
    own = [(mesh.rank, number) for number, _ in different(operations)]
    last, found = 3, []
    for guilty, number in [
        case for of_rank in mesh.control.all_gather_object(own) for case in of_rank
    ]:
        case = f"operation {number} of rank {guilty}"
        action, sticky = (full, False) if number % 2 else (broken, True)
        raised: Exception | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what could not be removed
            try:
                with at_operation(number if mesh.rank == guilty else NEVER, action, sticky):
                    job.save(root, last + 1, last + 1, keep_last=2)
            except (OSError, RuntimeError) as error:
                raised = error
        if raised is not None and mesh.rank != guilty:
            assert f"failed on rank {guilty}: OSError" in str(raised), case
        assert len(set(mesh.control.all_gather_object(raised is None))) == 1, case
        step, values = job.load(root)
        assert step == values, case
        assert step == last + 1 or (raised is not None and step == last), case
        last = step
        found.append(last)
    job.save(root, last + 1, last + 1, keep_last=2)
    px.verify_checkpoint(root / f"step-{last + 1:08}")
    dist.barrier()  # rank 0 gives the lock back after the save, for which the others do not wait
    names = {path.name for path in root.iterdir()}
    assert names == {"LATEST", f"step-{last + 1:08}", f"step-{last:08}"}, names
    return found


def test_both_ranks_raise_what_the_disk_of_one_raises(tmp_path: Path) -> None:
    first, second = pool(2).run(_fail_everywhere, tmp_path)
    assert first == second
    assert len(first) > 50
    assert 4 < first[-1] < 20


def _save_and_die(lost: int, number: int, root: Path) -> None:
    dist.barrier()  # the ranks may start seconds apart
    job = SmallJob(px.init_mesh(tp=2, timeout=TIMEOUT_S))
    begin = time.monotonic()
    try:
        with QUICK_DISK, at_operation(number if job.mesh.rank == lost else NEVER, kill):
            job.save(root, 3, 3, keep_last=2)
    except px.CollectiveTimeout as error:
        raise px.CollectiveTimeout(f"{error} [{time.monotonic() - begin:.1f} s]") from error


def _go_on(roots: list[Path]) -> list[tuple[int, int]]:
    """The step that is found under each root, and the one that is saved next."""
    job, steps = SmallJob(px.init_mesh(tp=2)), []
    for root in roots:
        step, values = job.load(root)
        assert step == values
        job.save(root, step + 1, step + 1, keep_last=2)
        steps.append((step, job.load(root)[0]))
    return steps


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named_and_the_job_goes_on(
    everywhere: bool, tmp_path: Path
) -> None:
    first, second = pool(2).run(_operations, tmp_path / "template", tmp_path / "counted")
    first.pop()  # it gives the lock back, after the save
    if everywhere:
        of_each = [[number for number, _ in different(names)] for names in (first, second)]
    else:
        renames = [number for number, name in enumerate(first) if name == "rename"]
        of_each = [[2, *renames[:2], len(first) - 1], [0, len(second) // 2, len(second) - 1]]
    cases = [(rank, number) for rank in (0, 1) for number in of_each[rank]]
    roots = [tmp_path / f"{lost}-{number}" for lost, number in cases]
    for root in roots:
        shutil.copytree(tmp_path / "template", root)
    pools = [Ranks(2) for _ in cases]
    with ThreadPoolExecutor(5) as threads:  # most of the time is waiting
        lives = [
            threads.submit(ranks.run_losing, lost, _save_and_die, lost, number, root)
            for ranks, (lost, number), root in zip(pools, cases, roots, strict=True)
        ]
        survivors = [life.result()[0] for life in lives]
    for (lost, number), survivor in zip(cases, survivors, strict=True):
        case = f"rank {lost}, operation {number}: {survivor}"
        assert isinstance(survivor, Raised), case
        assert survivor.type == "CollectiveTimeout", case
        assert f"rank {lost}" in survivor.text, case
        assert float(survivor.text.rsplit("[", 1)[1].removesuffix(" s]")) < TIMEOUT_S + 5, case
    results = pool(2).run(_go_on, roots)
    assert results[0] == results[1]
    for case, (found, following) in zip(cases, results[0], strict=True):
        assert found in ((2, 3) if case[0] == 0 else (2,)), case
        assert following == found + 1
