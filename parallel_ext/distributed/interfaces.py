"""Let ranks connect in time, and hint at the network interface where they cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from parallel_ext.distributed.answer import Answer, start_daemon

T = TypeVar("T")

_PEER = re.compile(r"remote=\[([^\]]+)\]")
_NCCL_NETWORK = ("ncclSystemError", "ncclRemoteError", "ncclInternalError")


def hint(error: BaseException) -> str:
    """Return what to do about an error that a wrong network interface may cause, else ``""``."""
    text = str(error)
    if any(name in text for name in _NCCL_NETWORK):
        return (
            "; if NCCL took an interface that other hosts do not reach, set NCCL_SOCKET_IFNAME, "
            "for example NCCL_SOCKET_IFNAME=eth0"
        )
    if "Unable to find address for" in text:
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
        return f"; GLOO_SOCKET_IFNAME={chosen} must name an interface of this host: {text}"
    if "connectFullMesh" not in text:
        return ""
    peer = _PEER.search(text)
    set_it = (
        "set GLOO_SOCKET_IFNAME on every host to the interface by which the others reach it, for "
        "example GLOO_SOCKET_IFNAME=eth0"
    )
    if peer and peer[1].startswith(("127.", "::1")):
        return (
            f"; gloo has taken {peer[1]}, which no other host reaches, for the address of a host: "
            f"{set_it}"
        )
    address = f" at {peer[1]}" if peer else ""
    return f"; gloo could not connect to a rank{address}; if all are alive, {set_it}"


def cause(error: BaseException) -> str:
    """Return why this rank could not connect, as the end of a sentence about others.

    It is the :func:`hint`, if there is one; else what failed here, such as too many open files.
    """
    first_line = str(error).partition("\n")[0]
    return hint(error) or f"; this rank had failed by {type(error).__name__}: {first_line}"


def connect_within(seconds: float, connect: Callable[[], T], what: str = "connectFullMesh") -> T:
    """Run a call that connects ranks, on a thread of its own, and give it up after some seconds.

    For a rank that does not connect gloo waits five times its timeout, a store twice. The call has
    this thread's GPU, and its error is raised.

    Args:
        what: the call, for the error.

    Raises:
        OSError: this process has no room for another thread.
        RuntimeError: it has not ended in time.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return connect()

    answer, name = Answer(), "connecting ranks"
    start_daemon(name, name, answer.by, run)
    late = RuntimeError(f"{what} has not ended within {seconds:g} s")
    return answer.within(seconds, late)
