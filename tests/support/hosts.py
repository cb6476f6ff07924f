"""Two hosts on one machine: namespaces of their own, and a cable between them that can be cut."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

NAMES = ("host-a", "host-b")
INTERFACE = "cable"
TIMEOUT_S = 20
_PORT = 29517  # no other process is on a new host
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

_OWN = ["--net", "--uts", "--mount"]
_UNSHARE = ["unshare", *_OWN, "--pid", "--fork", "--mount-proc", "--kill-child"]
_START = """
hostname {name} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo up && exec sleep 3600
"""


@dataclass(frozen=True)
class Host:
    """A network, a name, mounts (/dev/shm, /proc) and process ids of their own.

    Attributes:
        name, address: of the host.
        process: the first process of the host, as its id is outside; without it all others end.
    """

    name: str
    address: str
    process: int

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one on the host, as root."""
        return ["nsenter", "--target", str(self.process), *_OWN, "--pid", *command]

    def run(self, *command: str) -> None:
        """Run a short command on the host."""
        _run(self.inside(*command))

    def link(self, state: str) -> None:
        """Take the host's interface ``"down"``: packets vanish, and nobody is told; or ``"up"``."""
        self.run("ip", "link", "set", INTERFACE, state)

    def own_directory(self, path: Path) -> None:
        """Let a directory be one of this host alone."""
        self.run("mount", "-t", "tmpfs", "tmpfs", str(path))

    def kill(self) -> None:
        """End all processes of the host at once."""
        os.kill(self.process, signal.SIGKILL)

    def enter(self) -> None:
        """Continue this process on the host, in a child; the parent ends with its exit code.

        To be called where the process has one thread.
        """
        opened = [os.open(f"/proc/{self.process}/ns/{n}", 0) for n in ("net", "uts", "mnt", "pid")]
        for descriptor in opened:
            if _LIBC.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
            os.close(descriptor)
        child = os.fork()  # since a process keeps its own id
        if child:
            os.closerange(3, 1024)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Hosts:
    """Two hosts, of which the first keeps the store of every job.

    Attributes:
        hosts: both.
        ranks_each: ranks of a job on each of them; consecutive ranks share a host.
        interface: what gloo is told to use; None leaves the choice to it.
    """

    hosts: tuple[Host, Host]
    ranks_each: int
    interface: str | None = INTERFACE

    def enter(self, rank: int) -> None:
        """Make this process a rank of a job, as torchrun would start it on its host."""
        host, local_rank = divmod(rank, self.ranks_each)
        self.hosts[host].enter()
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(2 * self.ranks_each),
            MASTER_ADDR=self.hosts[0].address,
            MASTER_PORT=str(_PORT),
        )
        if self.interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = self.interface


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def _host(name: str, address: str) -> Iterator[Host]:
    command = [*_UNSHARE, "sh", "-c", _START.format(name=name)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as outer:
        try:
            if outer.stdout.readline() != "up\n":
                raise OSError(f"{' '.join(command[:8])}: {outer.stderr.read().strip()}")
            (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            with open(f"/proc/{inner}/ns/net"):  # the cable stays when the host is killed
                yield Host(name, address, int(inner))
        finally:
            outer.kill()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a cable between them, for as long as the context lasts.

    Raises:
        OSError: this process may not make namespaces, or a command for them is missing.
    """
    with _host(NAMES[0], "10.77.0.1") as first, _host(NAMES[1], "10.77.0.2") as second:
        both = (first, second)
        ends = [["name", INTERFACE, "netns", str(host.process)] for host in both]
        _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for host in both:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.link("up")
        yield both


@lru_cache
def why_no_hosts() -> str:
    """Say why this machine does not let this process make two hosts; empty where it does."""
    try:
        with two_hosts():
            return ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def need_hosts() -> None:
    """Skip the test, with the reason, where this machine does not let it make two hosts."""
    if why_not := why_no_hosts():
        pytest.skip(f"two hosts need network, mount and process namespaces: {why_not}")
