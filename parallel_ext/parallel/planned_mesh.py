"""A rank of a job that nobody has started, as plans see it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from parallel_ext.distributed.control import ControlPlane
from parallel_ext.ops import ALONE, Group


class PlannedMesh:
    """A rank of a mesh that nobody has started: groups have a size, and communicate nothing.

    Attributes:
        period: number of ranks after which those with the same shards follow in the same order.
    """

    def __init__(self, world: int, tp: int, ep: int, rank: int = 0) -> None:
        self.tp_size, self.ep_size, self.world_size, self.rank = tp, ep, world, rank
        self.dp_size, self.edp_size = world // tp, world // ep
        self.dp_rank, self.tp_rank = divmod(rank, tp)
        self.edp_rank, self.ep_rank = divmod(rank, ep)
        self.period = math.lcm(tp, ep)
        self.device = torch.device("meta")
        self.control = ControlPlane(timeout=1, op_name="plan")  # of this process alone
        self.tp, self.ep = _group("tp", tp, self.tp_rank), _group("ep", ep, self.ep_rank)
        self.dp = _group("dp", self.dp_size, self.dp_rank)
        self.edp = _group("edp", self.edp_size, self.edp_rank)
        if tp == world and ep == 1:  # the same ranks are one group
            self.edp = self.tp

    def extremes(self) -> list[int]:
        """Return the ranks among which those with the most and the fewest bytes are."""
        return [*range(self.period), *range(self.world_size - self.period, self.world_size)]

    def first_and_last(self) -> tuple[int, int]:
        """Return the first and the last rank that have the shards of this one."""
        place = self.rank % self.period
        return place, place + self.world_size - self.period

    def tp_subgroup(self, partition: Sequence[Sequence[int]]) -> Group:
        """Return the group that this rank has in a partition of the tp ranks."""
        own = next(ranks for ranks in partition if self.tp_rank in ranks)
        return _group("tp", len(own), own.index(self.tp_rank))


def _group(name: str, size: int, rank: int) -> Group:
    return Group(name, size, rank) if size > 1 else ALONE
