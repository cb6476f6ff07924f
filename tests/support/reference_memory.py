"""How much memory a call takes at its peak."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def peak_growth(function: Callable[[], Any]) -> tuple[float, Any]:
    """MiB of anonymous memory that a call adds at its peak, and what it returned."""
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
