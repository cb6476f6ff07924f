"""A process group as the ops take it."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

Range = tuple[int, int]


class Group(NamedTuple):
    """A process group as the ops take it: plain data, so that modules copy and pickle.

    Attributes:
        name: what ``torch.distributed`` registered the group as; empty for a rank that is alone. A
            group of one rank with a name does communicate, as no group of :meth:`of` does.
        size: number of ranks.
        rank: this process's position.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """Return the handle of a live process group; ``ALONE`` for one of a single rank."""
        if process_group.size() == 1:
            return ALONE
        return cls(process_group.group_name, process_group.size(), process_group.rank())


ALONE = Group("", 1, 0)
"""The group of one process: the ops communicate nothing."""
