"""The floating-point operations of this package's matrix products, for ``FlopCounterMode``."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from parallel_ext.sharding._torch_private import schema_of

_PRODUCTS = (
    *("column_linear", "column_linear_backward", "column_linears", "column_linears_backward"),
    *("row_linear", "moe_linear", "moe_linear_backward"),
    *("moe_linear_on_device", "moe_linear_on_device_backward"),
    *("lora_linear_forward", "lora_linear_backward"),
    *("moe_lora_linear_forward", "moe_lora_linear_backward"),
)


def _operations(names: list[str], *args: Any, **kwargs: Any) -> int:
    """Return the operations of a call of an op, whose tensors are given by their shapes.

    Rows [..., K] each meet one matrix of a weight [..., F, K]. In backward that product is one for
    each of the gradients of both that are needed, and each of the two products of an adapter has a
    gradient of both its factors.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    rows = given["input"] if "input" in given else given["rows"]
    needed = given.get("needed")
    times = (1, 1, 1) if needed is None else [needed[0] + weight for weight in needed[1:]]
    weights = [given[name] for name in ("weight", "second", "third") if name in given]
    total = sum(
        2 * prod(rows) * weight[-2] * number for weight, number in zip(weights, times, strict=False)
    )
    if "lora_a" in given:
        low_rank = 2 * prod(rows[:-1]) * given["lora_a"][-2] * (rows[-1] + given["lora_b"][-2])
        total += low_rank if needed is None else 2 * low_rank
    return total


def register_flops() -> None:
    """Let ``torch.utils.flop_counter.FlopCounterMode`` count what a rank multiplies.

    Its hooks on all modules keep output head and loss apart, so that these are counted as well.
    """
    for op in (getattr(torch.ops.parallel_ext, name) for name in _PRODUCTS):
        if op not in flop_registry:
            names = [argument.name for argument in schema_of(op.default).arguments]
            register_flop_formula(op)(partial(_operations, names))
