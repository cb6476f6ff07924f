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
        ArgumentTypeError, ValueError: it is another, or none.
    """
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is not at least 1")
    return number


def tolerance(text: str) -> float:
    """Return the finite number of at least 0 that an option gives.

    Raises:
        ArgumentTypeError, ValueError: it is another, or none.
    """
    number = float(text)
    if not (math.isfinite(number) and number >= 0):
        raise ArgumentTypeError(f"{text} is not finite and at least 0")
    return number
