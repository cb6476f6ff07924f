"""Counts of what one rank's forwards have routed, added up until they are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from parallel_ext import _C
from parallel_ext.sharding._torch_private import running_backward

# The ops that bring rows of a mixture to other ranks.
_EXCHANGES = (
    *("moe_dispatch", "moe_dispatch_backward"),
    *("moe_combine", "moe_combine_backward"),
)


def _traffic() -> tuple[int, int]:
    """Return the bytes that this process has sent in exchanges of rows, and their microseconds."""
    counts = _C.collective_counts()
    return tuple(
        sum(counts.get(f"{op}/{what}", 0) for op in _EXCHANGES) for what in ("bytes", "us")
    )


def _since(before: tuple[int, int]) -> tuple[int, int]:
    """Return the traffic since ``before``; a counter that was reset meanwhile began again at 0."""
    pairs = zip(_traffic(), before, strict=True)
    return tuple(now - then if now >= then else now for now, then in pairs)


class RoutingCounter:
    """A counter, for ``RoutingMetrics``, of what the layers of one rank route in training.

    It never waits. A forward that a backward recomputes has been counted before; what it sends
    again has not.

    Args:
        num_layers: with a mixture of experts.
        num_experts: E, of each layer.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._choices = [[0] * num_experts for _ in range(num_layers)]  # of this rank's tokens
        self._unread: dict[int, torch.Tensor] = {}  # by layer, of them those that lie on a GPU
        self._rows = [0] * num_layers  # of this rank's experts
        self._most_rows = 0  # of them in one layer of one forward, ever
        self._is_aside = False
        self._start, self._traffic_aside = _traffic(), (0, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # nobody asks for the counts of a copy

    def observer(self, layer: int) -> partial[None]:
        """Return the function that the routing of a layer calls in each forward."""
        return partial(self._add, layer)

    def _add(self, layer: int, choices: Sequence[int] | torch.Tensor, rows: int) -> None:
        if self._is_aside or running_backward() != -1:  # recomputed in backward
            return
        if isinstance(choices, torch.Tensor):
            self._unread[layer] = choices + self._unread.get(layer, 0)
        else:
            self._add_choices(layer, choices)
        self._rows[layer] += rows
        self._most_rows = max(self._most_rows, rows)

    def _add_choices(self, layer: int, choices: Sequence[int]) -> None:
        own = self._choices[layer]
        for expert, count in enumerate(choices):
            own[expert] += count

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let forwards inside the context not count."""
        outermost, before = not self._is_aside, _traffic()
        self._is_aside = True
        try:
            yield
        finally:
            if outermost:
                self._is_aside = False
                pairs = zip(self._traffic_aside, _since(before), strict=True)
                self._traffic_aside = tuple(a + b for a, b in pairs)

    def take(self) -> list[int]:
        """Return the counts since the last call, of equal length on every rank, and reset them.

        Returns:
            [most rows of this rank's experts in one layer of one forward, ever;
            bytes sent to other ranks; microseconds in exchanges;
            rows of this rank's experts, by layer;
            choices of this rank's tokens, by layer and expert].
        """
        for layer, unread in self._unread.items():
            self._add_choices(layer, unread.tolist())
        self._unread = {}
        traffic = [a - b for a, b in zip(_since(self._start), self._traffic_aside, strict=True)]
        choices = [count for layer in self._choices for count in layer]
        record = [self._most_rows, *traffic, *self._rows, *choices]
        self._choices = [[0] * len(layer) for layer in self._choices]
        self._rows = [0] * len(self._rows)
        self._start, self._traffic_aside = _traffic(), (0, 0)
        return record
