"""Attributes that have other values inside a block, and their own again behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object, or of a module, these values inside the block.

    Example:
        >>> import types
        >>> state = types.SimpleNamespace(count=1)
        >>> with temporarily(state, count=2):
        ...     state.count
        2
        >>> state.count
        1
    """
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


@contextmanager
def first_layers(model: nn.Module, path: str, count: int | None) -> Iterator[nn.ModuleList]:
    """Let a model have only the first ``count`` layers inside the block; all where it is None."""
    layers = model.get_submodule(path)
    first = layers[:count]
    model.set_submodule(path, first)
    try:
        yield first
    finally:
        model.set_submodule(path, layers)
