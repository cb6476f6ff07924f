"""The control plane of a job: its ranks wait for each other, send small things, fail together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch.distributed as dist

from parallel_ext import _C
from parallel_ext.distributed import messages
from parallel_ext.distributed.barrier import MonitoredBarrier, forget, long_step
from parallel_ext.distributed.errors import (
    SHARED,
    CollectiveTimeout,
    PeerLostError,
    shared_class,
)
from parallel_ext.distributed.hosts import Host, Hosts
from parallel_ext.distributed.interfaces import cause, connect_within, hint
from parallel_ext.distributed.limited_store import GRACE_S, LimitedStore
from parallel_ext.distributed.new_keys import new_keys
from parallel_ext.ops import ALONE, Group

T = TypeVar("T")

_SHORT_BYTES = 504  # an object of so many travels in one message with its length


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks of the job; ``(0, 1)`` for a job of one process."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _new_groups(ranks_of: Sequence[Sequence[int]], **options: Any) -> dist.ProcessGroup | None:
    """Create all the groups, as every rank must, and return the one that holds this rank."""
    own = None
    for ranks in ranks_of:
        group = dist.new_group(list(ranks), **options)
        if dist.get_rank() in ranks:
            own = group
    return own


_plane_of: WeakValueDictionary[str, ControlPlane] = WeakValueDictionary()  # by name of a group


def _lost_ranks(group_name: str) -> str:
    """Return who is missing in a group where an op has failed, as the begin of a sentence."""
    if (plane := _plane_of.get(group_name)) is None:
        return ""
    missing = plane.lost(f"op in {group_name}", group_name)
    return f"every rank of its group must run it, but {missing}: "


class ControlPlane:
    """What all ranks of a job do beside training, over a gloo group and a store of their own.

    Args:
        timeout: seconds after which a rank that does not come is reported.
        beside: another plane, in whose process this one serves another thread, by a connection to
            the store of its own.

    Attributes:
        rank, world_size: of the whole job.
        timeout: as given.
        group: all ranks of the job.
        process_groups: all groups that were made, by name.
        members: the ranks of a group in words, for errors; "every rank" where there are none.
        hosts: on which the ranks run.

    Raises:
        CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
    """

    _made = 0

    def __init__(self, timeout: float, op_name: str, beside: ControlPlane | None = None) -> None:
        self.rank, self.world_size = world()
        self.timeout = timeout
        self._process = os.getpid()
        self.group = ALONE
        self.process_groups: dict[str, dist.ProcessGroup] = {}  # by group name; keeps them alive
        self.members: dict[Group, str] = {}
        self._long_steps = self._connections = 0
        self._calls: Counter[str] = Counter()  # on a control group, by its name
        self._store: LimitedStore | None = None
        self._barrier: MonitoredBarrier | None = None
        self._op_name = op_name
        self.hosts = Hosts([Host.own()])
        ControlPlane._made += 1
        if self.world_size == 1:
            return
        store = dist.group.WORLD.get_group_store()
        if beside is not None:
            store = store.clone()  # while one waits in it, another cannot ask
        own_keys, answer = new_keys(store, f"{ControlPlane._made}", self.rank, timeout, op_name)
        self._store = LimitedStore(own_keys, timeout)
        self._barrier = MonitoredBarrier(self._store, self.rank, self.world_size, timeout)
        # torch would name nobody who is missing. A rank alone in debugging would exchange more.
        self._barrier.wait(op_name + ", PARALLEL_EXT_DEBUG=1" * _C.order_check(), answer)
        self.group = self.new_group([range(self.world_size)], backend="gloo", group_desc="control")
        if beside is None:
            self.hosts = Hosts(self.all_gather_object(Host.own(), Host, op_name=op_name))
        else:  # whose thread is to be the first that uses the group
            self.hosts = beside.hosts
        self._barrier.hosts = self.hosts

    def new_group(self, ranks_of: Sequence[Sequence[int]], **options: Any) -> Group:
        """Create groups, and return the one that holds this rank; ``ALONE`` if none does.

        Every rank of the job calls it.

        Raises:
            CollectiveTimeout: ranks did not connect within ``timeout`` seconds; names them.
        """
        self._connections += 1
        try:
            wait = timedelta(seconds=self.timeout)
            process_group = connect_within(
                self.timeout, lambda: _new_groups(ranks_of, timeout=wait, **options)
            )
        except RuntimeError as error:
            groups = (ranks for ranks in ranks_of if self.rank in ranks)
            own = next(groups, [self.rank])  # who connect
            missing = self._barrier.lost(f"connection {self._connections}", own)
            raise CollectiveTimeout(
                f"{self._op_name}: ranks {', '.join(map(str, own))} must connect, but {missing}"
                f"{cause(error)}"
            ) from error
        if process_group is None:  # this rank is in none of them
            return ALONE
        group = Group.of(process_group)
        self.process_groups[group.name] = process_group
        _plane_of[group.name] = self
        _C.set_lost_ranks(_lost_ranks)
        return group

    def destroy(self) -> None:
        """Destroy this rank's groups, whatever the others do; nothing can use them afterwards."""
        groups, self.process_groups = self.process_groups, {}
        for process_group in groups.values():
            try:
                dist.destroy_process_group(process_group)
            except (AssertionError, ValueError):  # torch's words for a group that is gone already
                continue
        if self._store is not None:
            self._store.close()

    def close(self) -> None:
        """Give the groups and the keys in the store back, once every rank has called it.

        Raises:
            CollectiveTimeout: some ranks did not come; this one has left all the same.
        """
        try:
            if self._store is not None and self.process_groups:
                self.barrier("Mesh.close")
                forget(self._store, self._long_steps, self.rank)
                self._barrier.close()
        finally:
            self.destroy()

    def barrier(self, op_name: str) -> None:
        """Wait until every rank of the job is about to do ``op_name``.

        Raises:
            CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
            DisagreementError: all came, but to different things; names who is where.
        """
        if self._barrier is not None:
            self._refuse_fork(op_name)
            self._barrier.wait(op_name)

    def _refuse_fork(self, op_name: str) -> None:
        """Raise in a process forked from a rank, where a collective would wait for ever.

        The threads of gloo are not in it, and to the other ranks it would be this rank.
        """
        if self.world_size > 1 and os.getpid() != self._process:
            raise RuntimeError(
                f"{op_name}: this process was forked from rank {self.rank}, and cannot take its "
                "place; call it in the process that called px.init_mesh, as a worker of a "
                "DataLoader is not"
            )

    def lost(self, failed: str, group_name: str) -> str:
        """Return in words who of a group is missing, as :meth:`MonitoredBarrier.lost`."""
        ranks = dist.get_process_group_ranks(self.process_groups[group_name])
        return self._barrier.lost(failed, ranks)

    def run_collective(self, group: Group, op_name: str, call: Callable[[], T]) -> T:
        """Run a collective of a group, and raise with the missing ranks if it fails.

        Every rank of the group runs the same ones, in order.

        Raises:
            CollectiveTimeout: names the ranks that did not fail in the same collective.
            NotImplementedError: another thread of this process uses the group.
            RuntimeError: the group was destroyed, or this process was forked from the rank.
        """
        self._refuse_fork(op_name)
        self._calls[group.name] += 1
        try:
            return call()
        except ValueError as error:  # the group is not there
            raise RuntimeError(
                f"{op_name}: the process group of the job was destroyed before; end a job with "
                "px.wait_for_checkpoint if it saves asynchronously"
            ) from error
        except NotImplementedError:  # no rank is lost
            raise
        except RuntimeError as error:
            failed = f"{group.name}/{self._calls[group.name]}"
            missing = self.lost(failed, group.name)
            raise CollectiveTimeout(
                f"{op_name}: {self.members.get(group, 'every rank')} must call it and stay in "
                f"step, but {missing}{hint(error)}"
            ) from error

    def all_gather_bytes(
        self,
        record: bytes,
        op_name: str,
        group: Group | None = None,
        timeout: float | None = None,
    ) -> list[bytes]:
        """All-gather records of one size over a group, in rank order.

        Args:
            group: a gloo group made here; all ranks of the job when None.
            timeout: seconds, where it is not that of the job.
        """
        group, timeout = group or self.group, timeout or self.timeout
        return self.run_collective(
            group, op_name, lambda: _C.exchange_bytes(record, group.size, group.name, timeout)
        )

    def all_gather_object(
        self,
        value: Any,
        *records: type,
        op_name: str = "all_gather_object",
        group: Group | None = None,
    ) -> list[Any]:
        """All-gather ``value`` of every rank of a group, in rank order.

        Args:
            value: as :func:`messages.encode` takes it; nothing is pickled.
            records: the dataclasses and named tuples that may be in it.
            group: a gloo group made here; all ranks of the job when None.
        """
        group = group or self.group
        if group.size == 1:
            return [value]
        own = messages.encode(value, records)
        start = own[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0")
        sent = self.all_gather_bytes(len(own).to_bytes(8, "little") + start, op_name, group)
        lengths = [int.from_bytes(record[:8], "little") for record in sent]
        contents = [record[8:] for record in sent]
        if max(lengths) > _SHORT_BYTES:
            contents = self.all_gather_bytes(own.ljust(max(lengths), b"\0"), op_name, group)
        pairs = zip(contents, lengths, strict=True)
        return [messages.decode(each[:n], records) for each, n in pairs]

    def all_to_all_bytes(
        self,
        outgoing: Sequence[tuple[int, memoryview]],
        incoming: Sequence[tuple[int, memoryview]],
    ) -> None:
        """Send bytes to other ranks and receive theirs, all at the same time.

        Every rank of the job calls it, also with nothing to send or receive.

        Args:
            outgoing: (rank, bytes); two ranks pair theirs in order.
            incoming: (rank, bytes to fill).

        Raises:
            PeerLostError: one of them did not do its part within half of ``timeout``, so that
                :meth:`run_on_all`, in which this belongs, can name it within the other half.
        """
        group = self.group
        if group.size == 1:
            return

        def by_rank(parts: Sequence[tuple[int, memoryview]]) -> list[list[memoryview]]:
            lists: list[list[memoryview]] = [[] for _ in range(group.size)]
            for peer, part in parts:
                lists[peer].append(part)
            return lists

        try:
            _C.swap_bytes(
                by_rank(outgoing), by_rank(incoming), group.size, group.name, self.timeout / 2
            )
        except RuntimeError as error:
            raise PeerLostError(f"a transfer between ranks broke off: {error}") from error

    def _long_step(self) -> AbstractContextManager[None]:
        self._long_steps += 1
        return long_step(self._store, self._long_steps, self.rank, self.hosts, self.timeout)

    def run_on_all(self, op_name: str, fn: Callable[[], T], *, patient: bool = False) -> T:
        """Run ``fn`` on every rank of the job; if it raises on one, raise on all.

        Args:
            op_name: what the ranks are doing, for the error of those that did not fail themselves.
            fn: must not communicate in a way that its failure on one rank breaks.
            patient: a rank may take long as long as it lives; else each must be through within
                ``timeout`` seconds of the first.

        Returns:
            What ``fn`` returned, each rank its own.

        Raises:
            CollectiveTimeout: ranks were killed or stopped, or did not come in time; names them.
            Exception: what ``fn`` raised, on every rank: the error itself where it failed, an
                error of the same class that quotes it on the others. Of an error that is neither
                Python's nor this package's, the class is the nearest base that is, or else
                RuntimeError. Where ranks failed by different classes, it is the first rank's.
        """
        failure: Exception | None = None
        result: T | None = None
        long = patient and self._store is not None
        try:
            with self._long_step() if long else nullcontext():
                try:
                    result = fn()
                except Exception as error:
                    failure = error
        except TimeoutError as error:
            raise CollectiveTimeout(f"{op_name}: {error}") from failure
        peer_lost = isinstance(failure, PeerLostError)
        wait = self.timeout
        if peer_lost:
            wait = min(wait, 2 * GRACE_S)  # half of the time has gone already
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        record = b"1" if failure is None else b"0"
        try:
            if b"0" not in self.all_gather_bytes(record, op_name, timeout=wait):
                return result
            kind = None if failure is None else shared_class(failure)
            outcomes = self.all_gather_object((text, kind, peer_lost), op_name=op_name)
        except CollectiveTimeout as error:
            if failure is None:
                raise
            raise CollectiveTimeout(f"{error}; this rank had failed by {text}") from failure
        causes, broken = (
            [(f"rank {r}: {t}", k) for r, (t, k, lost) in enumerate(outcomes) if t and lost == own]
            for own in (False, True)
        )
        if not causes:
            seen = "; ".join(where for where, _ in broken)
            raise CollectiveTimeout(f"{op_name}: {seen}") from failure
        shared = SHARED[causes[0][1]]
        if isinstance(failure, shared) and not peer_lost:
            raise failure
        raise shared(f"{op_name} failed on {'; '.join(where for where, _ in causes)}") from failure
