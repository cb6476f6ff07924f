"""Hints on network interfaces, for errors of ranks of several hosts that cannot connect."""

from __future__ import annotations

import os
import re

_PEER = re.compile(r"remote=\[([^\]]+)\]")
_NCCL_NETWORK = ("ncclSystemError", "ncclRemoteError", "ncclInternalError")


def hint(error: BaseException) -> str:
    """Return what to do about an error that a wrong network interface may cause, else ``""``.

    Args:
        error: of gloo or NCCL.
    """
    text = str(error)
    if any(name in text for name in _NCCL_NETWORK):
        return (
            "; if NCCL took an interface that other hosts do not reach, set NCCL_SOCKET_IFNAME, "
            "for example NCCL_SOCKET_IFNAME=eth0"
        )
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen and chosen in text:
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
