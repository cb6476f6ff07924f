"""Read JSON of unknown origin, and check its fields."""

from __future__ import annotations

import gc
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safe_open import open_file, shown

MAX_TENSORS = 1_000_000
MAX_JSON_BYTES = 100_000_000  # the limit of the reference implementation for a header
MAX_OWN_JSON_BYTES = 64_000_000  # of a training checkpoint: parsed, it may be three times in memory
OFFSETS_WORD = b'"data_offsets"'  # once in the header of a safetensors file for each tensor
_MAX_NAME_LENGTH = 1024
_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False).encode


def read_content(path: Path, most: int = MAX_JSON_BYTES, links: bool = True) -> bytes:
    """Read a whole file that holds JSON, or a line.

    Args:
        most: bytes that it may have.

    Raises:
        CheckpointError: as :func:`open_file`, or the file is too large.
    """
    with open_file(path, links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path}: has {size} bytes, more than the {most} that it may")
        return file.read(size)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a saved model."""
    return parse_json(read_content(path), path)


def parse_json(text: bytes | bytearray, where: str | Path) -> dict[str, Any]:
    """Parse a JSON object that repeats no key, in bounded time and memory.

    Args:
        text: UTF-8.

    Raises:
        CheckpointError: it is not such an object, or has a key of more than 1024 characters.
    """

    def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(pairs)
        if len(parsed) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated = next(key for key, count in counts.items() if count > 1)
            raise CheckpointError(f"{where}: the key {shown(repeated)} occurs more than once")
        for key in parsed:
            if len(key) > _MAX_NAME_LENGTH:
                raise CheckpointError(
                    f"{where}: the name {shown(key)} has {len(key)} characters, more than "
                    f"{_MAX_NAME_LENGTH}"
                )
        return parsed

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise CheckpointError(f"{where}: not valid JSON: {shown(number)} is too large a number")
        return value

    def no_constant(constant: str) -> None:
        raise CheckpointError(f"{where}: not valid JSON: {constant} is no number")

    _check_number_of_values(text, where)
    try:
        with _no_collection():
            parsed = json.loads(
                text.decode("utf-8"),
                object_pairs_hook=without_repetition,
                parse_float=finite,
                parse_constant=no_constant,
            )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _check_number_of_values(text: bytes, where: Any) -> None:
    # Three bytes of text can become an object of 64. An entry of an index has one of these
    # characters, one of a header at most 16, unless its tensor has more than 10 dimensions.
    values = sum(text.count(character) for character in (b",", b"[", b"{"))
    if values > 2 * MAX_TENSORS + 16 * text.count(OFFSETS_WORD):
        raise CheckpointError(f"{where}: holds {values} values, far more than it has tensors")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Run the block without garbage collection, since parsing makes no garbage.

    The collector would look through all that was parsed again and again, for most of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def to_own_json(value: dict[str, Any], what: str) -> bytes:
    """Return the text for a JSON object that a load takes as a file of a training checkpoint.

    Raises:
        CheckpointError: as of :func:`to_json`; or it is so large that no load would take it.
    """
    text = to_json(value, what)
    if len(text) > MAX_OWN_JSON_BYTES:
        raise CheckpointError(
            f"{what} takes {len(text)} bytes as JSON, more than the {MAX_OWN_JSON_BYTES} that a "
            "load takes"
        )
    _check_number_of_values(text, what)
    return text


def to_json(value: dict[str, Any], what: str) -> bytes:
    """Return the one text for a JSON object: keys sorted, entries of the outer two levels in lines.

    Args:
        value: of dicts with text as keys, lists, text, finite numbers, booleans and None.

    Raises:
        CheckpointError: JSON would not give it back as it is; names the place and what is there.
    """
    _check(value, what)
    return (_in_lines(value, 2) + "\n").encode()


def _in_lines(value: Any, levels: int) -> str:
    # Not by ``indent``, which makes Python's encoder an order of magnitude slower.
    if levels == 0 or not isinstance(value, dict) or not value:
        return _encode(value)
    entries = (f"{_encode(key)}: {_in_lines(value[key], levels - 1)}" for key in sorted(value))
    return "{\n" + ",\n".join(entries) + "\n}"


def _check(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is str and len(key) > _MAX_NAME_LENGTH:
                raise CheckpointError(
                    f"{where} has a key of {len(key)} characters, more than {_MAX_NAME_LENGTH}"
                )
            if type(key) is not str:
                raise CheckpointError(
                    f"{where} has the key {shown(key)}, but in JSON only text is a key"
                )
            _check(inner, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, inner in enumerate(value):
            _check(inner, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"{where} is {value}, which is no number in JSON")
    elif not (value is None or isinstance(value, (str, int, float))):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, {shown(value)}, which JSON cannot hold; pass "
            "dicts, lists, text and numbers"
        )


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
        """Return the error for a field that is not what is expected."""
        return CheckpointError(
            f"{self._where}: {name} must be {expected}, got {shown(self._value.get(name))}"
        )

    def exactly(self, *names: str) -> None:
        """Raise unless the object has these fields and no others."""
        if self._value.keys() != set(names):
            raise CheckpointError(
                f"{self._where}: expected the fields {', '.join(sorted(names))}, got "
                f"{shown(sorted(self._value))}"
            )

    def fits(self, name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        """Return the field ``name``, a value for which ``fits`` is true."""
        value = self._value.get(name)
        if not fits(value):
            raise self.wrong(name, expected)
        return value

    def number(self, name: str, below: int = 2**63) -> int:
        """Return the field ``name``, a whole number from 0 to ``below - 1``."""
        expected = "a whole number of at least 0"
        return self.fits(name, lambda value: type(value) is int and 0 <= value < below, expected)

    def object(self, name: str) -> dict[str, Any]:
        """Return the field ``name``, an object, as it was parsed."""
        return self.fits(name, lambda value: isinstance(value, dict), "a JSON object")

    def of(self, name: str) -> Fields:
        """Return the fields of the object in the field ``name``."""
        return Fields(self.object(name), f"{self._where}: {shown(name)}")

    def matching(self, name: str, pattern: re.Pattern[str]) -> str:
        """Return the field ``name``, text of which ``pattern`` matches all."""
        expected = f"text like {pattern.pattern}"
        return self.fits(name, lambda v: isinstance(v, str) and pattern.fullmatch(v), expected)

    def one_of(self, name: str, known: Collection[str]) -> str:
        """Return the field ``name``, one of the words ``known``."""
        value = self._value.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"one of {shown(sorted(known))}")
        return value

    def list_of(self, name: str, fits: Callable[[Any], bool], expected: str) -> list[Any]:
        """Return the field ``name``, a list for each element of which ``fits`` is true."""
        return self.fits(
            name, lambda v: isinstance(v, list) and all(map(fits, v)), f"a list of {expected}"
        )
