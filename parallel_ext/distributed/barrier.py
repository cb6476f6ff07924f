"""Let ranks wait for each other within a time limit, and name who is absent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from parallel_ext.distributed.errors import CollectiveTimeout, DisagreementError


@contextmanager
def long_step(
    store: Store, number: int, rank: int, world_size: int, timeout: float
) -> Iterator[None]:
    """Run the block while this rank shows signs of life, then wait for the other ranks.

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
    """Delete this rank's keys of a step from the store; rank 0 also deletes the shared keys."""
    for key in (str(rank), f"beat/{rank}", *(("arrived", "all_here") if rank == 0 else ())):
        store.delete_key(f"step/{number}/{key}")


GRACE_S = 2.0  # how far apart in time ranks notice the same failure


class MonitoredBarrier:
    """A barrier of all ranks that names who is absent, by marks in a store that all reach.

    Args:
        store: its keys are of this barrier alone.
        rank, size: of the job.
        timeout: seconds after which a rank that does not come is reported.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._number = 0

    def wait(self, op_name: str) -> None:
        """Wait until every rank of the job is about to do ``op_name``.

        Raises:
            CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
            DisagreementError: all came, but to different things; names who is where.
        """
        try:
            self._wait(op_name)
        except (CollectiveTimeout, DisagreementError):
            raise
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"{op_name}: every rank must call it, but the store of the job cannot be reached; "
                f"the process that kept it may have died: {error}"
            ) from error

    def _wait(self, op_name: str) -> None:
        marks = f"barrier/{self._number}"
        self._number += 1
        self._store.set(f"{marks}/{self._rank}", op_name)
        self._store.add(f"{marks}/to {op_name}", 1)
        if self._store.add(f"{marks}/arrived", 1) == self._size:
            self._forget(self._number - 2)
            self._store.set(f"{marks}/all_here", "1")
        try:
            self._store.wait([f"{marks}/all_here"], timedelta(seconds=self._timeout))
        except RuntimeError as error:  # a TCPStore raises DistStoreError, a FileStore its base
            self._store.set(f"{marks}/given_up", "1")
            missing = self.absent(marks, range(self._size)) or "a rank that died"
            raise CollectiveTimeout(
                f"{op_name}: every rank must call it, but {missing} did not within "
                f"{self._timeout:g} s"
            ) from error
        if self._store.check([f"{marks}/given_up"]):
            raise CollectiveTimeout(
                f"{op_name}: rank {self._rank} came later than {self._timeout:g} s after the "
                "others, who have given up waiting"
            )
        if self._store.add(f"{marks}/to {op_name}", 0) != self._size:
            places = (self._store.get(f"{marks}/{r}").decode() for r in range(self._size))
            seen = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise DisagreementError(f"the ranks are about to do different things: {seen}")

    def _forget(self, number: int) -> None:
        """Delete the keys of a barrier that every rank has passed; the store stays small."""
        marks = f"barrier/{number}"
        if self._store.check([f"{marks}/0"]):
            names = {self._store.get(f"{marks}/{r}").decode() for r in range(self._size)}
            keys = [f"to {op_name}" for op_name in names] + [str(r) for r in range(self._size)]
            for key in (*keys, "arrived", "all_here", "given_up"):
                self._store.delete_key(f"{marks}/{key}")

    def close(self) -> None:
        """Record that this rank has passed its last barrier; the last rank deletes the keys."""
        if self._store.add("closed", 1) == self._size:
            for number in (self._number - 2, self._number - 1):
                self._forget(number)
            self._store.delete_key("closed")

    def absent(self, prefix: str, ranks: Sequence[int]) -> str:
        """Return the ranks that left no mark under ``prefix``, in words; empty if all left one."""
        found = [str(rank) for rank in ranks if not self._store.check([f"{prefix}/{rank}"])]
        return f"rank{'s' * (len(found) > 1)} {', '.join(found)}" if found else ""

    def lost(self, failed: str, rank: int, ranks: Sequence[int]) -> str:
        """Record this rank's failure, and return in words which of ``ranks`` have not failed.

        If all have failed, the words say that one of them was too slow.

        Args:
            failed: the same for all that fail in one thing.
            rank: this rank, as ``ranks`` count.
            ranks: who takes part.
        """
        try:
            self._store.set(f"failed/{failed}/{rank}", "1")
            time.sleep(GRACE_S)
            absent = self.absent(f"failed/{failed}", ranks)
        except RuntimeError:  # the store lived in a process that is gone
            absent = "a rank that died"
        return f"{absent} did not" if absent else "one of them was too slow to do so"


def hint(error: BaseException) -> str:
    """Return a hint on GLOO_SOCKET_IFNAME if gloo could not connect over 127.0.0.1, else ``""``."""
    text = str(error)
    if "connectFullMesh" not in text or "127.0.0.1" not in text:
        return ""
    return (
        "; gloo has taken 127.0.0.1, which no other host reaches, for the address of this one: set "
        "GLOO_SOCKET_IFNAME to its network interface, for example GLOO_SOCKET_IFNAME=eth0"
    )


def join_job(backend: str, timeout: float) -> None:
    """Initialise torch.distributed as torchrun's variables say, when all ranks have come.

    Raises:
        CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=timeout)
    try:
        # As torch's env:// makes it, but without waiting for ranks that it could not name.
        store = dist.TCPStore(
            *(address, port, size, rank == 0 and not by_agent, limit),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"init_mesh: rank {rank} does not reach the store of the job at {address}:{port} "
            f"within {timeout:g} s, which {'torchrun' if by_agent else 'rank 0'} keeps: {error}"
        ) from error
    barrier = MonitoredBarrier(dist.PrefixStore("parallel_ext/start", store), rank, size, timeout)
    barrier.wait("init_mesh")
    try:
        dist.init_process_group(
            *(backend, None, limit, size, rank, dist.PrefixStore("default_pg", store))
        )
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"init_mesh: every rank must come, but {barrier.lost('start', rank, range(size))} "
            f"within {timeout:g} s{hint(error)}"
        ) from error
