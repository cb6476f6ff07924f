"""A store of a job whose calls end in time, also where the network drops all packets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from parallel_ext.distributed.answer import Answer, start_daemon

GRACE_S = 2.0  # how far apart in time ranks notice the same failure

_Call = tuple[Answer, Callable[..., Any], tuple[Any, ...]]


class StoreLostError(RuntimeError):
    """The store of the job has not answered in time."""


class LimitedStore:
    """The calls of a store that ranks wait by, each with a time limit.

    torch's TCPStore waits for an answer as long as the kernel takes the connection to live: with
    the cable cut for a quarter of an hour, with the process that keeps the store stopped for ever.
    So a thread of its own makes the calls, and who waits for it gives up. After that no call is
    made any more.

    Args:
        limit: seconds after which a call that does not wait for other ranks is given up.
    """

    def __init__(self, store: dist.Store, limit: float) -> None:
        self.where = f"the store of the job{_address(store)}"
        self._store, self._limit = store, limit
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lost: StoreLostError | None = None
        self._end = weakref.finalize(self, self._calls.put, None)

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self._ask(self._store.get, key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at the start, and return the sum."""
        return self._ask(self._store.add, key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self._ask(self._store.check, list(keys))

    def delete_key(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._ask(self._store.delete_key, key)

    def wait(self, key: str, seconds: float) -> None:
        """Wait until a key is there.

        Raises:
            RuntimeError: it was not within so many seconds.
        """
        self._ask(self._store.wait, [key], timedelta(seconds=seconds), longest=seconds + GRACE_S)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Give calls up after so many seconds inside the block."""
        before, self._limit = self._limit, min(self._limit, seconds)
        try:
            yield
        finally:
            self._limit = before

    def close(self) -> None:
        """End the thread; another call would start a new one."""
        if self._thread is not None:
            self._calls.put(None)
            if self._lost is None:
                self._thread.join()
            self._thread = None

    def _ask(self, call: Callable[..., Any], *args: Any, longest: float | None = None) -> Any:
        if self._lost is not None:
            raise self._lost
        if self._thread is None:
            self._thread = start_daemon("store of the job", self.where, _serve, self._calls)
        longest = self._limit if longest is None else longest
        answer = Answer()  # of this call, which an interrupt may leave behind
        self._calls.put((answer, call, args))
        late = StoreLostError(f"no answer within {longest:g} s")
        try:
            return answer.within(longest, late)
        except StoreLostError:
            self._lost = late
            raise


def store_lost(store: LimitedStore, error: RuntimeError) -> str:
    """Return in words that the store of the job is lost, and what may be the cause."""
    return (
        f"{store.where} cannot be reached; the process that kept it has died, or its host or the "
        f"network to it is down ({error})"
    )


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (task := calls.get()) is not None:
        answer, call, args = task
        answer.by(call, *args)


def _address(store: dist.Store) -> str:
    """Return where a TCPStore is, after a word that joins it to a sentence; else ``""``."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
