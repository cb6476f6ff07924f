"""When functions of other packages are extended, and when their extensions stand aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_extensions: list[Callable[[], None]] = []


def register_extension(extension: Callable[[], None]) -> None:
    """Add a function to extend other packages, which each ``px.parallelize`` calls first."""
    if extension not in _extensions:
        _extensions.append(extension)


def run_extensions() -> None:
    """Call all functions that :func:`register_extension` was given."""
    for extension in _extensions:
        extension()


_ours: ContextVar[bool] = ContextVar("called by this package", default=False)


@contextmanager
def called_by_this_package() -> Iterator[None]:
    """Let extensions that refuse a function do what the function does, inside the context."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def is_called_by_this_package() -> bool:
    """Return whether :func:`called_by_this_package` is in force."""
    return _ours.get()
