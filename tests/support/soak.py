"""A soak: jobs that are killed, stopped and starved at random, and resume on other layouts.

``python tests/support/soak.py --faults 200 --seed 1`` (or ``make soak``) trains rounds of a few
steps until so many faults have happened. After each attempt a single process loads the last
checkpoint, which must hold the weights that a training without faults has at its step. ``--seed``
draws the same models, layouts and faults again; when a fault strikes depends on the machine too.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else tests/conftest.py has done so
    own = [str(each) for each in Path(__file__).parents[1].iterdir() if each.is_dir()]
    sys.path[:0] = own
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from disk_faults import at_operation, full  # noqa: E402
from ranks import Raised, Ranks, _catching  # noqa: E402
from reference import batch, shard_differences, worst  # noqa: E402
from reference_mixtral import layouts_of  # noqa: E402
from reference_training import (  # noqa: E402
    LLAMA,
    MIXTRAL,
    Job,
    build,
    one_step,
    optimizer_of,
    scheduler_of,
    train,
)

import parallel_ext as px  # noqa: E402

STEPS = 12  # of a round, after which rounding has not grown to what a fault would do
TIMEOUT_S = 6.0
LONGEST_S = 3 * TIMEOUT_S + 40.0  # until the ranks that live have ended; without a fault, the job
TOLERANCE = 1e-9
FAULTS = ("kill one", "kill all", "term", "stop", "disk full", "none")
_MOST_OPERATIONS = 60  # on the disk, in one of which it is full


@dataclass(frozen=True)
class Attempt:
    """One start of a job.

    Attributes:
        job: the model and its layout.
        every: how many steps lie between two saves.
        asynchronous: how it saves.
        fault: what happens to it.
        rank: to whom.
        after: how many steps of the attempt come before it; 0 is the start of the job.
        at: seconds after them, or the number of the operation on the disk.
    """

    job: Job
    every: int
    asynchronous: bool
    fault: str
    rank: int
    after: int
    at: float


def attempt_of(draw: random.Random, tiny: Any) -> Attempt:
    """Draw an attempt."""
    world = draw.randint(1, 4)
    layout = draw.choice(list(layouts_of(world)))
    if tiny is LLAMA:
        layout = replace(layout, ep=1)
    zero = draw.choice([2, 3]) if layout.dp > 1 else None
    fault = draw.choice(FAULTS)
    at = draw.randrange(_MOST_OPERATIONS) if fault == "disk full" else draw.uniform(0, 0.5)
    every, rank, after = draw.randint(1, 3), draw.randrange(world), draw.randrange(6)
    return Attempt(Job(tiny, layout, zero), every, draw.random() < 0.5, fault, rank, after, at)


def _mark(root: Path, rank: int, steps: int) -> Path:
    """Return the file that a rank makes when it has taken so many steps of an attempt."""
    return root.with_name(f"rank-{rank}-steps-{steps}")


def run_job(attempt: Attempt, root: Path) -> int:
    """Train from the last checkpoint to the end of the round, on a rank; return the last step."""
    warnings.simplefilter("ignore")  # of other layouts, random numbers, and saves that fail
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    layout, own = attempt.job.layout, dist.get_rank()
    _mark(root, own, 0).touch()
    mesh = px.init_mesh(tp=layout.tp, ep=layout.ep, timeout=TIMEOUT_S)
    model, optimizer, scheduler, _ = build(attempt.job, mesh=mesh)
    starved = attempt.fault == "disk full" and mesh.rank == attempt.rank
    with at_operation(int(attempt.at), full) if starved else nullcontext():
        step = steps = 0
        found = mesh.control.all_gather_object(str(px.latest_checkpoint(root) or ""))[0]
        if found:
            step = px.load_checkpoint(root, model, optimizer, scheduler).step
        while step < STEPS:
            train(model, optimizer, scheduler, mesh, range(step, step + 1))
            step, steps = step + 1, steps + 1
            _mark(root, own, steps).touch()
            if step % attempt.every == 0 or step == STEPS:
                px.save_checkpoint(
                    *(root, step, model, optimizer, scheduler),
                    keep_last=2,
                    asynchronous=attempt.asynchronous,
                )
        px.wait_for_checkpoint(model)
    return step


@dataclass
class Report:
    """What a soak has seen.

    Attributes:
        faults: that happened, by kind.
        steps: that rounds have come to.
        rounds: that were finished.
        longest_s: until all ranks that live had ended.
        worst: difference of weights from those of the single process.
        problems: attempts that hung, and checkpoints that are lost or wrong.
    """

    faults: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    rounds: int = 0
    longest_s: float = 0.0
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)


class Round:
    """One model, trained to its end by as many attempts as that takes."""

    def __init__(self, tiny: Any, root: Path, report: Report) -> None:
        self._root, self._report, self._tiny = root, report, tiny
        self._states = self._without_faults()
        self.step = 0

    def _without_faults(self) -> list[dict[str, torch.Tensor]]:
        """Return the weights of one process before and after each step."""
        model = self._tiny.model()
        optimizer = optimizer_of(model, "AdamW")
        scheduler = scheduler_of(optimizer)
        states = []
        for step in range(STEPS + 1):
            states.append({n: p.detach().clone() for n, p in model.named_parameters()})
            one_step(model, optimizer, scheduler, batch(model.config.vocab_size, 4, 6, step))
        return states

    def run(self, attempt: Attempt) -> None:
        """Start the job, let the fault happen, wait until it has ended, and look what is there."""
        ranks = Ranks(attempt.job.layout.world)
        ranks._start()
        try:
            for pipe in ranks.pipes:
                pipe.send((_catching, (run_job, attempt, self._root)))
            struck = self._strike(attempt, ranks)
            began = time.monotonic()
            self._await(attempt, ranks, struck, began)
        finally:
            ranks.close()
            for mark in self._root.parent.glob("rank-*"):
                mark.unlink()
        self._look(attempt)

    def _strike(self, attempt: Attempt, ranks: Ranks) -> list[int]:
        """Let a fault of a process happen, and return which ranks are lost by it."""
        number = {"kill one": signal.SIGKILL, "kill all": signal.SIGKILL}.get(attempt.fault)
        number = {"term": signal.SIGTERM, "stop": signal.SIGSTOP}.get(attempt.fault, number)
        if number is None:
            return []
        marks = [_mark(self._root, rank, attempt.after) for rank in range(ranks.size)]
        end = time.monotonic() + LONGEST_S
        while not all(mark.exists() for mark in marks):
            if any(pipe.poll() for pipe in ranks.pipes):
                return []  # the job was shorter
            if time.monotonic() > end:
                return []  # it hangs already, which is noticed then
            time.sleep(0.02)
        time.sleep(attempt.at)
        struck = list(range(ranks.size)) if attempt.fault == "kill all" else [attempt.rank]
        if any(ranks.pipes[rank].poll() for rank in struck):
            return []  # the job was faster
        for rank in struck:
            os.kill(ranks.processes[rank].pid, number)
        self._report.faults[attempt.fault] += 1
        return struck

    def _await(self, attempt: Attempt, ranks: Ranks, struck: list[int], began: float) -> None:
        """Wait until the ranks that live have ended, as they must."""
        living = [rank for rank in range(ranks.size) if rank not in struck]
        for rank in living:
            left = began + LONGEST_S - time.monotonic()
            if not ranks.pipes[rank].poll(max(0.0, left)):
                self._report.problems.append(f"rank {rank} hangs in {attempt}")
                return
            _, result = ranks.pipes[rank].recv()
            if not isinstance(result, Raised) or rank != living[0]:
                continue
            if attempt.fault == "disk full":
                self._report.faults["disk full"] += 1
            elif "CollectiveTimeout" in result.classes:  # the machine was slow
                self._report.faults["too slow"] += not struck
            elif not struck:
                self._report.problems.append(f"{result} without a fault in {attempt}")
        self._report.longest_s = max(self._report.longest_s, time.monotonic() - began)

    def _look(self, attempt: Attempt) -> None:
        """Compare the last checkpoint with the training without faults."""
        path = px.latest_checkpoint(self._root)
        if path is None:
            if self.step:
                self._report.problems.append(f"step {self.step} is lost after {attempt}")
            return
        model, optimizer, scheduler, _ = build(Job(self._tiny), seed=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = px.load_checkpoint(self._root, model, optimizer, scheduler).step
        if step < self.step:
            self._report.problems.append(f"step {self.step} went back to {step} after {attempt}")
        error, name = worst(shard_differences(model, self._states[step], False))
        self._report.worst = max(self._report.worst, error)
        if not error <= TOLERANCE:
            self._report.problems.append(f"{name} of {path} differs by {error:.1e} after {attempt}")
        self._report.steps += step - self.step
        self.step = step


def soak(seed: int, faults: int, seconds: float = float("inf")) -> Report:
    """Run attempts until there were so many faults, or so many seconds are over.

    Stops at the first problem.
    """
    draw, report, end = random.Random(seed), Report(), time.monotonic() + seconds
    while report.faults.total() < faults and time.monotonic() < end and not report.problems:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            one = Round(draw.choice([LLAMA, MIXTRAL]), Path(folder) / "root", report)
            while one.step < STEPS and time.monotonic() < end and not report.problems:
                if report.faults.total() >= faults:
                    return report
                one.run(attempt_of(draw, one._tiny))
            report.rounds += one.step == STEPS
    return report


def main() -> None:
    """Run a soak as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    report = soak(arguments.seed, arguments.faults, arguments.seconds)
    print(f"seed {arguments.seed}: {report}")
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    from soak import main  # whose functions the ranks find by this name

    main()
