"""All ranks of a job: how they meet, exchange small things, and fail together."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from parallel_ext import _C
from parallel_ext.distributed import messages
from parallel_ext.distributed.errors import (
    CollectiveTimeout,
    PeerLostError,
    class_of_name,
    shared_class,
)
from parallel_ext.distributed.meetings import GRACE_S, Meetings, forget, hint, long_step
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


class Ranks:
    """All ranks of a job, over a gloo group and a store of their own.

    Args:
        timeout: seconds after which a rank that does not come is reported.
        what: the function that every rank must call for it, for errors.
        own_connection: to the store, for another thread than the one that uses the first.

    Attributes:
        rank, world_size: of the whole job.
        timeout: as given.
        control: the group.
        process_groups: all groups that were made, by name.

    Raises:
        CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
    """

    _made = 0
    live: weakref.WeakSet[Ranks] = weakref.WeakSet()

    def __init__(self, timeout: float, what: str, own_connection: bool = False) -> None:
        self.rank, self.world_size = world()
        self.timeout = timeout
        self.control = ALONE
        self.process_groups: dict[str, dist.ProcessGroup] = {}  # by group name; keeps them alive
        self._long_steps = self._connections = 0
        self._calls: Counter[str] = Counter()  # on a control group, by its name
        self._store: dist.Store | None = None
        self._meetings: Meetings | None = None
        self._what = what
        self._wait = timedelta(seconds=timeout)
        Ranks._made += 1
        Ranks.live.add(self)
        if self.world_size == 1:
            return
        store = dist.group.WORLD.get_group_store()
        if own_connection:
            store = store.clone()  # while one waits in it, another cannot ask
        self._store = dist.PrefixStore(f"parallel_ext/{Ranks._made}", store)
        self._meetings = Meetings(self._store, self.rank, self.world_size, timeout)
        self.meet(what)  # torch would name nobody who is missing when groups are made
        everyone = list(range(self.world_size))
        self.control = self._group([everyone], backend="gloo", timeout=self._wait)

    def _group(self, ranks_of: Sequence[Sequence[int]], **options: Any) -> Group:
        self._connections += 1
        try:
            process_group = _new_groups(ranks_of, **options)
        except RuntimeError as error:
            own = next(ranks for ranks in ranks_of if self.rank in ranks)  # who connect
            missing = self._meetings.lost(f"connection {self._connections}", self.rank, own)
            raise CollectiveTimeout(
                f"{self._what}: ranks {', '.join(map(str, own))} must connect, but {missing} "
                f"within {self.timeout:g} s{hint(error)}"
            ) from error
        if process_group is None:  # this rank is in none of them
            return ALONE
        group = Group.of(process_group)
        self.process_groups[group.name] = process_group
        return group

    def release(self) -> None:
        """Destroy this rank's groups, whatever the others do; nothing can use them afterwards."""
        groups, self.process_groups = self.process_groups, {}
        for process_group in groups.values():
            try:
                dist.destroy_process_group(process_group)
            except (AssertionError, ValueError):  # torch's words for a group that is gone already
                continue

    def leave(self) -> None:
        """Give the groups and the keys in the store back, once every rank has called it.

        Raises:
            CollectiveTimeout: some ranks did not come; this one has left all the same.
        """
        try:
            if self._store is not None and self.process_groups:
                self.meet("Mesh.close")
                forget(self._store, self._long_steps, self.rank)
                self._meetings.close()
        finally:
            self.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # copies of a model live on the same ranks

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a parallel model cannot be pickled, since it holds the groups of the job; "
            "model.save_pretrained, px.save_checkpoint and model.state_dict() serve for files"
        )

    def meet(self, what: str) -> None:
        """Wait until every rank of the job is about to do ``what``.

        Raises:
            CollectiveTimeout: some ranks did not come within ``timeout`` seconds; names them.
            DisagreementError: all came, but to different things; names who is where.
        """
        if self._meetings is not None:
            self._meetings.meet(what)

    def communicate(self, group: Group, what: str, call: Callable[[], T]) -> T:
        """Run a collective of a group, and raise with the missing ranks if it fails.

        Every rank of the group runs the same ones, in order.

        Raises:
            CollectiveTimeout: names the ranks that did not fail in the same collective.
        """
        self._calls[group.name] += 1
        try:
            return call()
        except ValueError as error:  # the group is not there
            raise RuntimeError(
                f"{what}: the process group of the job was destroyed before; end a job with "
                "px.wait_for_checkpoint if it saves asynchronously"
            ) from error
        except RuntimeError as error:
            failed = f"{group.name}/{self._calls[group.name]}"
            missing = self._meetings.lost(failed, group.rank, range(group.size))
            raise CollectiveTimeout(
                f"{what}: {self._members(group)} must call it and stay in step, but {missing} "
                f"within {self.timeout:g} s"
            ) from error

    def _members(self, group: Group) -> str:
        """Return in words who must take part in a collective of a control group."""
        return "every rank"

    def _exchange(self, group: Group, record: bytes, what: str, timeout: float) -> list[bytes]:
        return self.communicate(
            group, what, lambda: _C.exchange_bytes(record, group.size, group.name, timeout)
        )

    def exchange(self, record: bytes, what: str) -> list[bytes]:
        """All-gather records of one size over all ranks of the job, in rank order.

        Raises:
            CollectiveTimeout: a rank did not come within ``timeout`` seconds; names it.
        """
        return self._exchange(self.control, record, what, self.timeout)

    def _gather(self, group: Group, value: Any, what: str, records: Sequence[type] = ()) -> list:
        if group.size == 1:
            return [value]
        own = messages.encode(value, records)
        start = own[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0")
        sent = self._exchange(group, len(own).to_bytes(8, "little") + start, what, self.timeout)
        lengths = [int.from_bytes(record[:8], "little") for record in sent]
        contents = [record[8:] for record in sent]
        if max(lengths) > _SHORT_BYTES:
            contents = self._exchange(group, own.ljust(max(lengths), b"\0"), what, self.timeout)
        pairs = zip(contents, lengths, strict=True)
        return [messages.decode(each[:n], records) for each, n in pairs]

    def gather_objects(self, value: Any, *records: type) -> list[Any]:
        """Gather ``value`` of every rank of the job on each rank, in rank order.

        Args:
            value: as :func:`messages.encode` takes it; nothing is pickled.
            records: the dataclasses and named tuples that may be in it.
        """
        return self._gather(self.control, value, "an exchange of objects", records)

    def swap(
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
                :meth:`together`, in which this belongs, can name it within the other half.
        """
        group = self.control
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
        return long_step(self._store, self._long_steps, self.rank, self.world_size, self.timeout)

    def together(self, what: str, action: Callable[[], T], *, patient: bool = False) -> T:
        """Run ``action`` on every rank of the job; if it raises on one, raise on all.

        Args:
            what: what the ranks are doing, for the error of those that did not fail themselves.
            action: must not communicate in a way that its failure on one rank breaks.
            patient: a rank may take long as long as it lives; else each must be through within
                ``timeout`` seconds of the first.

        Returns:
            What ``action`` returned, each rank its own.

        Raises:
            CollectiveTimeout: ranks were killed or stopped, or did not come in time; names them.
            Exception: what ``action`` raised, on every rank: the error itself where it failed, an
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
                    result = action()
                except Exception as error:
                    failure = error
        except TimeoutError as error:
            raise CollectiveTimeout(f"{what}: {error}") from failure
        peer_lost = isinstance(failure, PeerLostError)
        wait = self.timeout
        if peer_lost:
            wait = min(wait, 2 * GRACE_S)  # half of the time has gone already
        text = failure and f"{type(failure).__name__}: {failure}"
        try:
            if b"0" not in self._exchange(self.control, b"0" if failure else b"1", what, wait):
                return result
            kind = failure and shared_class(failure)
            outcomes = self._gather(self.control, (text, kind, peer_lost), what)
        except CollectiveTimeout as error:
            if failure is None:
                raise
            raise CollectiveTimeout(f"{error}; this rank had failed by {text}") from failure
        causes, broken = (
            [(f"rank {r}: {t}", k) for r, (t, k, lost) in enumerate(outcomes) if t and lost == own]
            for own in (False, True)
        )
        if not causes:
            told = "; ".join(where for where, _ in broken)
            raise CollectiveTimeout(f"{what}: {told}") from failure
        shared = class_of_name(causes[0][1])
        if isinstance(failure, shared) and not peer_lost:
            raise failure
        raise shared(f"{what} failed on {'; '.join(where for where, _ in causes)}") from failure
