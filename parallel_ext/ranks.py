"""All ranks of a job: how they meet, exchange small things, and fail together."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from parallel_ext import _C
from parallel_ext.errors import (
    CollectiveTimeout,
    DisagreementError,
    PeerLostError,
    class_of_name,
    shared_class,
)
from parallel_ext.heartbeat import long_step
from parallel_ext.ops import ALONE, Group

T = TypeVar("T")

_SHORT_BYTES = 504  # an object of so many travels in one message with its length
_GRACE_S = 2.0  # how far apart in time ranks notice the same failure


def world() -> tuple[int, int]:
    """This rank and the number of ranks of the job."""
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
        own_connection: to the store, for another thread than the one that uses the first.

    Attributes:
        rank, world_size: of the whole job.
        timeout: as given.
        control: the group.
        process_groups: all groups that were made, by name.
    """

    _made = 0

    def __init__(self, timeout: float, own_connection: bool = False) -> None:
        self.rank, self.world_size = world()
        self.timeout = timeout
        self.control = ALONE
        self.process_groups: dict[str, dist.ProcessGroup] = {}  # by group name; keeps them alive
        self._meetings = self._long_steps = 0
        self._calls: Counter[str] = Counter()  # on a control group, by its name
        self._store: dist.Store | None = None
        self._wait = timedelta(seconds=timeout)
        Ranks._made += 1
        if self.world_size == 1:
            return
        everyone = list(range(self.world_size))
        self.control = self._group([everyone], backend="gloo", timeout=self._wait)
        store = self.process_groups[self.control.name].get_group_store()
        if own_connection:
            store = store.clone()  # while one waits in it, another cannot ask
        self._store = dist.PrefixStore(f"parallel_ext/{Ranks._made}", store)

    def _group(self, ranks_of: Sequence[Sequence[int]], **options: Any) -> Group:
        process_group = _new_groups(ranks_of, **options)
        if process_group is None:  # this rank is in none of them
            return ALONE
        group = Group.of(process_group)
        self.process_groups[group.name] = process_group
        return group

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
        if self._store is None:
            return
        meeting = f"meeting/{self._meetings}"
        self._meetings += 1
        self._store.set(f"{meeting}/{self.rank}", what)
        self._store.add(f"{meeting}/to {what}", 1)
        if self._store.add(f"{meeting}/arrived", 1) == self.world_size:
            self._forget(f"meeting/{self._meetings - 2}")
            self._store.set(f"{meeting}/all_here", "1")
        try:
            self._store.wait([f"{meeting}/all_here"], timedelta(seconds=self.timeout))
        except RuntimeError:  # a TCPStore raises DistStoreError, a FileStore its base class
            self._store.set(f"{meeting}/given_up", "1")
            raise CollectiveTimeout(
                f"{what}: every rank must call it, but "
                f"{self._absent(meeting, self.world_size) or 'a rank that died'} "
                f"did not within {self.timeout:g} s"
            ) from None
        if self._store.check([f"{meeting}/given_up"]):
            raise CollectiveTimeout(
                f"{what}: rank {self.rank} came later than {self.timeout:g} s after the others, "
                "who have given up waiting"
            )
        if self._store.add(f"{meeting}/to {what}", 0) != self.world_size:
            places = (self._store.get(f"{meeting}/{r}").decode() for r in range(self.world_size))
            seen = "; ".join(f"rank {rank}: {place}" for rank, place in enumerate(places))
            raise DisagreementError(f"the ranks are about to do different things: {seen}")

    def _forget(self, meeting: str) -> None:
        """Delete the keys of a meeting that every rank has left, so that the store stays small."""
        if self._store.check([f"{meeting}/0"]):
            whats = {self._store.get(f"{meeting}/{r}").decode() for r in range(self.world_size)}
            keys = [f"to {what}" for what in whats] + [str(r) for r in range(self.world_size)]
            for key in (*keys, "arrived", "all_here", "given_up"):
                self._store.delete_key(f"{meeting}/{key}")

    def _absent(self, prefix: str, size: int) -> str:
        """The ranks that left no mark under ``prefix``, in words; empty if there are none."""
        ranks = [str(rank) for rank in range(size) if not self._store.check([f"{prefix}/{rank}"])]
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""

    def _communicate(self, group: Group, what: str, call: Callable[[], T]) -> T:
        """Run a collective of a control group; when it fails, find out who is missing.

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
            failed = f"failed/{group.name}/{self._calls[group.name]}"
            try:
                self._store.set(f"{failed}/{group.rank}", "1")
                time.sleep(_GRACE_S)
                absent = self._absent(failed, group.size)
            except RuntimeError:  # the store lived in a process that is gone
                absent = "a rank that died"
            missing = f"{absent} did not" if absent else "one of them was too slow to do so"
            raise CollectiveTimeout(
                f"{what}: {self._members(group)} must call it and stay in step, but {missing} "
                f"within {self.timeout:g} s"
            ) from error

    def _members(self, group: Group) -> str:
        """Who must take part in a collective of a control group, in words."""
        return "every rank"

    def _exchange(self, group: Group, record: bytes, what: str, timeout: float) -> list[bytes]:
        return self._communicate(
            group, what, lambda: _C.exchange_bytes(record, group.size, group.name, timeout)
        )

    def exchange(self, record: bytes, what: str) -> list[bytes]:
        """Records of one size of all ranks of the job, in rank order: one all-gather.

        Raises:
            CollectiveTimeout: a rank did not come within ``timeout`` seconds; names it.
        """
        return self._exchange(self.control, record, what, self.timeout)

    def _gather(self, group: Group, value: Any, what: str) -> list[Any]:
        if group.size == 1:
            return [value]
        own = pickle.dumps(value)
        start = own[:_SHORT_BYTES].ljust(_SHORT_BYTES, b"\0")
        records = self._exchange(group, len(own).to_bytes(8, "little") + start, what, self.timeout)
        lengths = [int.from_bytes(record[:8], "little") for record in records]
        contents = [record[8:] for record in records]
        if max(lengths) > _SHORT_BYTES:
            contents = self._exchange(group, own.ljust(max(lengths), b"\0"), what, self.timeout)
        return [pickle.loads(each[:n]) for each, n in zip(contents, lengths, strict=True)]

    def gather_objects(self, value: Any) -> list[Any]:
        """``value`` of every rank of the job, in rank order."""
        return self._gather(self.control, value, "an exchange of objects")

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
            wait = min(wait, 2 * _GRACE_S)  # half of the time has gone already
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
