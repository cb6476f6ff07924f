"""Fields of parsed JSON, each checked when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from parallel_ext.checkpoint.open_file import CheckpointError, shown


class Fields:
    """The fields of a JSON object, of which nothing is taken for granted.

    Args:
        value: what was parsed.
        where: the file and the place in it, for errors.

    Raises:
        CheckpointError: it is no object; every method raises it for a field that is wrong, with its
            name and what it holds.
    """

    def __init__(self, value: Any, where: str | Path) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: expected a JSON object, got {shown(value)}")
        self._value, self._where = value, where

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a field that is not what is expected."""
        return CheckpointError(
            f"{self._where}: {name} must be {expected}, got {shown(self._value.get(name))}"
        )

    def exactly(self, *names: str) -> None:
        """There are these fields and no others."""
        if self._value.keys() != set(names):
            raise CheckpointError(
                f"{self._where}: expected the fields {', '.join(sorted(names))}, got "
                f"{shown(sorted(self._value))}"
            )

    def number(self, name: str, below: int = 2**63) -> int:
        """A whole number of at least 0."""
        value = self._value.get(name)
        if type(value) is not int or not 0 <= value < below:
            raise self.wrong(name, "a whole number of at least 0")
        return value

    def truth(self, name: str) -> bool:
        """True or False."""
        value = self._value.get(name)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object, as it was parsed."""
        value = self._value.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value

    def of(self, name: str) -> Fields:
        """The fields of an object."""
        return Fields(self.object(name), f"{self._where}: {shown(name)}")

    def matching(self, name: str, pattern: re.Pattern[str]) -> str:
        """Text of which a pattern matches all."""
        value = self._value.get(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.wrong(name, f"text like {pattern.pattern}")
        return value

    def one_of(self, name: str, known: Collection[str]) -> str:
        """One of several words."""
        value = self._value.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"one of {shown(sorted(known))}")
        return value

    def fits(self, name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        """A value that fits."""
        value = self._value.get(name)
        if not fits(value):
            raise self.wrong(name, expected)
        return value

    def list_of(self, name: str, fits: Callable[[Any], bool], expected: str) -> list[Any]:
        """A list of which every element fits."""
        value = self._value.get(name)
        if not isinstance(value, list) or not all(fits(each) for each in value):
            raise self.wrong(name, f"a list of {expected}")
        return value
