"""Values that options of the command line may have."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from pathlib import Path


def existing(text: str) -> Path:
    """Return the path that an option gives.

    Raises:
        ArgumentTypeError: nothing is there.
    """
    path = Path(text)
    if not path.exists():
        raise ArgumentTypeError(f"{text} does not exist")
    return path


def positive(text: str) -> int:
    """Return the integer of at least 1 that an option gives.

    Raises:
        ArgumentTypeError: it is another, or none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def tolerance(text: str) -> float:
    """Return the finite number of at least 0 that an option gives.

    Raises:
        ArgumentTypeError: it is another, or none.
    """
    number = _number(text)
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return number


def gigabytes(text: str) -> float:
    """Return the finite number above 0 that an option gives.

    Raises:
        ArgumentTypeError: it is another, or none.
    """
    number = _number(text)
    if not (math.isfinite(number) and number > 0):
        raise ArgumentTypeError(f"expected a number of GB above 0, got {text!r}")
    return number


def _number(text: str) -> float:
    """Return a number; NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
