"""Memory that the ops keep from call to call."""

from parallel_ext import _C


def release_workspaces() -> int:
    """Give back the memory that the ops keep for their next calls on the CPU.

    Large results of the ops (8 MiB and more) lie in blocks that are used again when no tensor is
    left in them, up to 512 MiB in all: fresh memory costs more than what is done with it. What is
    in use stays.

    Returns:
        The number of bytes.

    Example:
        >>> released = release_workspaces()
        >>> release_workspaces()
        0
    """
    return _C.release_workspaces()
