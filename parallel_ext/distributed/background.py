"""Work that all ranks do behind training, each on a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from parallel_ext.distributed.control import ControlPlane
from parallel_ext.distributed.errors import warn_user

_NICE = 10  # of 19: training comes first where there are fewer cores than threads


class Background:
    """One piece of work at a time, which every rank of the job does on a thread of its own.

    The threads communicate over a group and a store connection of their own, so that they are in
    nobody's way. The process does not end before its thread.

    Args:
        beside: of the ranks, for what they do themselves.
    """

    def __init__(self, beside: ControlPlane) -> None:
        self._beside = beside
        self._control: ControlPlane | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def connect(self) -> None:
        """Make the group of the threads; every rank calls it, before :meth:`start`."""
        if self._control is None:
            timeout = self._beside.timeout
            self._control = ControlPlane(timeout, "an asynchronous save", self._beside)

    def start(self, op_name: str, work: Callable[[ControlPlane], None]) -> None:
        """Start work on this rank's thread; every rank calls it, after :meth:`finish`.

        Args:
            op_name: what the ranks do; the name of the thread.
            work: gets the threads' control plane. When it fails, its error is a warning at once.
        """

        def run() -> None:
            try:
                own = threading.get_native_id()  # in Linux the thread alone
                with suppress(OSError):  # of a job that is nicer already
                    os.setpriority(os.PRIO_PROCESS, own, _NICE)
                work(self._control)
            except Exception as error:
                self._failure = error
                warn_user(f"in the background: {error}")

        thread = threading.Thread(target=run, name=op_name)
        thread.start()
        self._thread = thread

    @property
    def busy(self) -> bool:
        """Return whether work was started that nobody has waited for; equal on all ranks."""
        return self._thread is not None

    def close(self) -> None:
        """Give the threads' group back, if any; every rank calls it, after :meth:`finish`."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def destroy(self) -> None:
        """Wait until no work runs, and destroy the threads' group, whatever other ranks do."""
        self.join()
        if self._control is not None:
            self._control.destroy()

    def join(self) -> None:
        """Wait until no work runs, without raising its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Wait until no work runs, and raise its error if it failed."""
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
