"""Show on rank 0 how far the ranks are in reading or writing a large model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

_LONG_S = 1.0  # what takes less shows no bar unless one is asked for


@contextmanager
def progress_bar(
    what: str, num_bytes: int, rank: int, wanted: bool | None
) -> Iterator[Callable[[int], object]]:
    """Show a bar on the standard error of rank 0 while the block runs.

    Args:
        what: stands before the bar.
        num_bytes: how much there is to do.
        rank: of the job.
        wanted: True for a bar, False for none; None for one on a terminal, if it takes long.

    Yields:
        The function that takes the number of bytes that were done since its last call.
    """
    if rank != 0 or wanted is False:
        yield lambda num_bytes: None
        return
    shown = {"disable": None, "delay": _LONG_S} if wanted is None else {}
    with tqdm(total=num_bytes, desc=what, unit="B", unit_scale=True, **shown) as bar:
        yield bar.update
