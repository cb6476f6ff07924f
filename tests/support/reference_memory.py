"""How much memory a call takes at its peak."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

needs_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the kernel does not let the peak of the memory be measured",
)


def status(field: str) -> float:
    """A field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


@contextmanager
def _freed_memory_is_returned() -> Iterator[None]:
    """Have the C library map large memory one by one, and give it back when it is freed.

    It keeps freed blocks otherwise, and how many it keeps depends on what ran before.
    """
    libc, mmap_threshold = ctypes.CDLL(None), -3  # M_MMAP_THRESHOLD in glibc's malloc.h
    libc.mallopt(mmap_threshold, 2**20)
    libc.malloc_trim(0)
    try:
        yield
    finally:
        libc.mallopt(mmap_threshold, 2**25)  # where it ends by itself in a process like these


def peak_growth(function: Callable[[], Any]) -> tuple[float, Any]:
    """MiB of anonymous memory that a call adds at its peak, and what it returned."""
    with _freed_memory_is_returned():
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
        before, files_before = status("VmRSS"), status("RssFile")
        result = function()
        return status("VmHWM") - before - max(0.0, status("RssFile") - files_before), result


def allocated(function: Callable[[], Any]) -> float:
    """MiB that a call holds at its peak in tensors, beside what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
        function()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(sizes)) / 2**20
