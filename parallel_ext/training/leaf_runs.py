"""Leaves in runs: each dp rank runs consecutive leaves, and all add their sums at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.ops import Group
from parallel_ext.ops.group import Range
from parallel_ext.parallel.state import ParallelState
from parallel_ext.sharding.layout import split
from parallel_ext.sharding.tree import Node, push
from parallel_ext.training.leaf_loop import LeafLoop, push_sums, wide

_CHUNK = 1 << 22  # numbers of a gradient that the dp ranks exchange at a time


class LeafRuns(LeafLoop):
    """The leaves of one global batch, of which each dp rank runs consecutive ones.

    Where experts are sharded over dp ranks, all of these run as many leaves as the one with most:
    one that has fewer is given its first leaf again, of which nothing counts.
    """

    def __init__(self, model: nn.Module, state: ParallelState, rows: int) -> None:
        super().__init__(model, state, rows)
        self._runs = split(len(self._ranges), state.mesh.dp_size)
        meet = self._experts[0].dp_ranks if self._experts else 1
        first = state.mesh.dp_rank // meet * meet
        self._meeting = range(first, first + meet)  # the dp ranks that share the experts of one
        self._nodes_of_experts: list[list[Node]] = [[] for _ in self._meeting]

    def _leaves_of_rounds(self) -> Sequence[tuple[int, bool]]:
        own = range(*self._runs[self._state.mesh.dp_rank])
        most = max(stop - start for start, stop in self._runs) if self._experts else len(own)
        return [(own[n], True) if n < len(own) else (0, False) for n in range(most)]

    def _end_round(self, number: int, loss: torch.Tensor) -> None:
        values = [loss.to(wide(loss.dtype)), *self._take_gradients(self._others)]
        start, stop = self._runs[self._state.mesh.dp_rank]
        if start + number < stop:
            push_sums(self._nodes, (start + number, 1, values), len(self._ranges))
        for dp_rank, nodes, *values in zip(
            self._meeting, self._nodes_of_experts, *self._take_apart(), strict=True
        ):
            start, stop = self._runs[dp_rank]
            if start + number < stop:
                push_sums(nodes, (start + number, 1, values), len(self._ranges))

    def _sums(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        mesh, count = self._state.mesh, len(self._ranges)
        like = [self._trained[0].new_empty(()), *self._others]
        self.loss, *gradients = _over_group(self._nodes, like, self._runs, count, mesh.dp)
        yield from zip(self._others, gradients, strict=True)
        nodes: list[Node] = []
        for node in chain.from_iterable(self._nodes_of_experts):
            push_sums(nodes, node, count)
        starts, stops = zip(*self._runs, strict=True)
        meet, shared = len(self._meeting), self._whole_shared
        runs = [*zip(starts[::meet], stops[meet - 1 :: meet], strict=True)]
        yield from zip(shared, _over_group(nodes, shared, runs, count, mesh.edp), strict=True)


def _over_group(
    nodes: list[Node],
    like: Sequence[torch.Tensor],
    runs: Sequence[Range],
    count: int,
    group: Group,
) -> list[torch.Tensor]:
    """Return sums over all leaves, from the nodes of each rank of a group.

    Args:
        like: tensors of the shapes and dtypes of what is summed.
        runs: of the leaves of each rank.
        group: whose ranks have all leaves.
    """
    if not like:
        return []
    if group.size == 1:
        ((_, _, values),) = nodes
        return values
    of_ranks: list[list[Node]] = [[] for _ in runs]
    for of_rank, run in zip(of_ranks, runs, strict=True):
        for number in range(*run):
            push(of_rank, (number, 1, None), count, lambda left, right: None)
    everyones = [(start, width) for of_rank in of_ranks for start, width, _ in of_rank]
    sums = []
    for index, each in enumerate(like):
        total = torch.empty(each.shape, dtype=wide(each.dtype), device=each.device)
        own = [value[index].flatten().split(_CHUNK) for _, _, value in nodes]
        for number, part in enumerate(total.view(-1).split(_CHUNK)):
            mine = torch.cat([part[:0], *(value[number] for value in own)])
            sizes = [len(of_rank) * len(part) for of_rank in of_ranks]
            values = ops.gather_from_region(mine, sizes, group).split(len(part))
            merged: list[Node] = []
            for (start, width), value in zip(everyones, values, strict=True):
                push(merged, (start, width, value), count, torch.add)
            ((_, _, whole),) = merged
            part.copy_(whole)
        sums.append(total)
    return sums
