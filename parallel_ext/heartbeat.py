"""Waiting for ranks that may take long, but only for as long as they live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store


@contextmanager
def long_step(
    store: Store, number: int, rank: int, world_size: int, timeout: float
) -> Iterator[None]:
    """Inside, this rank shows that it lives; at the end it waits for all others that do.

    Every rank of the job goes through the same steps, in order.

    Args:
        store: reached by all ranks.
        number: of the step, from 1 on, one more for each.
        rank, world_size: of the job.
        timeout: seconds without a sign of life after which a rank counts as lost.

    Raises:
        TimeoutError: a rank that has not come to the end has shown nothing for ``timeout`` seconds;
            names it. A process that was killed or stopped shows nothing; one that waits for a disk
            or a download does. Or the process that kept the store has died.
    """
    step, finished = f"step/{number}", threading.Event()

    def beat() -> None:
        while not finished.wait(timeout / 4):
            try:
                store.add(f"{step}/beat/{rank}", 1)
            except RuntimeError:  # the end of the step asks the same store, and says so
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    try:
        _wait_for_all(store, step, rank, world_size, timeout)
        forget(store, number - 1, rank)  # which all have left
    except RuntimeError as error:
        raise TimeoutError(
            "the store of the job cannot be reached; the process that kept it has died"
        ) from error


def _wait_for_all(store: Store, step: str, rank: int, world_size: int, timeout: float) -> None:
    store.set(f"{step}/{rank}", "1")
    if store.add(f"{step}/arrived", 1) == world_size:
        store.set(f"{step}/all_here", "1")
    beats = dict.fromkeys(range(world_size), (0, time.monotonic()))  # how many, and since when
    began = looked = time.monotonic()
    # Polled, since a wait in the store would warn of each second that it lasts. The pauses are a
    # share of what was waited, so that the end is noticed soon and the store is asked seldom.
    while not store.check([f"{step}/all_here"]):
        time.sleep(min(max(0.0002, (time.monotonic() - began) / 8), 0.1))
        if time.monotonic() - looked < min(1.0, timeout / 4):
            continue
        looked = time.monotonic()
        for other in range(world_size):
            if store.check([f"{step}/{other}"]):
                continue
            count, since = store.add(f"{step}/beat/{other}", 0), beats[other]
            if count != since[0]:
                beats[other] = (count, time.monotonic())
            elif time.monotonic() - since[1] > timeout:
                raise TimeoutError(f"rank {other} has shown no sign of life for {timeout:g} s")


def forget(store: Store, number: int, rank: int) -> None:
    """Delete this rank's keys of a step, so that the store stays small; rank 0 those of all too."""
    for key in (str(rank), f"beat/{rank}", *(("arrived", "all_here") if rank == 0 else ())):
        store.delete_key(f"step/{number}/{key}")
