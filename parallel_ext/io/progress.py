"""Show on rank 0 how far the ranks are in reading or writing a large model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

_LONG_S = 1.0  # what takes less shows no bar unless one is asked for

Progress = Callable[[int], object]
"""Called with the bytes of each piece that was read or written."""

Bytes = int | Callable[[], int]
"""A number of bytes, or a function that finds it out, which is called where a bar is shown."""


def nothing(num_bytes: Bytes) -> None:
    """Report no progress."""


@contextmanager
def progress_bar(
    what: str, num_bytes: Bytes, rank: int, wanted: bool | None
) -> Iterator[Callable[[Bytes], object]]:
    """Show a bar on the standard error of rank 0 while the block runs.

    Args:
        what: stands before the bar.
        num_bytes: how much there is to do.
        wanted: True for a bar, False for none; None for one on a terminal, if it takes long.

    Yields:
        The function that takes the number of bytes that were done since its last call.
    """
    if rank != 0 or wanted is False or (wanted is None and not sys.stderr.isatty()):
        yield nothing
        return
    delay = _LONG_S if wanted is None else 0
    total = _number(num_bytes)
    unseen = suppress(OSError, ValueError)  # nothing can be written: no bar
    bar = None
    with unseen:
        bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=delay)

    def done(num_bytes: Bytes) -> None:
        number = _number(num_bytes)
        if bar is not None:
            with unseen:
                bar.update(number)

    try:
        yield done
    finally:
        if bar is not None:
            with unseen:
                bar.close()


def _number(num_bytes: Bytes) -> int:
    return num_bytes() if callable(num_bytes) else num_bytes
