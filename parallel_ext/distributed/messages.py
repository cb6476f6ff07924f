"""Messages between ranks: JSON and the bytes of tensors, by which no peer can run code.

A pickle runs what it says, for whoever reaches a port of the job. A message is the length of its
JSON (8 bytes, little-endian), the JSON, and the bytes that it refers to, in order. JSON has no word
for most types; such a value is an object with one key, the name of its type:

- ``tuple``, ``set``, ``frozenset``: a list,
- ``dict``, ``Counter``: a list of pairs,
- ``bytes``: how many,
- ``dtype``: the name; ``tensor``: the name of its dtype and its sizes,
- a dataclass or named tuple: a list of its fields, where the reader knows its class.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

_LISTS = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_DICTS = {kind.__name__: kind for kind in (dict, Counter)}


def encode(value: Any, records: Sequence[type] = ()) -> bytes:
    """Encode a value as bytes, which :func:`decode` reads back.

    Args:
        value: None, or of the types bool, int, float, str, bytes, list, tuple, set, frozenset,
            dict, Counter, torch.dtype, dense tensors and ``records``, nested as they may be.
        records: classes of dataclasses and named tuples.

    Raises:
        TypeError: there is something else in it.

    Example:
        >>> decode(encode((1, {"mean": float("inf")})))
        (1, {'mean': inf})
    """
    parts: list[bytes] = []
    text = json.dumps(_plain(value, parts, records)).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _plain(value: Any, parts: list[bytes], records: Sequence[type]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is torch.dtype:
        return {"dtype": _name(value)}
    if kind is bytes:
        parts.append(value)
        return {"bytes": len(value)}
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().flatten()
        parts.append(flat.view(torch.uint8).numpy().tobytes())
        return {"tensor": [_name(value.dtype), *value.shape]}
    if kind in records and dataclasses.is_dataclass(kind):
        inner: Any = [getattr(value, field.name) for field in dataclasses.fields(kind)]
    elif kind in _DICTS.values():
        inner = [list(pair) for pair in value.items()]
    elif kind is list or kind in records or kind in _LISTS.values():
        inner = value
    else:
        raise TypeError(f"ranks cannot send each other a {kind.__name__}")
    listed = [_plain(each, parts, records) for each in inner]
    return listed if kind is list else {kind.__name__: listed}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decode(message: bytes, records: Sequence[type] = ()) -> Any:
    """Decode the bytes that :func:`encode` wrote; tensors are on the CPU.

    Args:
        message: what a peer sent, of which nothing is taken for granted.
        records: the classes that may be in it.

    Raises:
        ValueError: ``encode`` did not write it, or of other classes.
    """
    stream = io.BytesIO(message)
    try:
        length = int.from_bytes(stream.read(8), "little")
        return _value(json.loads(stream.read(length)), stream, {c.__name__: c for c in records})
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a rank has sent what this package does not send: {error}") from error


def _value(plain: Any, stream: io.BytesIO, records: dict[str, type]) -> Any:
    if isinstance(plain, list):
        return [_value(each, stream, records) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "bytes":
        return _read(stream, content)
    if kind == "dtype":
        return _dtype(content)
    if kind == "tensor":
        dtype, shape = _dtype(content[0]), content[1:]
        data = bytearray(_read(stream, math.prod(shape) * dtype.itemsize))
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
    inner = _value(content, stream, records)
    if kind in records:
        return records[kind](*inner)
    return _LISTS[kind](inner) if kind in _LISTS else _DICTS[kind](dict(inner))


def _read(stream: io.BytesIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise ValueError(f"{count} bytes where there are {len(data)}")
    return data


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype
