"""A persistent pool of gloo ranks: tests send functions to real processes without their start."""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hosts import Hosts

_context = mp.get_context("forkserver")
_starting = threading.Lock()


@lru_cache
def _nursery(number: int) -> forkserver.ForkServer:
    """Forks ranks from a process that has imported what takes seconds to import.

    Two in all, of which one has the even and one the odd ranks, since the ranks of a job have hash
    seeds of their own: what they do in the order of a set, they do in different orders. What is
    imported may start no threads and no CUDA.
    """
    nursery = forkserver.ForkServer()
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral")]
    ours = ["reference_training", "reference_cogagent"]
    nursery.set_forkserver_preload([*ours, "hypothesis", "transformers.trainer", *models])
    nursery.ensure_running()
    return nursery


def fork(number: int, target: Callable[..., None], *args: Any) -> mp.Process:
    """Start ``target(*args)`` in a fork of the nursery for ranks of this ``number``."""
    process = _context.Process(target=target, args=args, daemon=True)
    connect = _nursery(number % 2).connect_to_new_process
    with _starting, mock.patch.object(forkserver, "connect_to_new_process", connect):
        process.start()
    return process


class RankError(AssertionError):
    """At least one rank failed or did not answer in time; the text holds every rank's traceback."""


class Raised:
    """What a rank returns under ``run_raising`` when its function raised."""

    def __init__(self, error: BaseException) -> None:
        self.type, self.text = type(error).__name__, str(error)
        self.classes = [cls.__name__ for cls in type(error).__mro__]

    def __repr__(self) -> str:
        return f"{self.type}: {self.text}"


def _worker(
    rank: int, size: int, rendezvous: str, pipe: Connection, hosts: Hosts | None = None
) -> None:
    gc.freeze()  # pages with what was imported stay those of the nursery
    if hosts is not None:
        hosts.enter(rank)
    torch.set_num_threads(1)
    if hosts is None:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
        )
    while True:
        try:
            task = pipe.recv()
        except EOFError:  # the test process is gone
            break
        except Exception:  # the function could not be found here
            pipe.send((False, traceback.format_exc()))
            continue
        gc.collect()  # models refer to themselves, and their memory counts here
        gc.freeze()  # modules and caches, which take 0.2 s to look through, each time
        function, args = task
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    os._exit(0)


def _catching(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return Raised(error)


class Ranks:
    """``size`` processes in one gloo group; ``run`` calls a module-level function on all.

    On two hosts their first ``px.init_mesh`` makes the group.
    """

    def __init__(self, size: int, hosts: Hosts | None = None) -> None:
        self.size, self.hosts = size, hosts
        self.pipes: list[Connection] = []
        self.processes: list[mp.Process] = []

    def _start(self) -> None:
        rendezvous = os.path.join(tempfile.mkdtemp(prefix="ranks-"), "rendezvous")
        for rank in range(self.size):
            _nursery(rank % 2)  # which import side by side
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = fork(rank, _worker, rank, self.size, rendezvous, theirs, self.hosts)
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the ranks' results in order.

        Raises RankError with all tracebacks when a rank raises, dies or does not answer in time;
        the pool is then started anew by the next call.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout_s
        failures, results = [], []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank}: no answer in {timeout_s:g} s")
                    continue
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                code = self.processes[rank].exitcode
                failures.append(f"rank {rank}: died (exit code {code})")
                continue
            results.append(value)
            if not ok:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return results

    def run_raising(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0
    ) -> list[Any]:
        """As ``run``, but a rank whose function raises returns :class:`Raised`, and the pool lives.

        For errors that all ranks must raise together without losing their groups.
        """
        return self.run(_catching, function, *args, timeout_s=timeout_s)

    def assert_raises(
        self,
        function: Callable[..., Any],
        *args: Any,
        words: str | Iterable[str] = (),
        error: str = "",
        timeout_s: float = 240.0,
    ) -> None:
        """Assert that ``function(*args)`` raises on every rank, and says ``words``.

        ``error`` is the name of the exception's class, when that matters.
        """
        words = [words] if isinstance(words, str) else list(words)
        for rank, raised in enumerate(self.run_raising(function, *args, timeout_s=timeout_s)):
            assert isinstance(raised, Raised), f"rank {rank} raised nothing, returned {raised!r}"
            assert error in ("", raised.type), f"rank {rank} raised no {error}, but {raised!r}"
            for each in words:
                assert each in raised.text, f"rank {rank}: {raised!r} does not say {each!r}"

    def assert_says(
        self, function: Callable[..., Sequence[str]], *args: Any, words: Sequence[str]
    ) -> None:
        """Assert that ``function(*args)`` returns a text for each of ``words``, which holds it."""
        for rank, texts in enumerate(self.run(function, *args)):
            for text, each in zip(texts, words, strict=True):
                assert each in text, f"rank {rank}: {text!r} does not say {each!r}"

    def run_losing(
        self, lost: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
    ) -> list[Any]:
        """As ``run_raising`` of a function that kills or stops the rank ``lost``.

        Returns the results of the others in rank order; the pool is then started anew.
        """
        others = [rank for rank in range(self.size) if rank != lost]
        return self.run_living(others, function, *args, timeout_s=timeout_s)

    def run_living(
        self,
        living: Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """As ``run_raising``, but only ``living`` ranks answer; the pool is then started anew."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((_catching, (function, *args)))
        deadline = time.monotonic() + timeout_s
        results = []
        try:
            for rank in living:
                if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"rank {rank}: no answer in {timeout_s:g} s")
                ok, value = self.pipes[rank].recv()
                if not ok:
                    raise RankError(f"rank {rank}:\n{value}")
                results.append(value)
            for lost in set(range(self.size)) - set(living):
                try:
                    answer = self.pipes[lost].recv() if self.pipes[lost].poll() else None
                except (EOFError, ConnectionResetError):  # it has died
                    continue
                if answer is not None:
                    raise RankError(f"rank {lost} answered: {answer[1]}")
        finally:
            self.close()
        return results

    def close(self) -> None:
        """Kill the processes; the next ``run`` starts new ones."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes = [], []


_pools: dict[int, Ranks] = {}


def pool(size: int) -> Ranks:
    """The one pool of ``size`` ranks of this test run."""
    if size not in _pools:
        _pools[size] = Ranks(size)
        atexit.register(_pools[size].close)
    return _pools[size]


def close_pools() -> None:
    """Kill all ranks: gloo's threads, some for each group, wake a hundred times a second."""
    for each in _pools.values():
        each.close()
