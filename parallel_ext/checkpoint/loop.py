"""What a training checkpoint says of the training loop in ``loop.json``, field by field."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from parallel_ext.checkpoint.fields import Fields
from parallel_ext.checkpoint.open_file import CheckpointError, shown
from parallel_ext.checkpoint.safetensors_file import DTYPES
from parallel_ext.checkpoint.strict_json import parse_json

_CLASS_NAME = re.compile(r"[^\W\d]\w{0,199}")


def parse_loop(content: bytes, path: Path, step: int) -> dict[str, Any]:
    """The content of ``loop.json``.

    Args:
        content: of the file.
        path: of the file, for errors.
        step: of the manifest.

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
    random.exactly("mesh", "seed", "alike_in_tp")
    random.object("mesh")
    random.number("seed", below=2**64)
    random.truth("alike_in_tp")
    return loop


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _check_optimizer(optimizer: Fields, where: str) -> None:
    optimizer.exactly("class", "groups", "numbers")
    optimizer.matching("class", _CLASS_NAME)
    names: set[str] = set()
    for number, value in enumerate(optimizer.list_of("groups", lambda _: True, "groups")):
        group = Fields(value, f"{where}: group {number}")
        group.exactly("parameters", "options")
        group.object("options")
        for name in group.list_of("parameters", _is_text, "names"):
            if name in names:
                raise CheckpointError(f"{where}: {shown(name)} is in its groups more than once")
            names.add(name)
    numbers = optimizer.of("numbers")
    for key in numbers:
        at = numbers.of(key)
        at.exactly("dtype", "most", "others")
        dtype = DTYPES[at.one_of("dtype", DTYPES)]
        at.fits("most", lambda n, dtype=dtype: n is None or _fits(n, dtype), f"null or {dtype}")
        others = at.of("others")
        for name in others:
            if name not in names:
                raise CheckpointError(
                    f"{where}: {key} of {shown(name)}, which is in none of its groups"
                )
            others.fits(
                name, lambda n, dtype=dtype: n is None or _fits(n, dtype), f"null or {dtype}"
            )


def _fits(number: Any, dtype: torch.dtype) -> bool:
    """Whether a number of JSON is one that a tensor of this dtype had held."""
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
    """Why a saved value cannot take the place of ``own``, in words; empty if it can.

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
