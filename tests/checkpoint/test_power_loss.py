"""A loss of power during a save leaves the checkpoint before it or its own, whatever is durable."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import power_loss
import pytest
from disk_faults import SmallJob
from power_loss import Operation, recording
from ranks import pool
from test_crashes import model_of, used_directory, used_root

import parallel_ext as px

NEW = 30
Mutation = Callable[[list[Operation]], list[Operation]]


def _record(root: Path, used: bool) -> tuple[list[Operation], Any]:
    """Both ranks save step 3."""
    job = SmallJob(px.init_mesh(tp=2))
    if used:
        used_root(root, job)
    job.mesh.control.all_gather_object(None)
    before = power_loss.read(root.parent)
    job.mesh.control.all_gather_object(None)
    with recording() as log:
        job.save(root, 3, NEW, keep_last=2)
    return log, before


def _problem(root: Path, last: Any, new: Any, others: list[Any]) -> str | None:
    """What is wrong with a root after a loss of power.

    Args:
        root: of the checkpoints.
        last, new: what their directories must hold; ``last`` is None if there was none, ``new`` if
            nothing else will do.
        others: what other directories of steps may hold.
    """
    try:
        found = px.latest_checkpoint(root)
        if found is None:
            return "no checkpoint is found" if last else None
        px.verify_checkpoint(found)
    except px.CheckpointError as error:
        return f"an error is raised: {error}"
    if power_loss.read(found) not in (last, new):
        return f"{found} is found, which is neither the last nor the new one"
    for path in root.glob("step-*"):
        try:
            px.verify_checkpoint(path)
        except px.CheckpointError:
            continue
        if power_loss.read(path) not in (last, new, *others):
            return f"{path} has changed, and passes for whole"
    return None


def _problems(
    base: Path, before: dict[str, Any], log: list[Operation], seed: int = 3
) -> Iterator[str]:
    """What is wrong with what the disk may hold during a log, and after it, drawn from a seed."""
    disk = power_loss.Disk(base, before)
    for operation in log:
        disk.apply(operation)
    new = disk.entries()["root"]["step-00000003"]
    others = list(before.get("root", {}).values())
    last = before["root"]["step-00000002"] if others else None
    state = base.parent / "state"
    seen = set()
    for number, where, entries in power_loss.states(base, before, log, seed):
        done = number == len(log)
        content = (done, pickle.dumps(entries))
        if content in seen:
            continue
        seen.add(content)
        power_loss.put(state, entries)
        problem = _problem(state / "root", new if done else last, new, others)
        shutil.rmtree(state)
        if problem:
            yield f"{where}: {problem}"


Recorded = tuple[Path, dict[str, Any], list[Operation]]


@pytest.fixture(scope="module", params=["new_root", "used_root"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A directory, what it held before two ranks saved there, and what they did."""
    base = tmp_path_factory.mktemp("power") / "base"
    base.mkdir()
    (first, before), (second, _) = pool(2).run(_record, base / "root", request.param == "used_root")
    return base, before, sorted(first + second)


def test_the_last_or_the_new_checkpoint_is_whole(recorded: Recorded) -> None:
    assert len(recorded[2]) > 80
    problems = list(_problems(*recorded))
    assert not problems, "\n".join(problems[:5])


def _without(name: str, is_directory: bool) -> Mutation:
    def mutate(log: list[Operation]) -> list[Operation]:
        files = {each.other or each.path for each in log if each.name in ("create", "link")}
        return [e for e in log if e.name != name or (e.path in files) == is_directory]

    return mutate


def _is_publication(operation: Operation) -> bool:
    return operation.name == "rename" and operation.path.name.startswith(".tmp-")


def _published_before(name: str) -> Mutation:
    """The step gets its name before the operation of this name that precedes that."""

    def mutate(log: list[Operation]) -> list[Operation]:
        place = next(n for n, each in enumerate(log) if _is_publication(each))
        old, new = log[place].path, log[place].other
        # On a slow machine the lock's beat is written in between.
        sooner = max(n for n in range(place) if log[n].name == name and old in log[n].path.parents)
        renames = [each for each in log[sooner : place + 1] if each.name == "rename"]
        late = [
            each._replace(path=new / each.path.relative_to(old))
            for each in log[sooner:place]
            if each.name != "rename"
        ]
        return [*log[:sooner], *renames, *late, *log[place + 1 :]]

    return mutate


def _named_before_published(log: list[Operation]) -> list[Operation]:
    """LATEST is replaced before the step has its name."""
    place = next(n for n, each in enumerate(log) if _is_publication(each))
    last = next(n for n, each in enumerate(log) if each.other and each.other.name == "LATEST")
    return [*log[:place], *log[place + 1 : last + 1], log[place], *log[last + 1 :]]


MUTATIONS: dict[str, Mutation] = {
    "no fsync of files": _without("sync", False),
    "no fsync of directories": _without("sync", True),
    "published before COMMIT is written": _published_before("write"),
    "LATEST replaced before the step has its name": _named_before_published,
}


@pytest.mark.parametrize("recorded", ["new_root"], indirect=True)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_test_above_notices(mutation: str, recorded: Recorded) -> None:
    base, before, log = recorded
    broken = MUTATIONS[mutation](log)
    # A window may be one operation wide; a few states drawn inside may all be harmless.
    assert any(next(_problems(base, before, broken, seed), None) for seed in range(20))


def _record_plain(parent: Path) -> tuple[list[Operation], Any]:
    job = SmallJob(px.init_mesh())
    used_directory(parent / "model", job)
    before = power_loss.read(parent)
    job.fill(2)
    with recording() as log:
        job.model.save_pretrained(parent / "model")
    return log, before


def _lost_models(
    base: Path, before: dict[str, Any], log: list[Operation], seed: int = 3
) -> Iterator[str]:
    """Where no whole model is after ``save_pretrained``, on a disk that keeps renames in order."""
    disk = power_loss.Disk(base, before)
    for operation in log:
        disk.apply(operation)
    models = [model_of(entries["model"]) for entries in (before, disk.entries())]
    for number, where, entries in power_loss.states(base, before, log, seed):
        if where.endswith("in no order"):
            continue
        place = [entries[name] for name in entries if name == "model"]
        place += [entries[name] for name in entries if ".old-" in name]
        if not place or model_of(place[0]) not in models[number == len(log) :]:
            yield where


def test_save_pretrained_leaves_a_whole_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    ((log, before),) = pool(1).run(_record_plain, base)
    assert list(_lost_models(base, before, log)) == []
    for mutation in ("no fsync of files", "no fsync of directories"):
        broken = MUTATIONS[mutation](log)
        found = (next(_lost_models(base, before, broken, seed), None) for seed in range(20))
        assert any(found), mutation
