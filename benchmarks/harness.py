"""What the benchmarks share: options, rank processes, fair timing, memory, profiles, tables."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

import parallel_ext as px

T = TypeVar("T")

PAGES = Path(__file__).parents[1] / "docs" / "benchmarks"

_BLOCK_BYTES = "1000000000"  # no block of a benchmark is larger
MALLOC_MODES: dict[str, dict[str, str]] = {
    "default": {},
    "tuned": {"MALLOC_MMAP_THRESHOLD_": _BLOCK_BYTES, "MALLOC_TRIM_THRESHOLD_": _BLOCK_BYTES},
}
"""Environment of the rank processes: glibc as it is, or set to keep what was freed."""

_QUIET = 0.03  # a round counts as undisturbed when others used less of the machine
# Functional collectives call the process group beneath, which the profiler shows under c10d too.
_COLLECTIVES, _NO_COLLECTIVES = "c10d::", ("barrier", "barrier_")
_RESULT_VARIABLE = "PARALLEL_EXT_BENCHMARK_RESULT"
_SMALLEST_VARIABLE = "PARALLEL_EXT_BENCHMARK_SMALLEST"

SMALLEST = "--smallest" in sys.argv or _SMALLEST_VARIABLE in os.environ
"""Whether all is to run once at sizes that take a moment, to see that it runs."""


def size(usual: T, smallest: T) -> T:
    """Choose the usual size, or the one that ``--smallest`` asks for."""
    return smallest if SMALLEST else usual


# What a benchmark is asked, and what all of its competitors load.


def parser(
    description: str | None, repetitions: int, *, malloc: bool = True
) -> argparse.ArgumentParser:
    """Return the options that all benchmarks have, ``malloc`` those on the CPU.

    ``repetitions`` is the default of that option.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if malloc:
        of_malloc = size("all", "default")
        options.add_argument("--malloc", choices=[*MALLOC_MODES, "all"], default=of_malloc)
    options.add_argument("--repetitions", type=int, default=size(repetitions, 1))
    options.add_argument("--smallest", action="store_true", help="once, tiny: does it run?")
    options.set_defaults(update_docs=False)
    if not SMALLEST:  # whose times say nothing
        options.add_argument("--update-docs", action="store_true", help="tables into docs")
    return options


def chosen(option: str, choices: Iterable[str]) -> list[str]:
    """List the choices that an option names: one or ``all``."""
    return list(choices) if option == "all" else [option]


def add_dtypes(options: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Add the option that names one of the dtypes, or all."""
    options.add_argument("--dtype", choices=[*dtypes, "all"], default=size("all", "float32"))


def save_llama(directory: str, **sizes: int) -> PreTrainedModel:
    """Save a Llama of these sizes with random weights, the same in each run, and return it."""
    return save_model(directory, LlamaConfig(max_position_embeddings=512, **sizes))


def save_model(
    directory: str, config: PreTrainedConfig, auto_class: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Save a model with random weights, the same in each run, and return it."""
    torch.manual_seed(1)
    model = auto_class.from_config(config)
    model.save_pretrained(directory)
    return model


# Processes.


def run_ranks(
    script: Path, arguments: Mapping[str, Any], *, ranks: int, threads: int, malloc: str
) -> Any:
    """Run ``script`` in fresh processes and return what its rank 0 gave to :func:`finish`.

    Args:
        script: a Python file that reads :func:`arguments` and calls :func:`finish`.
        arguments: for the script; anything that JSON can hold.
        ranks: processes, started by torchrun when there are several.
        threads: of each process.
        malloc: a key of ``MALLOC_MODES``.

    Raises:
        subprocess.CalledProcessError: the script failed; its own words are on stderr.
    """
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {k: v for k, v in os.environ.items() if k not in MALLOC_MODES["tuned"]}
    environment |= MALLOC_MODES[malloc]
    environment |= {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
    if SMALLEST:
        environment[_SMALLEST_VARIABLE] = "1"
    environment["KINETO_LOG_LEVEL"] = "99"  # else the profiler says when it starts and stops
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        environment[_RESULT_VARIABLE] = str(result)
        command = [*launcher, str(script), json.dumps(arguments)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(result.read_text())


def arguments() -> Any:
    """Return, in a rank process, the arguments that :func:`run_ranks` was given."""
    return json.loads(sys.argv[1])


def finish(result: Any) -> NoReturn:
    """Hand back the ``result`` of a rank process, of which only rank 0's counts, and end it.

    The process ends without the interpreter's own clean-up: there, a thread of a gloo group that a
    competitor still holds may abort it, after all is measured.
    """
    if int(os.environ.get("RANK", 0)) == 0:
        Path(os.environ[_RESULT_VARIABLE]).write_text(json.dumps(result))
    px.shutdown()  # waits for asynchronous saves
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def machine() -> str:
    """Name processor, versions and date of a result, in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{(models or ['unknown CPU'])[0]}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {datetime.date.today()}"
    )


# Time.


def _over_ranks(values: Sequence[float], operation: Any) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


def slowest(values: Sequence[float]) -> list[float]:
    """Return each value's maximum over the ranks."""
    return _over_ranks(values, dist.ReduceOp.MAX)


def total(values: Sequence[float]) -> list[float]:
    """Return each value's sum over the ranks."""
    return _over_ranks(values, dist.ReduceOp.SUM)


def _busy_seconds() -> tuple[float, float]:
    """Processor seconds that the whole machine and that the ranks have used so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, *interrupts_and_steal = map(int, fields)
    ticks = user + nice + system + sum(interrupts_and_steal)
    (ranks,) = total([time.process_time()])
    return ticks / os.sysconf("SC_CLK_TCK"), ranks


@dataclass
class Round:
    """One turn of every competitor.

    Attributes:
        seconds: competitor -> its phases, each that of the slowest rank.
        disturbance: share of the machine that other processes used meanwhile, 0 to 1.
    """

    seconds: dict[str, list[float]]
    disturbance: float


def interleaved(
    competitors: Mapping[str, Callable[[], Sequence[float]]], repetitions: int, warm_up: int
) -> list[Round]:
    """Let competitors run in turn, so that what the machine does hits all of them.

    Args:
        competitors: name -> what to time; it returns the seconds of its phases.
        repetitions: rounds to return.
        warm_up: rounds that come before and do not count.

    Returns:
        The ``repetitions`` least disturbed rounds; more are run, up to twice as many, until
        so many are quiet.
    """
    rounds: list[Round] = []
    order = list(competitors)
    for _ in range(warm_up + 2 * repetitions):
        seconds = {}
        start, (machine_before, ranks_before) = time.perf_counter(), _busy_seconds()
        for name in order:
            if dist.is_initialized():
                dist.barrier()
            seconds[name] = slowest(competitors[name]())
        machine_after, ranks_after = _busy_seconds()
        available = (time.perf_counter() - start) * (os.cpu_count() or 1)
        elsewhere = (machine_after - machine_before) - (ranks_after - ranks_before)
        rounds.append(Round(seconds, *slowest([max(0.0, elsewhere) / available])))
        order.reverse()  # nobody always runs on the caches that the other leaves
        if sum(r.disturbance <= _QUIET for r in rounds[warm_up:]) == repetitions:
            break
    return sorted(rounds[warm_up:], key=lambda r: r.disturbance)[:repetitions]


def seconds(rounds: Iterable[Round], phase: int = 0) -> dict[str, list[float]]:
    """Map each competitor to its times of one phase, one for each round."""
    by_name: dict[str, list[float]] = {}
    for each in rounds:
        for name, phases in each.seconds.items():
            by_name.setdefault(name, []).append(phases[phase])
    return by_name


def disturbance(rounds: Iterable[Round]) -> float:
    """Return the disturbance of the worst round."""
    return max(each.disturbance for each in rounds)


# Memory.


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def resident_anonymous() -> float:
    """Return this process' memory that no file backs, in MiB, after giving free memory back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _resident("RssAnon")


def counted_bytes(name: str) -> int:
    """Bytes that this process has moved so far, by a name of /proc/self/io."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts[name])


def peak_growth(function: Callable[[], Any]) -> float:
    """Measure how much anonymous memory ``function`` adds at its peak, in MiB.

    By the kernel's own high-water mark, so that no peak is missed and nothing samples meanwhile.
    """
    resident_anonymous()
    Path("/proc/self/clear_refs").write_text("5")  # lowers the mark to what is resident now
    before, files_before = _resident("VmRSS"), _resident("RssFile")
    function()
    return _resident("VmHWM") - before - max(0.0, _resident("RssFile") - files_before)


# Profiles.


@dataclass(frozen=True)
class Profile:
    """What the operators of a function cost on this rank.

    Attributes:
        operators: (milliseconds in itself, calls, name), most expensive first.
        collectives: operator name -> calls, for collectives that go through torch's dispatcher.
    """

    operators: list[tuple[float, int, str]]
    collectives: dict[str, int]

    def top(self, count: int) -> str:
        """Return the most expensive operators as text, and the sum over all."""
        lines = [f"{ms:9.1f} ms {calls:6d} x {name}" for ms, calls, name in self.operators[:count]]
        return "\n".join([*lines, f"{sum(ms for ms, _, _ in self.operators):9.1f} ms in all"])


def profile(function: Callable[[], Any], repetitions: int = 3) -> Profile:
    """Profile several runs of ``function`` on every rank, and return the fastest."""
    runs = []
    for _ in range(repetitions):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            function()
        runs.append(recorded.key_averages())
    events = min(runs, key=lambda run: sum(event.self_cpu_time_total for event in run))
    operators = [(event.self_cpu_time_total / 1e3, event.count, event.key) for event in events]
    collectives = {
        event.key: event.count
        for event in events
        if event.key.startswith(_COLLECTIVES) and not event.key.endswith(_NO_COLLECTIVES)
    }
    return Profile(sorted(operators, reverse=True), collectives)


# Results.


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Format values as ``median (minimum-maximum)``."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def verdict(met: bool) -> str:
    """Return what a table says of a target."""
    return "met" if met else "**missed**"


def publish(section: str, text: str, options: argparse.Namespace) -> None:
    """Print ``text``; if asked, put it between the markers of ``section`` in its page as well.

    The pages are those of ``docs/benchmarks``. The short tables of README.md are written by hand.
    """
    print(text)
    if not options.update_docs:
        return
    begin, end = f"<!-- {section}: begin -->\n", f"<!-- {section}: end -->\n"
    (page,) = (path for path in PAGES.glob("*.md") if begin in path.read_text())
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}{text}\n{end}{after}")
    print(f"{page} is written; benchmarks/README.md shows some of its ratios", file=sys.stderr)
