"""Values that options of the command line may have."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def existing(text: str) -> Path:
    """Return the path of an option; an ArgumentTypeError where nothing is there."""
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"{text} does not exist")
    return path


def positive(text: str) -> int:
    """Return the integer of an option; an ArgumentTypeError where it is not at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an option that gives a finite number for which ``fits`` is true.

    Of others it raises an ArgumentTypeError, which says what was ``expected``.
    """

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and fits(found)):
            raise ArgumentTypeError(f"expected {expected}, got {text!r}")
        return found

    return parse
