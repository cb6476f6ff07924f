"""The barrier: who is lost on the way to it is named, and it ends in one way on all ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from parallel_ext.distributed.barrier import MonitoredBarrier, long_step
from parallel_ext.distributed.errors import CollectiveTimeout
from parallel_ext.distributed.hosts import Host, Hosts
from parallel_ext.distributed.limited_store import LimitedStore
from parallel_ext.distributed.new_keys import new_keys

HOSTS = Hosts([Host("a", "1"), Host("b", "2")])


class _LostError(Exception):
    """The process ended here."""


class _Watched:
    """A store that calls a function before each of the calls to it."""

    def __init__(self, store: dist.Store, before: Callable[[str], None]) -> None:
        self._store, self._before = store, before

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self._before(name)
            return getattr(self._store, name)(*args)

        return call


def _lost_at_add(number: int) -> Callable[[str], None]:
    calls = itertools.count()

    def before(name: str) -> None:
        if name == "add" and next(calls) == number:
            raise _LostError

    return before


def _barrier(store: Any, rank: int, timeout: float) -> MonitoredBarrier:
    barrier = MonitoredBarrier(LimitedStore(store, 20), rank, 2, timeout)
    barrier.hosts = HOSTS
    return barrier


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_lost_as_it_comes_to_a_barrier_is_named(number: int) -> None:
    store = dist.HashStore()
    with pytest.raises(_LostError):
        _barrier(_Watched(store, _lost_at_add(number)), 1, 10).wait("a save")
    words = "a save: every rank must call it, but rank 1 on host b did not within 0.5 s"
    with pytest.raises(CollectiveTimeout, match=re.escape(words)):
        _barrier(store, 0, 0.5).wait("a save")


def test_a_rank_that_is_lost_as_it_ends_a_long_step_is_named() -> None:
    store = dist.HashStore()
    lost = LimitedStore(_Watched(store, _lost_at_add(0)), 20)
    with pytest.raises(_LostError), long_step(lost, 1, 1, HOSTS, timeout=60):
        pass
    with (
        pytest.raises(TimeoutError, match="rank 1 on host b has shown no sign of life for 0.5 s"),
        long_step(LimitedStore(store, 20), 1, 0, HOSTS, timeout=0.5),
    ):
        pass


def test_a_rank_that_comes_while_another_gives_up_ends_as_that_one_does() -> None:
    store, pool = dist.HashStore(), ThreadPoolExecutor(1)
    others = []

    def before(name: str) -> None:
        if name == "wait":  # is over: the other rank comes before this one can say so
            others.append(pool.submit(_barrier(store, 1, 20).wait, "a save"))
            others[0].exception(20)
            raise RuntimeError("too late")

    _barrier(_Watched(store, before), 0, 0.1).wait("a save")
    assert others[0].result(20) is None


def test_a_rank_that_comes_late_is_told_that_the_others_gave_up() -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeout, match="rank 0 on host a did not within 0.1 s"):
        _barrier(store, 1, 0.1).wait("a save")
    with pytest.raises(CollectiveTimeout, match="rank 0 came later than 0.1 s after the others"):
        _barrier(store, 0, 0.1).wait("a save")


def test_a_name_with_bytes_that_are_not_utf_8_can_be_waited_for() -> None:
    store, name = dist.HashStore(), "a save to " + b"\xff".decode(errors="surrogateescape")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(_barrier(store, rank, 20).wait, name) for rank in (0, 1)]
        assert [wait.result(30) for wait in waits] == [None, None]


# Keys of one start of a job.


def test_rank_0_names_new_keys_to_ranks_that_ask_before_and_after_it() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        early = ranks.submit(new_keys, store, "test", 1, 20, "op")
        of_rank_0, answer = new_keys(store, "test", 0, 20, "op")
        late = ranks.submit(new_keys, store, "test", 2, 20, "op")
        while not (early.done() and late.done()):
            answer()
    of_rank_0.set("key", "of this start")
    for of_rank, nothing in (early.result(), late.result()):
        assert of_rank.get("key") == b"of this start"
        assert nothing is None


def test_keys_of_a_start_are_not_those_of_the_one_before() -> None:
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(CollectiveTimeout) as raised:  # of a rank whose rank 0 has died
            new_keys(store, "test", 1, 0.1, "op")
        assert str(raised.value) == "op: every rank must call it, but rank 0 did not within 0.1 s"
    found = set()
    for start in range(2):
        own, answer = new_keys(store, "test", 0, 20, "op")
        with ThreadPoolExecutor(1) as ranks:
            other = ranks.submit(new_keys, store, "test", 1, 20, "op")
            while not other.done():
                answer()
        assert not own.check(["key"])
        other.result()[0].set("key", f"{start}")
        found.add(own.get("key"))
    assert found == {b"0", b"1"}
