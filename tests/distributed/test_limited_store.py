"""A store that does not answer is given up in time, by every call."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from parallel_ext.distributed.barrier import MonitoredBarrier, long_step
from parallel_ext.distributed.errors import CollectiveTimeout
from parallel_ext.distributed.hosts import Host, Hosts
from parallel_ext.distributed.limited_store import LimitedStore, StoreLostError

LIMIT_S = 0.2


class _Silent:
    """A store of a process that was stopped: each call waits until the test is over."""

    def __init__(self) -> None:
        self.over, self.asked = threading.Event(), 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            self.asked += 1
            self.over.wait(60)

        return call


@pytest.fixture
def silent() -> Any:
    store = _Silent()
    yield store
    store.over.set()


def _store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


CALLS = {
    "set": lambda store: store.set("key", "1"),
    "get": lambda store: store.get("key"),
    "add": lambda store: store.add("key", 1),
    "check": lambda store: store.check(["key"]),
    "delete_key": lambda store: store.delete_key("key"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_in_time_and_is_the_last(name: str, silent: _Silent) -> None:
    store = LimitedStore(silent, LIMIT_S)
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(StoreLostError, match="no answer within 0.2 s"):
            CALLS[name](store)
    assert time.monotonic() - began < 3
    assert silent.asked == 1


def test_a_barrier_and_a_long_step_say_that_the_store_is_lost(silent: _Silent) -> None:
    words = "the store of the job cannot be reached.* its host or the network to it is down"
    barrier = MonitoredBarrier(LimitedStore(silent, LIMIT_S), 0, 2, timeout=60)
    with pytest.raises(CollectiveTimeout, match=f"a save: every rank must call it, but {words}"):
        barrier.wait("a save")
    barrier = MonitoredBarrier(LimitedStore(silent, LIMIT_S), 0, 2, timeout=60)
    barrier.hosts = Hosts([Host("a", "1"), Host("b", "2")])
    missing = barrier.lost("a sum", [0, 1])
    assert missing.startswith("nothing is known of rank 1 on host b, since the store of the job")
    with (
        pytest.raises(TimeoutError, match=words),
        long_step(LimitedStore(silent, LIMIT_S), 1, 0, Hosts.unknown(2), timeout=60),
    ):
        pass


def test_values_and_errors_are_those_of_the_store() -> None:
    plain = _store()
    store = LimitedStore(dist.PrefixStore("own", plain), 60)
    assert store.where == f"the store of the job at 127.0.0.1:{plain.port}"
    store.set("key", "value")
    assert (store.get("key"), plain.get("own/key")) == (b"value", b"value")
    assert (store.add("number", 2), store.add("number", 3)) == (2, 5)
    assert (store.check(["key"]), store.check(["key", "other"])) == (True, False)
    store.delete_key("key")
    assert not store.check(["key"])
    with pytest.raises(RuntimeError) as raised:
        store.wait("other", 0.1)
    assert not isinstance(raised.value, StoreLostError)
    assert store.check(["number"]), "it is asked again"


def test_an_interrupt_leaves_no_answer_for_another_call() -> None:
    store = LimitedStore(_store(), 60)
    with pytest.raises(ValueError, match="format"):  # as Ctrl-C, where the call has begun
        store._ask(store._store.add, "number", 1, longest="long")
    assert store.add("other", 7) == 7


def test_a_process_without_room_for_a_thread_does_not_blame_the_store(
    silent: _Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as Python does

    barrier = MonitoredBarrier(LimitedStore(silent, LIMIT_S), 0, 2, timeout=60)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(OSError, match="no thread for the store of the job, since can't start new"):
        barrier.wait("a save")


@pytest.mark.parametrize("end", ["close", "forget"])
def test_the_thread_ends_with_the_store(end: str) -> None:
    store = LimitedStore(_store(), 60)
    store.add("number", 1)
    thread = store._thread
    if end == "close":
        store.close()
    del store
    thread.join(10)
    assert not thread.is_alive()
