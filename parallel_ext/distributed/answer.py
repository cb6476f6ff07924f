"""What a call on another thread returns or raises, for a caller that does not wait for ever."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


class Answer:
    """The result of one call, handed from the thread that makes it to the one that waits for it.

    Example:
        >>> import threading
        >>> answer = Answer()
        >>> threading.Thread(target=answer.by, args=(max, 2, 3)).start()
        >>> answer.within(5.0, TimeoutError())
        3
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

    def by(self, call: Callable[..., Any], *args: Any) -> None:
        """Make the call, and hand over what it returns or raises."""
        try:
            self._queue.put((call(*args), None))
        except Exception as error:
            self._queue.put((None, error))

    def within(self, seconds: float, late: Exception) -> Any:
        """Return what the call returned, or raise what it raised; raise ``late`` if it is late."""
        try:
            value, error = self._queue.get(timeout=seconds)
        except Empty:
            raise late from None
        if error is not None:
            raise error
        return value


def start_daemon(
    name: str, what_for: str, target: Callable[..., None], *args: Any
) -> threading.Thread:
    """Start a thread that lets its process end, and return it.

    Args:
        name: of the thread.
        what_for: who needs it, for the error.
        target, args: what it runs.

    Raises:
        OSError: this process has no room for another thread.
    """
    thread = threading.Thread(target=target, args=args, daemon=True, name=name)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN, f"no thread for {what_for}, since {error}; see ulimit -u and -v"
        ) from error
    return thread
