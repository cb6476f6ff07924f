"""A soak: jobs that are killed, stopped, starved and cut at random, and resume on other layouts.

``python tests/support/soak.py --faults 200 --steps 1000 --seed 1`` (or ``make soak``) trains rounds
of a few steps until so many faults have happened in so many steps. After each attempt a single
process loads the last checkpoint, which must hold the weights that a training without faults has at
its step. ``--seed`` draws the same models, layouts and faults again; when a fault strikes depends
on the machine too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

if __name__ == "__main__":  # else tests/conftest.py has done so
    own = [str(each) for each in Path(__file__).parents[1].iterdir() if each.is_dir()]
    sys.path[:0] = own
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from disk_faults import at_operation, full  # noqa: E402
from hosts import Hosts, two_hosts, why_no_hosts  # noqa: E402
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
    with_adapter,
)

import parallel_ext as px  # noqa: E402

STEPS = 12  # of a round, after which rounding has not grown to what a fault would do
TIMEOUT_S = 6.0
LONGEST_S = 3 * TIMEOUT_S + 40.0  # until the ranks that live have ended; without a fault, the job
TOLERANCE = 1e-9
CUT = "cut cable"  # between two hosts of half of the ranks each; no other fault needs hosts
FAULTS = ("kill one", "kill all", "term", "stop", "disk full", CUT, "none")
_LATE = re.compile("within|[Tt]imed out")  # in the error of an op on a machine that was slow
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


def faults_here() -> list[str]:
    """Return the faults that this machine can have."""
    return [fault for fault in FAULTS if fault != CUT or not why_no_hosts()]


def attempt_of(draw: random.Random, job: Job) -> Attempt:
    """Draw an attempt to train a job, on another layout."""
    fault = draw.choice(faults_here())
    world = draw.choice([2, 4]) if fault == CUT else draw.randint(1, 4)
    layout = draw.choice(list(layouts_of(world)))
    if job.tiny is LLAMA:
        layout = replace(layout, ep=1)
    zero = draw.choice([2, 3]) if layout.dp > 1 else None
    at = draw.randrange(_MOST_OPERATIONS) if fault == "disk full" else draw.uniform(0, 0.5)
    every, rank, after = draw.randint(1, 3), draw.randrange(world), draw.randrange(6)
    job = replace(job, layout=layout, zero=zero)
    return Attempt(job, every, draw.random() < 0.5, fault, rank, after, at)


def _mark(root: Path, rank: int, steps: int) -> Path:
    """Return the file that a rank makes when it has taken so many steps of an attempt."""
    return root.with_name(f"rank-{rank}-steps-{steps}")


def run_job(attempt: Attempt, root: Path) -> int:
    """Train from the last checkpoint to the end of the round, on a rank; return the last step."""
    warnings.simplefilter("ignore")  # of other layouts, random numbers, and saves that fail
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    layout = attempt.job.layout
    own = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
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
    """One model, or an adapter on it, trained to its end by as many attempts as that takes."""

    def __init__(self, job: Job, root: Path, report: Report) -> None:
        self._root, self._report, self._job = root, report, job
        self._states = self._without_faults()
        self.step = 0

    def _without_faults(self) -> list[dict[str, torch.Tensor]]:
        """Return the weights of one process before and after each step."""
        model = self._job.tiny.model()
        if self._job.lora:
            model = with_adapter(model, self._job.tiny)
        optimizer = optimizer_of(model, "AdamW")
        scheduler = scheduler_of(optimizer)
        states = []
        for step in range(STEPS + 1):
            states.append({n: p.detach().clone() for n, p in model.named_parameters()})
            one_step(model, optimizer, scheduler, batch(model.config.vocab_size, 4, 6, step))
        return states

    def run(self, attempt: Attempt) -> None:
        """Start the job, let the fault happen, wait until it has ended, and look what is there."""
        with ExitStack() as cleanup:
            world, hosts = attempt.job.layout.world, None
            if attempt.fault == CUT:
                hosts = Hosts(cleanup.enter_context(two_hosts()), world // 2)
            ranks = Ranks(world, hosts)
            cleanup.callback(ranks.close)
            ranks._start()
            for pipe in ranks.pipes:
                pipe.send((_catching, (run_job, attempt, self._root)))
            struck = self._strike(attempt, ranks)
            began = time.monotonic()
            self._await(attempt, ranks, struck, began)
        for mark in self._root.parent.glob("rank-*"):
            mark.unlink()
        self._look(attempt)

    def _strike(self, attempt: Attempt, ranks: Ranks) -> list[int] | None:
        """Let a fault from outside happen; return which ranks it ends, or None if it did not."""
        number = {"kill one": signal.SIGKILL, "kill all": signal.SIGKILL}.get(attempt.fault)
        number = {"term": signal.SIGTERM, "stop": signal.SIGSTOP}.get(attempt.fault, number)
        if number is None and attempt.fault != CUT:
            return None
        marks = [_mark(self._root, rank, attempt.after) for rank in range(ranks.size)]
        end = time.monotonic() + LONGEST_S
        while not all(mark.exists() for mark in marks):
            if any(pipe.poll() for pipe in ranks.pipes):
                return None  # the job was shorter
            if time.monotonic() > end:
                return None  # it hangs already, which is noticed then
            time.sleep(0.02)
        time.sleep(attempt.at)
        one = attempt.fault not in ("kill all", CUT)
        struck = [attempt.rank] if one else list(range(ranks.size))
        if any(ranks.pipes[rank].poll() for rank in struck):
            return None  # the job was faster
        self._report.faults[attempt.fault] += 1
        if attempt.fault == CUT:
            ranks.hosts.hosts[1].link("down")
            return []
        for rank in struck:
            os.kill(ranks.processes[rank].pid, number)
        return struck

    def _await(
        self, attempt: Attempt, ranks: Ranks, struck: list[int] | None, began: float
    ) -> None:
        """Wait until the ranks that live have ended, as they must."""
        living = [rank for rank in range(ranks.size) if rank not in (struck or [])]
        for rank in living:
            left = began + LONGEST_S - time.monotonic()
            if not ranks.pipes[rank].poll(max(0.0, left)):
                self._report.problems.append(f"rank {rank} hangs in {attempt}")
                return
            _, result = ranks.pipes[rank].recv()
            if not isinstance(result, Raised) or rank != living[0] or struck is not None:
                continue
            if attempt.fault == "disk full":
                self._report.faults["disk full"] += 1
            elif "CollectiveTimeout" in result.classes or _LATE.search(result.text):
                self._report.faults["too slow"] += 1
            else:
                self._report.problems.append(f"{result} without a fault in {attempt}")
        self._report.longest_s = max(self._report.longest_s, time.monotonic() - began)

    def _look(self, attempt: Attempt) -> None:
        """Compare the last checkpoint with the training without faults."""
        path = px.latest_checkpoint(self._root)
        if path is None:
            if self.step:
                self._report.problems.append(f"step {self.step} is lost after {attempt}")
            return
        model, optimizer, scheduler, _ = build(self._job, seed=3)
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


def soak(seed: int, faults: int, steps: int, seconds: float = float("inf")) -> Report:
    """Run attempts until there were so many faults and steps, or one and the seconds are over.

    Stops at the first problem.
    """
    draw, report, end = random.Random(seed), Report(), time.monotonic() + seconds

    def goes_on() -> bool:
        wanted = report.faults.total() < faults or report.steps < steps
        late = time.monotonic() >= end and report.faults.total() > 0
        return wanted and not late and not report.problems

    while goes_on():
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            job = Job(draw.choice([LLAMA, MIXTRAL]), lora=draw.random() < 0.5)
            one = Round(job, Path(folder) / "root", report)
            while one.step < STEPS and goes_on():
                one.run(attempt_of(draw, job))
            report.rounds += one.step == STEPS
            print(f"seed {seed}: {report}", flush=True)
    return report


def main() -> None:
    """Run a soak as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if why_not := why_no_hosts():
        print(f"without the fault {CUT!r}, which needs two hosts of namespaces: {why_not}")
    report = soak(arguments.seed, arguments.faults, arguments.steps, arguments.seconds)
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    from soak import main  # whose functions the ranks find by this name

    main()
