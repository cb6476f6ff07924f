"""Sort what a profiler saw of a training step: each moment to one part, each byte to a peak."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

PRODUCTS, ATTENTION, OPTIMIZER, OTHER = "matrix products", "attention", "optimizer", "other"
FIXED_PARTS = (PRODUCTS, ATTENTION, OPTIMIZER, OTHER)
"""The parts that every step has, beside the exchanges over its groups."""

_MEMORY = "[memory]"
_EXCHANGE = re.compile(r"parallel_ext::(\w+) (.+) \S+ [kMGT]?B")
_EXCHANGES_OF_OTHERS = ("c10d::", "gloo:", "nccl:", "record_param_comms")
_PARTS = [
    (ATTENTION, re.compile(r"aten::_?(scaled_dot_product|flash_attention|efficient_attention)")),
    (
        PRODUCTS,
        re.compile(
            r"aten::(mm|bmm|addmm|addmv|mv|baddbmm|matmul|linear|_grouped_mm)\b"
            r"|parallel_ext::\w*linears?(_forward|_backward)?$"
        ),
    ),
    (OPTIMIZER, re.compile(r"Optimizer\.(step|zero_grad)#")),
]


@dataclass(frozen=True)
class Exchanges:
    """What a rank exchanged over the ranks of one group in a step: how often, and its own bytes.

    They are those that ``_C.collective_counts`` counts.
    """

    times: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class StepEvents:
    """What a profiler saw of a marked step on one rank.

    Attributes:
        total: seconds of the whole step.
        seconds: of each part of it, which add up to the whole. The exchanges of a group are one
            part, ``exchanges <group>``.
        exchanges: of each group.
        peak: bytes that were allocated at the highest moment, beyond those at the beginning.
        after: bytes that were allocated at the end of each inner mark, beyond those at the
            beginning.
    """

    total: float
    seconds: dict[str, float]
    exchanges: dict[str, Exchanges]
    peak: int
    after: dict[str, int]


_OVER = "exchanges "


def group_of(part: str) -> str:
    """Return the group whose exchanges are a part of a step; the part itself where it is none."""
    return part.removeprefix(_OVER)


def sort_events(events: Iterable[Any], mark: str, inner: Iterable[str], device: str) -> StepEvents:
    """Sort the events of a profile that was taken with shapes and memory.

    On the CPU each moment of the marked thread belongs to the innermost event that names a part. On
    a GPU it belongs to the kernel that runs; where several run, to one that computes, so that only
    the exchanges that nothing hides count. What is left is ``other``.

    Args:
        events: of Kineto, ``profiler.profiler.kineto_results.events()``.
        mark: the name of the range that is the step.
        inner: names of ranges in it after whose end the memory is wanted.
        device: ``cpu`` or ``cuda``.
    """
    events = list(events)
    root = next(event for event in events if event.name() == mark and _on_host(event))
    start, end = root.start_ns(), root.end_ns()
    within = [event for event in events if start <= event.start_ns() <= end]
    ranges = [e for e in within if _on_host(e) and e.name() != _MEMORY and not e.is_async()]
    threads: dict[int, list[Any]] = defaultdict(list)
    for event in sorted(ranges, key=lambda e: (e.start_ns(), -e.end_ns())):
        threads[event.start_thread_id()].append(event)
    part_of: dict[int, str] = {}
    seconds_of_threads = {
        thread: dict(_own_times(sequence, part_of)) for thread, sequence in threads.items()
    }
    if device == "cpu":
        nanoseconds = seconds_of_threads[root.start_thread_id()]
    else:
        kernels = [
            (e.start_ns(), e.end_ns(), part_of.get(e.linked_correlation_id(), OTHER))
            for e in within
            if e.device_type() == DeviceType.CUDA and not e.is_user_annotation()
            if e.name() != _MEMORY
        ]
        nanoseconds = covered(kernels, start, end)
    peak, after = _memory(within, inner, device)
    seconds = {part: time / 1e9 for part, time in nanoseconds.items()}
    return StepEvents((end - start) / 1e9, seconds, _exchanges(ranges), peak, after)


def _on_host(event: Any) -> bool:
    return event.device_type() == DeviceType.CPU


def _own_times(sequence: list[Any], part_of: dict[int, str]) -> Mapping[str, float]:
    """Return the time of each part in the events of a thread, which nest, outer ones first.

    Each event's part is added to ``part_of``, by its correlation.
    """
    times: dict[str, float] = defaultdict(float)
    stack: list[tuple[int, str]] = []  # ends and parts of the events around
    for event in sequence:
        while stack and stack[-1][0] <= event.start_ns():
            stack.pop()
        end, around = stack[-1] if stack else (event.end_ns(), OTHER)
        part = _part(event.name(), around)
        duration = max(0, min(end, event.end_ns()) - event.start_ns())
        if stack:
            times[around] -= duration
        times[part] += duration
        stack.append((event.start_ns() + duration, part))
        part_of[event.correlation_id()] = part
    return times


def _part(name: str, around: str) -> str:
    """Return the part of an event inside one of the part ``around``; exchanges go before all."""
    if found := _EXCHANGE.fullmatch(name):
        return _OVER + found[2]
    if around != OTHER:
        return around
    if name.startswith(_EXCHANGES_OF_OTHERS):
        return _OVER + "of others"
    return next((part for part, pattern in _PARTS if pattern.match(name)), OTHER)


def covered(intervals: Iterable[tuple[int, int, str]], start: int, end: int) -> dict[str, float]:
    """Return the time of each part between two moments, of which each counts once.

    Args:
        intervals: starts, ends and parts of what runs, perhaps at once.
    """
    changes = sorted(
        (min(max(moment, start), end), change, part)
        for first, last, part in intervals
        for moment, change in ((first, 1), (last, -1))
    )
    times: dict[str, float] = defaultdict(float)
    running: dict[str, int] = defaultdict(int)
    now = start
    for moment, change, part in [*changes, (end, 0, OTHER)]:
        at_once = [each for each, count in running.items() if count > 0]
        times[min(at_once, key=_priority, default=OTHER)] += moment - now
        running[part] += change
        now = moment
    return dict(times)


def _priority(part: str) -> tuple[int, str]:
    if part in (PRODUCTS, ATTENTION, OPTIMIZER):
        return (0, part)
    return (1 if part == OTHER else 2, part)


def _exchanges(ranges: Iterable[Any]) -> dict[str, Exchanges]:
    found: dict[str, Exchanges] = {}
    for event in ranges:
        match = _EXCHANGE.fullmatch(event.name())
        if match and match[1] != "finish_all_reduce":  # of a sum that was counted at its start
            before = found.get(match[2], Exchanges())
            (num_bytes,) = event.concrete_inputs()
            found[match[2]] = Exchanges(before.times + 1, before.num_bytes + num_bytes)
    return found


def _memory(events: list[Any], inner: Iterable[str], device: str) -> tuple[int, dict[str, int]]:
    """Return the highest number of bytes allocated since the beginning, and those after marks."""
    kind = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    ends = {e.name(): e.end_ns() for e in events if e.name() in set(inner) and _on_host(e)}
    peak = now = 0
    after = dict.fromkeys(ends, 0)
    for moment, num_bytes in _changes(events, kind):
        now += num_bytes
        peak = max(peak, now)
        for name, end in ends.items():
            if moment <= end:
                after[name] = now
    return peak, after


def _changes(events: Iterable[Any], kind: DeviceType) -> Iterator[tuple[int, int]]:
    """Yield when how many bytes were allocated, or freed with a minus, in order."""
    of_memory = (e for e in events if e.name() == _MEMORY and e.device_type() == kind)
    yield from sorted(((e.start_ns(), e.nbytes()) for e in of_memory), key=lambda change: change[0])
