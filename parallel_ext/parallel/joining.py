"""Let ranks join a save that only some call, as under ``if rank == 0:``; in force by ``px.patch``.

Saving needs all ranks. Those that do not call it are on the way to the next thing that all ranks
do, such as a forward. At each such place all ranks tell each other, in 9 bytes, whether they are
about to save, and where they are. If only some are to save, the others do so too, and then come to
their place again. So a rank never enters a collective which another one reaches only after its
save, or never.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import xxhash

from parallel_ext.distributed import messages
from parallel_ext.distributed.errors import CollectiveTimeout, DisagreementError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.temporarily import temporarily
from parallel_ext.ops import Group
from parallel_ext.sharding._torch_private import disable_compiler

_JOINED = ("save_pretrained", "write_directory")  # what a rank may ask others for
_OF_THIS_RANK = ("is_main_process", "save_function", "token")  # options that change nothing
_AS_LONG_AS_IT_TAKES_S = 7 * 24 * 3600.0

Key = tuple[int, ...]
"""Names a model or trainer on all ranks: its number, or that of what it was copied of, and when."""

_numbers = count()
_copies: Counter[Key] = Counter()
_known: WeakValueDictionary[Key, Any] = WeakValueDictionary()


class _Meetings:
    """The exchanges of all ranks under one ``px.patch``, on a group of their own."""

    def __init__(self, mesh: Mesh) -> None:
        self.control = mesh.control
        self.group: Group = mesh.control.new_group([list(range(mesh.world_size))], backend="gloo")
        self.are_met = False  # while all ranks do the same thing
        self.count = 0  # of exchanges, which all ranks have had
        self.last: dict[type, Any] = {}  # kept for a rank that saves what this one has dropped

    def together(self) -> AbstractContextManager[None]:
        """Let calls inside the block be those of all ranks, which need not meet again."""
        return temporarily(self, are_met=True)

    def meet(self, place: str, own: dict[str, Any] | None, timeout: float | None = None) -> bool:
        """Exchange who is about to save, and join them; return whether to meet again.

        Raises:
            NotImplementedError: the ranks that do not save cannot join those that do.
            DisagreementError: none saves, and they are at other places, such as one in a forward.
        """
        record = (b"0" if own is None else b"1") + xxhash.xxh3_64_digest(place.encode())
        records = self.control.all_gather_bytes(record, place, self.group, timeout)
        self.count += 1
        if len({each[:1] for each in records}) == 1:  # none saves, or all
            if own is None and len(set(records)) > 1:
                places = self.control.all_gather_object(place, op_name=place, group=self.group)
                seen = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(places))
                raise DisagreementError(
                    f"all ranks must go through the same calls, but are at {seen}; call it on "
                    "every rank"
                )
            return False
        asked = self.control.all_gather_object(own, op_name=place, group=self.group)
        ranks = [rank for rank, request in enumerate(asked) if request is not None]
        request = asked[ranks[0]]
        target = _known.get(tuple(request["target"]))
        served = all(asked[rank] == request for rank in ranks) and not request["why_not"]
        served = served and target is not None and request["method"] in _JOINED
        if not all(self.control.all_gather_object(served, op_name=place, group=self.group)):
            others = [rank for rank in range(len(asked)) if rank not in ranks]
            why = request["why_not"] or "it is another call, or of an object that is not there"
            raise NotImplementedError(
                f"{request['shown']}: only rank {', '.join(map(str, ranks))} called it, and rank "
                f"{', '.join(map(str, others))}, at {place}, cannot join: {why}; call it on every "
                "rank"
            )
        if own is None:
            with self.together():
                getattr(target, request["method"])(*request["args"], **request["kwargs"])
        return own is None


_meetings: list[_Meetings] = []  # one, or none


def start(mesh: Mesh) -> None:
    """Let ranks join each other's saves from here on; every rank calls it."""
    if mesh.world_size > 1:
        _meetings.append(_Meetings(mesh))


def stop() -> None:
    """Let every rank call all saves itself from here on."""
    _meetings.clear()


def may_meet() -> bool:
    """Return whether ranks join each other's saves, as they do under ``px.patch``."""
    return bool(_meetings)


def remember(target: Any, copied: Key = ()) -> Key:
    """Give a model or trainer a key that it has on all ranks, so that others join its saves.

    Args:
        target: what every rank makes, or a copy, which one rank may make alone: it has a key of
            what it is a copy of, and of when, so that the keys of others stay equal.
        copied: the key of what it is a copy of.
    """
    if copied:
        when = (copied[0], sum(each.count for each in _meetings))
        _copies[when] += 1
        key = (*when, _copies[when])
    else:
        key = (next(_numbers),)
    _known[key] = target
    for meetings in _meetings:
        meetings.last[type(target)] = target
    return key


@disable_compiler
def arrive(place: str) -> None:
    """Join the saves of other ranks, if any, before this rank enters a collective of all ranks.

    Every rank of the job comes here, or saves. Without ``px.patch`` it does nothing. ``place`` is
    the call, for errors.
    """
    for meetings in _meetings:
        while not meetings.are_met and meetings.meet(place, None):
            pass


def end() -> None:
    """Join the saves of other ranks until these have come to their ends too, or are gone.

    An error that ends this process lets it leave at once.
    """
    failed = getattr(sys, "last_value", None) is not None
    for meetings in [] if failed else list(_meetings):
        try:
            while meetings.meet("the end of the script", None, _AS_LONG_AS_IT_TAKES_S):
                pass
        except CollectiveTimeout:  # who is gone saves no more
            break
    stop()


def call_together(
    target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
) -> Any:
    """Make a call that needs every rank, and which ranks at another place join under ``px.patch``.

    Args:
        target: what :func:`remember` was given.
        method: of ``target``, which does what ``run`` does.
        args, kwargs: of ``method``; the first is a directory.
        run: the call on this rank, whose value is returned.
    """
    if not _meetings or _meetings[0].are_met:
        return run()
    meetings, shown = _meetings[0], f"{type(target).__name__}.{method}"
    meetings.meet(shown, _request(target, method, args, kwargs, shown))
    with meetings.together():
        return run()


def _request(
    target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], shown: str
) -> dict[str, Any]:
    key = next((key for key, each in _known.items() if each is target), ())
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_THIS_RANK}
    request = {"target": key, "method": method, "shown": shown, "why_not": None}
    args = (os.path.abspath(args[0]), *args[1:])  # of a rank that may be in another directory
    try:
        messages.encode((args, kwargs))
    except TypeError as error:
        return {**request, "why_not": str(error)}
    return {**request, "args": args, "kwargs": kwargs}
