"""A part of a store that is empty, since the store of torchrun outlives ranks that it starts again.

Nothing in a rank's environment says which start of the job it belongs to: on several hosts even
``TORCHELASTIC_RESTART_COUNT`` differs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from parallel_ext.distributed.errors import CollectiveTimeout
from parallel_ext.distributed.limited_store import LimitedStore, StoreLostError, store_lost


def new_keys(
    store: dist.Store, purpose: str, rank: int, timeout: float, op_name: str
) -> tuple[dist.Store, Callable[[], None] | None]:
    """Return a part of a store with no keys in it, the same one on all ranks.

    Rank 0 draws a name for it. Another rank takes a number, by which nobody has asked before, and
    waits until rank 0 has answered to that number.

    Args:
        purpose: of the keys; another one for each call that may run at the same time.
        timeout: seconds after which rank 0 counts as missing.

    Returns:
        The part; and on rank 0 what it must call again and again, until all ranks have come.

    Raises:
        CollectiveTimeout: rank 0 did not come, or the store cannot be reached.
    """
    store = dist.PrefixStore(f"parallel_ext/{purpose}", store)
    asked = LimitedStore(store, timeout)
    try:
        name = secrets.token_hex(8) if rank == 0 else _answered(asked, timeout)
    except RuntimeError as error:
        raise CollectiveTimeout(
            f"{op_name}: every rank must call it, but {store_lost(asked, error)}"
        ) from error
    if not name:
        raise CollectiveTimeout(
            f"{op_name}: every rank must call it, but rank 0 did not within {timeout:g} s"
        )
    return dist.PrefixStore(name, store), partial(_answer, asked, name) if rank == 0 else None


def _answer(asked: LimitedStore, name: str) -> None:
    """Answer to all numbers that rank 0 has not answered to, also to those of ranks before."""
    while _number(asked, "answered") < _number(asked, "numbers"):
        asked.set(f"answer/{asked.add('answered', 1)}", name)


def _number(store: LimitedStore, key: str) -> int:
    """Return a number without adding 0 to it, by which the file of a FileStore would grow."""
    return int(store.get(key)) if store.check([key]) else 0


def _answered(asked: LimitedStore, timeout: float) -> str:
    """Return what rank 0 answers to a number of this rank's own; empty if it does not in time."""
    key = f"answer/{asked.add('numbers', 1)}"
    try:
        asked.wait(key, timeout)
    except StoreLostError:
        raise
    except RuntimeError:  # it is late, or the next call fails too
        if not asked.check([key]):
            return ""
    name = asked.get(key).decode()
    asked.delete_key(key)
    return name
