"""What a forward makes once, and finds again where activation checkpointing recomputes it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from parallel_ext.nn.extended import extend
from parallel_ext.sharding._torch_private import disable_compiler

T = TypeVar("T")


class Recomputable:
    """A function that is run once in a forward, and again in each backward that recomputes it.

    Dropout of adapters and choices of experts are in every run what they were in the first. The
    functions that ``torch.utils.checkpoint.checkpoint`` is given are wrapped so by themselves. Wrap
    that of another implementation of activation checkpointing, again for each call of it.

    Args:
        function: what is recomputed; every run calls the same layers in the same order.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> torch.utils.checkpoint.checkpoint(Recomputable(torch.exp), x, use_reentrant=False).shape
        torch.Size([2])
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._has_run = False
        self._made: dict[Any, list[Any]] = {}  # in the first run, in order

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        outer = _running.get(thread)
        _running[thread] = _Run(self._made, not self._has_run, outer)
        self._has_run = True
        try:
            return self._function(*args, **kwargs)
        finally:
            if outer is None:
                del _running[thread]
            else:
                _running[thread] = outer


class _Run:
    """One run of a function; the first one may be part of a run of a function around it."""

    def __init__(self, made: dict[Any, list[Any]], is_first: bool, outer: _Run | None) -> None:
        self._made, self._is_first, self._outer = made, is_first, outer
        self._places: Counter[Any] = Counter()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        made, place = self._made.setdefault(key, []), self._places[key]
        if self._is_first:
            made.append(make() if self._outer is None else self._outer.once(key, make))
        elif place == len(made):
            raise RuntimeError(
                f"a layer runs {place + 1} times where backward recomputes a function, but ran "
                f"{place} times in its forward; recompute what the forward computed"
            )
        self._places[key] += 1
        return made[place]


_running: dict[int, _Run] = {}  # the innermost of each thread


def once(key: Any, make: Callable[[], T]) -> T:
    """Return ``make()``, or what it returned at this place of the forward that is recomputed.

    Args:
        key: the layer that asks. In a recomputation its first call gets what its first call got in
            the forward, and so on.
        make: makes the value.

    Raises:
        RuntimeError: the layer runs more often than in the forward.
    """
    return _once(key, make) if _running else make()  # torch.compile traces the latter


@disable_compiler
def _once(key: Any, make: Callable[[], T]) -> T:
    run = _running.get(threading.get_ident())
    return make() if run is None else run.once(key, make)


@disable_compiler
def _recomputable(
    plain: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return plain(Recomputable(function), *args, **kwargs)


def watch_checkpoints() -> None:
    """Let each function that torch's checkpointing is given be :class:`Recomputable`."""
    extend(checkpoint, _recomputable)
