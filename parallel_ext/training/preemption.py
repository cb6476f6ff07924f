"""End a job that is sent a SIGTERM, at the same step on all ranks."""

from __future__ import annotations

import os
import signal
from types import FrameType

from torch import nn

from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.state import state_of

# Plain flags: an Event takes a lock to be set, and a second signal comes while the first has it.
_requested = False  # that this process was sent a SIGTERM
_listening = False


def _listen() -> None:
    """Let SIGTERM set the flag, then call the earlier handler, if there was one."""
    global _listening
    before, listener = signal.getsignal(signal.SIGTERM), os.getpid()

    def remember(number: int, frame: FrameType | None) -> None:
        if os.getpid() != listener:  # a forked process, such as one that loads data, is to end
            signal.signal(number, before or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        global _requested
        _requested = True
        if callable(before):
            before(number, frame)

    try:
        signal.signal(signal.SIGTERM, remember)
    except ValueError:
        raise RuntimeError(
            "stop_requested: only the main thread of a process can listen to signals; call it there"
        ) from None
    _listening = True


def stop_requested(model: nn.Module) -> bool:
    """Return whether any rank has been sent a SIGTERM; the answer is equal on every rank.

    Every rank calls it at the end of each step: one exchange of a byte. From the first call on a
    SIGTERM does not end the process, but is remembered, so that all ranks can save the same step
    and leave. Call it once before the first step as well. ``torchrun`` passes the signal on and
    kills what is still there 30 s later, or ``--shutdown-timeout`` where it has that option.

    Args:
        model: a parallel model.

    Returns:
        True from the first step after the signal on, on all ranks.

    Raises:
        CollectiveTimeout: not all ranks called it; names those that did not.
        RuntimeError: called on another thread than the main one.

    Example:
        >>> if stop_requested(model):  # doctest: +SKIP
        ...     save_checkpoint("ckpts", step, model, optimizer)
        ...     break
    """
    if not _listening:
        _listen()
    arrive("stop_requested")
    mesh = state_of(model).mesh
    return b"1" in mesh.control.all_gather_bytes(b"1" if _requested else b"0", "stop_requested")


preempted = stop_requested  # an alias
