"""What JSON has no word for: objects that say of what type a value was, and nothing else.

The states of schedulers and the options of optimizers hold infinities, tuples, counters with
numbers as keys, tensors. In JSON such a value is an object whose ``$type`` is one of

- ``float``: ``value`` is "inf", "-inf" or "nan",
- ``tuple``: ``items`` is a list,
- ``dict``, ``Counter``: ``items`` is a list of pairs; for keys that are not text,
- ``tensor``: ``dtype`` as in safetensors, ``shape``, ``values`` as one list.

Everything else is as JSON has it. No other type is written or read, and nothing is ever called by
its name.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from parallel_ext.checkpoint.open_file import CheckpointError, shown
from parallel_ext.checkpoint.safetensors_file import DTYPES
from parallel_ext.checkpoint.safetensors_writer import DTYPE_NAMES

_TAG = "$type"
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DICTS = {"dict": dict, "Counter": Counter}
_MOST_NUMBERS = 1000  # of a tensor; what is larger belongs into a file of tensors


def encode(value: Any, what: str) -> Any:
    """A value as JSON that :func:`decode` makes the same value of, types included.

    Args:
        value: None, or of the types bool, int, float, str, list, tuple, dict, Counter and small
            tensors, nested as they may be.
        what: what it is, for the error.

    Raises:
        CheckpointError: there is something else in it; names the place and what is there.

    Example:
        >>> encode({"best": float("inf"), "betas": (0.9, 0.99)}, "the state")["best"]
        {'$type': 'float', 'value': 'inf'}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {_TAG: "float", "value": repr(value)}
    if kind in (list, tuple):
        items = [encode(inner, f"{what}[{index}]") for index, inner in enumerate(value)]
        return items if kind is list else {_TAG: "tuple", "items": items}
    if kind is dict and all(type(key) is str and key != _TAG for key in value):
        return {key: encode(inner, f"{what}[{key!r}]") for key, inner in value.items()}
    if kind in _DICTS.values():
        items = [
            [encode(key, f"a key of {what}"), encode(inner, f"{what}[{key!r}]")]
            for key, inner in value.items()
        ]
        return {_TAG: kind.__name__, "items": items}
    if kind is torch.Tensor and value.dtype in DTYPE_NAMES and value.numel() <= _MOST_NUMBERS:
        numbers = value.detach().flatten().tolist()
        return {
            _TAG: "tensor",
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "values": [encode(number, what) for number in numbers],
        }
    described = f"{tuple(value.shape)}, {value.dtype}" if kind is torch.Tensor else shown(value)
    raise CheckpointError(
        f"{what} is a {kind.__name__}, {described}, which cannot be saved; a checkpoint holds "
        "None, bool, int, float, str, list, tuple, dict, Counter and tensors of at most "
        f"{_MOST_NUMBERS} numbers"
    )


def decode(value: Any, where: str) -> Any:
    """The value that :func:`encode` made ``value`` of; tensors are on the CPU.

    Args:
        value: parsed JSON, of which nothing is taken for granted.
        where: what the error names, for example the file.

    Raises:
        CheckpointError: it was not made by ``encode``.

    Example:
        >>> decode({"$type": "tuple", "items": [0.9, 0.99]}, "a file")
        (0.9, 0.99)
    """
    try:
        return _decoded(value)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{where}: not what a save writes: {type(error).__name__}: {shown(str(error))}"
        ) from error


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decoded(inner) for key, inner in value.items()}
    kind, fields = value[_TAG], value.keys() - {_TAG}
    if kind == "float" and fields == {"value"}:
        return _FLOATS[value["value"]]
    if kind == "tensor" and fields == {"dtype", "shape", "values"}:
        numbers = torch.tensor(
            _decoded(value["values"]), dtype=DTYPES[value["dtype"]], device="cpu"
        )
        return numbers.reshape(value["shape"])
    if kind in ("tuple", *_DICTS) and fields == {"items"} and isinstance(value["items"], list):
        items = _decoded(value["items"])
        if kind == "tuple":
            return tuple(items)
        pairs = {key: inner for key, inner in items}
        if len(pairs) == len(items):
            return _DICTS[kind](pairs)
    raise ValueError(f"an object with the fields {sorted(value)} and {_TAG} {kind!r}")
