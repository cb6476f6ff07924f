"""Numbers of hooks, which torch.compile compares between layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from parallel_ext.nn.temporarily import temporarily


@contextmanager
def numbered_by_module() -> Iterator[None]:
    """Number hooks that are registered inside the block by their order in their module alone.

    torch counts all hooks of the process, and torch.compile makes a graph for each of the numbers
    that it has met: a layer would be compiled as often as there are layers, and after eight of them
    no more. Numbers from -1 downwards are never those of torch.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(1, 1)
        >>> with numbered_by_module():
        ...     linear.register_forward_hook(print).id, linear.register_forward_hook(print).id
        (-1, -2)
    """
    of_torch = RemovableHandle.__init__

    def of_module(handle: RemovableHandle, hooks: Any, **options: Any) -> None:
        of_torch(handle, hooks, **options)
        handle.id = min((0, *hooks)) - 1

    with temporarily(RemovableHandle, __init__=of_module):
        yield
