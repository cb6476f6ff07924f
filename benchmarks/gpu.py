"""Ops and steps on one GPU, each beside its peers and beside what the card can do.

    python benchmarks/gpu.py [--device cuda:0|cpu] [--part NAME ...] [--repetitions N]
                             [--seconds N] [--out FILE] [--smallest] [--update-docs]

What is measured and how: docs/benchmarks/gpu.md. It exits with an error when competitors do not
compute the same thing.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from gpu_rows import OURS, PARTS, Row
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

TOLERANCE = 5e-2  # relative to the largest element; bf16 sums in other orders
SLOW_REPETITIONS = harness.size(3, 1)
FLUSHED = harness.size(256 << 20, 1 << 10)  # bytes that are written between runs: more than an L2
AHEAD = 6_000_000  # cycles that a GPU idles in while the host starts what is timed: 3 ms of an H200


class Device:
    """The GPU, or the CPU to see that all runs; how it is timed and watched."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_gpu = self.device.type == "cuda"
        if self.is_gpu:
            torch.cuda.set_device(self.device)
        self.other = torch.empty(FLUSHED, dtype=torch.uint8, device=self.device)

    def describe(self) -> str:
        """Name the machine, and the GPU where there is one."""
        if not self.is_gpu:
            return f"**No GPU**: {harness.machine()}"
        found = torch.cuda.get_device_properties(self.device)
        memory = found.total_memory / 2**30
        return f"{found.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}; {harness.machine()}"

    def seconds(self, function: Callable[[], Any], ahead: bool) -> float:
        """Time one run, with the caches full of something else; ``ahead`` as in ``Row``."""
        self.other.zero_()
        if not self.is_gpu:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        if ahead:
            torch.cuda._sleep(AHEAD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def launches(self, function: Callable[[], Any]) -> int | None:
        """Count what the GPU is given to do; None on the CPU."""
        if not self.is_gpu:
            return None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            function()
            torch.cuda.synchronize()
        on_gpu = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_gpu for event in recorded.events())

    def waits(self, function: Callable[[], Any]) -> int | None:
        """Count how often the host waits for the GPU; None on the CPU."""
        if not self.is_gpu:
            return None
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(each.message) for each in told)

    def peak_mib(self, function: Callable[[], Any]) -> float | None:
        """Measure what a run allocates at its peak, beyond what was there; None on the CPU."""
        if not self.is_gpu:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


@dataclass
class Result:
    """What was measured of a row: by competitor, ours first."""

    name: str
    seconds: dict[str, list[float]]
    launches: int | None
    waits: int | None
    peak_mib: dict[str, float | None]
    bytes: int
    flops: int
    limits: dict[str, float]

    def median(self, name: str = OURS) -> float:
        return statistics.median(self.seconds[name])

    def rate(self) -> tuple[str, float]:
        """Return ours in bytes or operations a second, and its unit."""
        if self.flops:
            return "TFLOP/s", self.flops / self.median() / 1e12
        return "GB/s", self.bytes / self.median() / 1e9

    def over(self, peer: str) -> float:
        """Return our time over that of a peer."""
        return self.median() / self.median(peer)


def _error(ours: Any, theirs: Any) -> float:
    """The worst relative difference; integers must be equal."""
    pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=True)
    found = 0.0
    for a, b in pairs:
        if not a.is_floating_point():
            found = max(found, float(not torch.equal(a, b)))
            continue
        difference, largest = (a.float() - b.float()).abs().max(), b.float().abs().max()
        found = max(found, (difference / largest.clamp_min(1e-30)).item())
    return found


def measured(row: Row, device: Device, repetitions: int) -> Result:
    """Run the competitors of a row in turns.

    Raises:
        SystemExit: they do not compute the same.
    """
    expected = row.runs[OURS]()
    row.after()
    for peer in row.same:
        error = _error(expected, row.runs[peer]())
        if not error <= TOLERANCE:
            sys.exit(f"{row.name}: {peer} does not compute the same, but is off by {error:.1e}")
    del expected
    for run in row.runs.values():  # warm
        run()
        row.after()
    seconds: dict[str, list[float]] = {name: [] for name in row.runs}
    order = list(row.runs)
    for _ in range(repetitions if row.quick else min(repetitions, SLOW_REPETITIONS)):
        for name in order:
            seconds[name].append(device.seconds(row.runs[name], row.ahead))
            row.after()
        order.reverse()

    def watched(watch: Callable[[Callable[[], Any]], Any], name: str = OURS) -> Any:
        value = watch(row.runs[name])
        row.after()
        return value

    return Result(
        name=row.name,
        seconds=seconds,
        launches=watched(device.launches),
        waits=watched(device.waits),
        peak_mib={name: watched(device.peak_mib, name) for name in row.runs},
        bytes=row.bytes,
        flops=row.flops,
        limits=row.limits,
    )


def _or_empty(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def table(results: Sequence[Result]) -> str:
    """A line for each row, and in it one for each peer."""
    known = {each.name: each for each in results}
    ceilings = {
        unit: known[name].rate()[1]
        for unit, name in (("GB/s", "copy"), ("TFLOP/s", "product"))
        if name in known
    }
    lines = []
    for each in results:
        unit, rate = each.rate()
        share = f"{rate / ceilings[unit]:.0%}" if unit in ceilings else ""
        has_rate = each.bytes or each.flops
        lines.append(
            [
                each.name,
                harness.spread([1e6 * s for s in each.seconds[OURS]]),
                f"{rate:.1f} {unit}" if has_rate else "",
                share if has_rate else "",
                *(_or_empty(n) for n in (each.launches, each.waits, each.peak_mib[OURS])),
                "<br>".join(
                    f"{peer}: {each.over(peer):.2f}"
                    + (
                        f" ({limit:.2f} {harness.verdict(each.over(peer) <= limit)})"
                        if (limit := each.limits.get(peer))
                        else ""
                    )
                    for peer in each.seconds
                    if peer != OURS
                ),
            ]
        )
    head = ["", "µs", "rate", "of the ceiling", "launches", "waits", "peak, MiB", "ours / peer"]
    return harness.markdown_table(head, lines)


def main() -> None:
    options = harness.parser(__doc__, repetitions=30, malloc=False)
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else None)
    options.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    options.add_argument("--seconds", type=float, default=150, help="begins no row after them")
    options.add_argument("--out", type=Path, help="every number, as JSON")
    options = options.parse_args()
    if options.device is None:
        sys.exit("torch sees no GPU; --device cpu --smallest shows that everything runs")
    warnings.filterwarnings("ignore")
    # What px.Invariant asks for, before the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device, begin = Device(options.device), time.perf_counter()
    results, left_out = [], []
    for part in options.part:
        if time.perf_counter() - begin > options.seconds:
            left_out.append(part)
            continue
        print(f"# {part}", file=sys.stderr, flush=True)
        for row in PARTS[part](device.device):
            if time.perf_counter() - begin > options.seconds:
                left_out.append(row.name)
                continue
            results.append(measured(row, device, options.repetitions))
            if options.out:  # after each, so that what was measured stays
                rows = [asdict(each) for each in results]
                record = {"machine": device.describe(), "rows": rows}
                options.out.write_text(json.dumps(record, indent=1))
        gc.collect()
    text = f"{device.describe()}.\n\n{table(results)}"
    if left_out:
        text += f"\n\nNot run for want of time (`--seconds`): {', '.join(left_out)}."
    harness.publish("gpu", text, options)


if __name__ == "__main__":
    main()
