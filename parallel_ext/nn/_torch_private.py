"""Private names of torch's autograd, for which it has no public ones; tried with torch 2.13."""

from __future__ import annotations

from collections.abc import Callable

import torch


def running_backward() -> int:
    """Return the number of the backward that this thread runs, -1 outside of one.

    Without it nobody could tell a forward from one that a backward recomputes, nor a backward from
    an earlier one that has raised, after which no callback runs.
    """
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Let the backward that runs call ``callback`` once, after all its gradients are there.

    Gradients that are sums over ranks are final when ``backward()`` returns; the public hooks run
    for one tensor or node each, and none after the last one.

    Raises:
        RuntimeError: no backward runs in this thread.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
