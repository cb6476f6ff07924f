"""Let ranks wait for each other within a time limit, and name who is absent."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from parallel_ext.distributed.errors import CollectiveTimeout, DisagreementError
from parallel_ext.distributed.hosts import Hosts
from parallel_ext.distributed.interfaces import cause, connect_within
from parallel_ext.distributed.limited_store import (
    GRACE_S,
    LimitedStore,
    StoreLostError,
    store_lost,
)
from parallel_ext.distributed.new_keys import new_keys


@contextmanager
def long_step(
    store: LimitedStore, number: int, rank: int, hosts: Hosts, timeout: float
) -> Iterator[None]:
    """Run the block while this rank shows signs of life, then wait for the other ranks.

    Every rank of the job goes through the same steps, in order.

    Args:
        number: of the step, from 1 on, one more for each.
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
        _wait_for_all(store, step, rank, hosts, timeout)
        forget(store, number - 1, rank)  # which all have left
    except RuntimeError as error:
        raise TimeoutError(store_lost(store, error)) from error


def _wait_for_all(store: LimitedStore, step: str, rank: int, hosts: Hosts, timeout: float) -> None:
    world_size = len(hosts)
    if store.add(f"{step}/arrived", 1) == world_size:
        store.set(f"{step}/all_here", "1")
    store.set(f"{step}/{rank}", "1")  # last, so that a rank that dies before counts as absent
    beats = dict.fromkeys(range(world_size), (0, time.monotonic()))  # how many, and since when
    began = looked = time.monotonic()
    # Polled, since a wait in the store would warn of each second that it lasts.
    while not store.check([f"{step}/all_here"]):
        _pause(time.monotonic() - began)
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
                raise TimeoutError(
                    f"{hosts.in_words([other])} has shown no sign of life for {timeout:g} s"
                )


def _pause(waited: float) -> None:
    """Sleep for a share of what was waited: the end is seen soon, and the store asked seldom."""
    time.sleep(min(max(0.0002, waited / 8), 0.1))


def forget(store: LimitedStore, number: int, rank: int) -> None:
    """Delete this rank's keys of a step from the store; rank 0 also deletes the shared keys."""
    for key in (str(rank), f"beat/{rank}", *(("arrived", "all_here") if rank == 0 else ())):
        store.delete_key(f"step/{number}/{key}")


class MonitoredBarrier:
    """A barrier of all ranks that names who is absent, by marks in a store that all reach.

    Args:
        store: its keys are of this barrier alone.
        timeout: seconds after which a rank that does not come is reported.

    Attributes:
        hosts: of all ranks, as far as they are known.
    """

    def __init__(self, store: LimitedStore, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._number = 0
        self.hosts = Hosts.unknown(size)

    def wait(self, op_name: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until every rank of the job is about to do ``op_name``.

        Args:
            meanwhile: what to call again and again until all have come.

        Raises:
            CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
            DisagreementError: all came, but to different things; names who is where.
        """
        op_name = op_name.encode(errors="backslashreplace").decode()  # paths may have other bytes
        try:
            self._wait(op_name, meanwhile)
        except (CollectiveTimeout, DisagreementError):
            raise
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"{op_name}: every rank must call it, but {store_lost(self._store, error)}"
            ) from error

    def _wait(self, op_name: str, meanwhile: Callable[[], None] | None) -> None:
        marks = f"barrier/{self._number}"
        self._number += 1
        self._store.add(f"{marks}/to {op_name}", 1)
        if self._store.add(f"{marks}/arrived", 1) == self._size:
            self._forget(self._number - 2)
            self._end(marks, "all here")
        # Last, so that a rank that dies before counts as absent.
        self._store.set(f"{marks}/{self._rank}", op_name)
        missing = ""
        try:
            if meanwhile is not None:
                self._call_until(f"{marks}/end", meanwhile)
            self._store.wait(f"{marks}/end", self._timeout)
        except StoreLostError:
            raise
        except RuntimeError:  # a TCPStore raises DistStoreError, a FileStore its base
            missing = self.absent(marks, range(self._size))
            self._end(marks, "given up")
        if self._store.get(f"{marks}/end") == b"given up":
            missing = missing or self.absent(marks, range(self._size))
            raise CollectiveTimeout(
                f"{op_name}: every rank must call it, but {missing} did not within "
                f"{self._timeout:g} s"
                if missing
                else f"{op_name}: rank {self._rank} came later than {self._timeout:g} s after the "
                "others, who have given up waiting"
            )
        if self._store.add(f"{marks}/to {op_name}", 0) != self._size:
            places = (self._store.get(f"{marks}/{r}").decode() for r in range(self._size))
            seen = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise DisagreementError(f"the ranks are about to do different things: {seen}")

    def _call_until(self, key: str, function: Callable[[], None]) -> None:
        """Call a function again and again until a key is there; raise after the timeout."""
        began = time.monotonic()
        while not self._store.check([key]):
            if (waited := time.monotonic() - began) > self._timeout:
                raise RuntimeError(f"{key} is not there")
            function()
            _pause(waited)

    def _end(self, marks: str, how: str) -> None:
        """Let a barrier end in one way on all ranks: that of the rank that ends it first."""
        if self._store.add(f"{marks}/ends", 1) == 1:
            self._store.set(f"{marks}/end", how)

    def _forget(self, number: int) -> None:
        """Delete the keys of a barrier that every rank has passed; the store stays small."""
        marks = f"barrier/{number}"
        if self._store.check([f"{marks}/0"]):
            names = {self._store.get(f"{marks}/{r}").decode() for r in range(self._size)}
            keys = [f"to {op_name}" for op_name in names] + [str(r) for r in range(self._size)]
            for key in (*keys, "arrived", "ends", "end"):
                self._store.delete_key(f"{marks}/{key}")

    def close(self) -> None:
        """Record that this rank has passed its last barrier; the last rank deletes the keys."""
        if self._store.add("closed", 1) == self._size:
            for number in (self._number - 2, self._number - 1):
                self._forget(number)
            self._store.delete_key("closed")

    def absent(self, prefix: str, ranks: Sequence[int]) -> str:
        """Return the ranks that left no mark under ``prefix``, in words; empty if all left one."""
        return self.hosts.in_words(r for r in ranks if not self._store.check([f"{prefix}/{r}"]))

    def lost(self, failed: str, ranks: Sequence[int]) -> str:
        """Record this rank's failure, and return in words which of ``ranks`` have not failed.

        If all have failed, the words say that one of them was too slow.

        Args:
            failed: the same for all that fail in one thing.
            ranks: who takes part, this rank among them.
        """
        try:
            with self._store.within(GRACE_S):
                self._store.set(f"failed/{failed}/{self._rank}", "1")
                time.sleep(GRACE_S)
                absent = self.absent(f"failed/{failed}", ranks)
        except RuntimeError as error:
            others = self.hosts.in_words(each for each in ranks if each != self._rank)
            return f"nothing is known of {others}, since {store_lost(self._store, error)}"
        if not absent:
            return f"one of them was too slow to do so within {self._timeout:g} s"
        return f"{absent} did not within {self._timeout:g} s, or ended before"


def _number(variable: str) -> int:
    """Return what a variable of the environment says, which is no less than 0."""
    text = os.environ[variable]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"init_mesh: {variable} is {text!r}, which is not a number of torchrun's")
    return int(text)


def join_job(backend: str, timeout: float) -> None:
    """Initialise torch.distributed as torchrun's variables say, when all ranks have come.

    Raises:
        CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
        RuntimeError: a variable is missing.
        ValueError: one is no number, or ``RANK`` not below ``WORLD_SIZE``.
    """
    if missing := {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
        raise RuntimeError(
            f"init_mesh: RANK is set, but not {', '.join(sorted(missing))}; start the script by "
            "torchrun, or initialise torch.distributed before"
        )
    rank, size, port = map(_number, ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= size:
        raise ValueError(f"init_mesh: RANK is {rank}, counted from 0, of WORLD_SIZE={size} ranks")
    address = os.environ["MASTER_ADDR"]
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit = timedelta(seconds=timeout)
    try:
        # As torch's env:// makes it, but without waiting for ranks that it could not name.
        own = (address, port, size, rank == 0 and not by_agent, limit)
        store = connect_within(
            timeout,
            lambda: dist.TCPStore(*own, wait_for_workers=False, multi_tenant=True),
            "the connection",
        )
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise OSError(
                errno.EADDRINUSE,
                f"init_mesh: another process has the port {port} of MASTER_PORT, perhaps another "
                "job of this host; give each job its own",
            ) from error
        raise CollectiveTimeout(
            f"init_mesh: rank {rank} does not reach the store of the job at {address}:{port} "
            f"within {timeout:g} s, which {'torchrun' if by_agent else 'rank 0'} keeps: {error}"
        ) from error
    store, answer = new_keys(store, "start", rank, timeout, "init_mesh")
    limited = LimitedStore(store, timeout)
    barrier = MonitoredBarrier(limited, rank, size, timeout)
    barrier.wait("init_mesh", answer)
    try:
        own = (backend, None, limit, size, rank, dist.PrefixStore("default_pg", store))
        connect_within(timeout, lambda: dist.init_process_group(*own))
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"init_mesh: every rank must come, but {barrier.lost('start', range(size))}"
            f"{cause(error)}"
        ) from error
    finally:
        limited.close()
