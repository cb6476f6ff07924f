"""The hosts of a job: which ranks run on which, and whether a directory is the same on all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another after every start, on every machine


class Host(NamedTuple):
    """A machine, or a container on one.

    Attributes:
        name: of the host; perhaps that of another as well.
        machine: an id of the machine since its last start.
        mounts: an id of what is mounted where, which containers on one machine do not share.
    """

    name: str
    machine: str
    mounts: str = ""

    @classmethod
    def own(cls) -> Host:
        """Return the host of this process."""
        return cls(socket.gethostname(), machine(), _mounts())


def machine() -> str:
    """Return an id of this machine, another one after every start."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _mounts() -> str:
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:  # no /proc: nothing tells it from another
        return ""


class Hosts:
    """Where the ranks of a job run.

    Attributes:
        several: whether there is more than one.
    """

    def __init__(self, of_ranks: Sequence[Host]) -> None:
        self._of_ranks = of_ranks
        self.several = len(set(of_ranks)) > 1

    @classmethod
    def unknown(cls, world_size: int) -> Hosts:
        """Return hosts of which nothing is known, as of ranks that have not yet met."""
        return cls([Host("", "")] * world_size)

    def __len__(self) -> int:
        return len(self._of_ranks)

    def name(self, rank: int) -> str:
        """Return the name of the host of a rank."""
        return self._of_ranks[rank].name

    def in_words(self, ranks: Iterable[int]) -> str:
        """Return ranks in words, with their hosts if there are several; empty for no ranks.

        Example:
            >>> Hosts([Host("a", "1"), Host("b", "2"), Host("b", "2")]).in_words([1, 2])
            'ranks 1, 2 on host b'
        """
        by_host: dict[Host | None, list[int]] = {}
        for rank in ranks:
            of_rank = self._of_ranks[rank]
            host = Host(of_rank.name, of_rank.machine) if self.several else None
            by_host.setdefault(host, []).append(rank)
        return " and ".join(
            f"rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
            + (f" on host {host.name}" if host else "")
            for host, own in by_host.items()
        )
