"""Write and read the state of the training loop as JSON."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safe_open import shown
from parallel_ext.io.safetensors_reader import DTYPES
from parallel_ext.io.safetensors_writer import DTYPE_NAMES
from parallel_ext.io.schema import Fields, parse_json

_TAG = "$type"
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DICTS = {"dict": dict, "Counter": Counter}
_MOST_NUMBERS = 1000  # of a tensor; what is larger belongs into a file of tensors


def encode(value: Any, what: str) -> Any:
    """Encode a value as JSON from which :func:`decode` makes the same value, types included.

    Args:
        value: None, or of the types bool, int, float, str, list, tuple, dict, Counter and small
            tensors, nested as they may be.

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
    """Decode a value that :func:`encode` has encoded; tensors are on the CPU.

    Args:
        value: parsed JSON, of which nothing is taken for granted.

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


_CLASS_NAME = re.compile(r"[^\W\d]\w{0,199}")


def parse_loop(content: bytes, path: Path, step: int) -> dict[str, Any]:
    """Parse and check the content of ``loop.json``.

    Returns:
        Its fields: ``step``; ``optimizer`` and ``scheduler``, None where there was none;
        ``data_state``; ``dropout_masks``; ``random``.

    Raises:
        CheckpointError: a field is missing or wrong; names it. What is in the options of the
            optimizer, in ``scheduler`` and in ``data_state`` is any JSON.
    """
    loop = parse_json(content, path)
    fields = Fields(loop, path)
    fields.exactly("step", "optimizer", "scheduler", "data_state", "dropout_masks", "random")
    if fields.number("step") != step:
        raise CheckpointError(f"{path}: step is {loop['step']}, but {step} in the manifest")
    if loop["optimizer"] is not None:
        _check_optimizer(fields.of("optimizer"), f"{path}: optimizer")
    if loop["scheduler"] is not None:
        fields.object("scheduler")
    masks = fields.of("dropout_masks")
    for module in masks:
        of_module = masks.of(module)
        of_module.exactly("key", "forwards")
        of_module.number("key")
        of_module.number("forwards")
    random = fields.of("random")
    random.exactly("mesh", "seed", "equal_in_tp")
    random.object("mesh")
    random.number("seed", below=2**64)
    random.fits("equal_in_tp", lambda value: type(value) is bool, "true or false")
    return loop


def _check_optimizer(optimizer: Fields, where: str) -> None:
    optimizer.exactly("class", "groups", "numbers")
    optimizer.matching("class", _CLASS_NAME)
    names: set[str] = set()
    for number, value in enumerate(optimizer.list_of("groups", lambda _: True, "groups")):
        group = Fields(value, f"{where}: group {number}")
        group.exactly("parameters", "options")
        group.object("options")
        for name in group.list_of("parameters", lambda n: isinstance(n, str), "names"):
            if name in names:
                raise CheckpointError(f"{where}: {shown(name)} is in its groups more than once")
            names.add(name)
    numbers = optimizer.of("numbers")
    for key in numbers:
        at = numbers.of(key)
        at.exactly("dtype", "most", "others")
        dtype = DTYPES[at.one_of("dtype", DTYPES)]
        at.fits("most", partial(_fits, dtype), f"null or {dtype}")
        others = at.of("others")
        for name in others:
            if name not in names:
                raise CheckpointError(
                    f"{where}: {key} of {shown(name)}, which is in none of its groups"
                )
            others.fits(name, partial(_fits, dtype), f"null or {dtype}")


def _fits(dtype: torch.dtype, number: Any) -> bool:
    """Return whether a value of JSON is null, or a number that a tensor of ``dtype`` can hold."""
    if number is None:
        return True
    if dtype.is_floating_point:
        if type(number) not in (int, float) or abs(number) > 2**1000:
            return False
        value = torch.tensor(float(number), dtype=torch.float64).to(dtype).item()
        return math.isfinite(value) and value == number
    if dtype == torch.bool:
        return type(number) is bool
    limits = torch.iinfo(dtype)
    return type(number) is int and limits.min <= number <= limits.max


def differs_in_kind(saved: Any, own: Any) -> str:
    """Say in words why a saved value cannot take the place of ``own``; empty if it can.

    Numbers take the place of numbers, also in lists, and anything that of None. What is in objects
    is not compared, nor how long lists are.
    """

    def kind(value: Any) -> str:
        if type(value) is int and not -(2**63) <= value < 2**63:
            return "a number beyond 64 bits"
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            return "a tensor"
        kinds = {bool: "a truth value", (int, float, torch.Tensor): "a number", str: "text"}
        kinds |= {(list, tuple): "a list", dict: "an object"}
        return next((word for types, word in kinds.items() if isinstance(value, types)), "")

    if kind(own) in ("", kind(saved)):
        if kind(own) != "a list" or not own or any(kind(each) != "a number" for each in own):
            return ""
        odd = [each for each in saved if kind(each) != "a number"]
        if not odd:
            return ""
        own, saved = own[0], odd[0]
    return f"must be {kind(own)}, got {shown(saved)}"
