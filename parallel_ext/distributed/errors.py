"""The errors that ranks share: one that a rank raises, the others raise as well."""

from __future__ import annotations

import builtins
import sys
import warnings
from collections.abc import Sequence

# By whose functions a user's line may have led here.
_PACKAGES = ("parallel_ext", "torch", "transformers", "accelerate", "peft", "trl")


class CollectiveTimeout(RuntimeError):  # noqa: N818 (the public name)
    """A function that every rank must call was not called by all of them in time."""


class PeerLostError(RuntimeError):
    """A transfer between two ranks broke off; ``ControlPlane.run_on_all`` finds who is missing."""


class DisagreementError(RuntimeError):
    """Ranks that must do the same thing were about to do different things."""


class CheckpointError(RuntimeError):
    """A file or directory of a saved model is not what it must be.

    Its text can be printed, whatever names the files hold: a lone surrogate, which no encoding has,
    is written as ``\\ud800``.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.encode("utf-8", "backslashreplace").decode())


def first_few(texts: Sequence[str], most: int = 4, between: str = ", ") -> str:
    """Return the first of several texts and the number of the others, joined for an error.

    Example:
        >>> first_few(["a", "b", "c"], most=2)
        'a, b, and 1 more'
    """
    shown = texts[:most]
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*shown, *more])


def warn_user(text: str) -> None:
    """Warn at the line, nearest on the stack, that is neither ours nor of what we extend."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def check_positive(what: str, value: object) -> None:
    """Raise a ValueError that begins with ``what`` unless a value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")


# Python's errors that are too wide to be caught, or that cannot be made of a text.
_NOT_SHARED = {
    *("Exception", "ExceptionGroup"),
    *("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError"),
}
SHARED: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (*vars(builtins).values(), CollectiveTimeout, DisagreementError, CheckpointError)
    if isinstance(error, type) and issubclass(error, Exception)
    if error.__name__ not in _NOT_SHARED
}
"""The classes that every rank can raise with a text, by the name that is sent to the others."""


def shared_class(error: Exception) -> str:
    """Return the name of the nearest class of an error that is among :data:`SHARED`."""
    return next((c.__name__ for c in type(error).__mro__ if c.__name__ in SHARED), "RuntimeError")
