"""The floating-point operations of this package's matrix products, for ``FlopCounterMode``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]


def _product(input: Shape, weight: Shape) -> int:
    """Return the operations of rows [..., K] that each meet one matrix of a weight [..., F, K]."""
    return 2 * prod(input) * weight[-2]


def _low_rank(input: Shape, lora_a: Shape, lora_b: Shape) -> int:
    rows, rank = prod(input[:-1]), lora_a[-2]
    return 2 * rows * rank * (input[-1] + lora_b[-2])


def _linear(input: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return _product(input, weight)


def _linear_backward(
    grad_output: Shape, input: Shape, weight: Shape, needed: Sequence[bool], *_: Any, **__: Any
) -> int:
    return _product(input, weight) * sum(needed[:2])


def _linears(input: Shape, weight: Shape, second: Shape, third: Shape, *_: Any, **__: Any) -> int:
    return sum(_product(input, each) for each in (weight, second, third))


def _linears_backward(
    grad: Shape, grad_second: Shape, grad_third: Shape, input: Shape, *rest: Any, **__: Any
) -> int:
    *weights, needed = rest[:4]
    of_each = zip(weights, needed[1:], strict=False)
    return sum(_product(input, weight) * (needed[0] + trained) for weight, trained in of_each)


def _moe_linear_backward(
    grad: Shape, rows: Shape, weight: Shape, counts: Any, needed: Sequence[bool], *_: Any, **__: Any
) -> int:
    return _product(rows, weight) * sum(needed[:2])


def _lora(input: Shape, weight: Shape, lora_a: Shape, lora_b: Shape, *_: Any, **__: Any) -> int:
    return _product(input, weight) + _low_rank(input, lora_a, lora_b)


def _lora_backward(
    grad_output: Shape,
    input: Shape,
    weight: Shape,
    lora_a: Shape,
    lora_b: Shape,
    *rest: Any,
    **__: Any,
) -> int:
    # Each of the two products of an adapter has a gradient of both its factors.
    needed = next(each for each in reversed(rest) if isinstance(each, (list, tuple)))
    return _product(input, weight) * sum(needed[:2]) + 2 * _low_rank(input, lora_a, lora_b)


def register_flops() -> None:
    """Let ``torch.utils.flop_counter.FlopCounterMode`` count what a rank multiplies.

    Its hooks on all modules keep output head and loss apart, so that these are counted as well.
    """
    ops = torch.ops.parallel_ext
    if ops.column_linear in flop_registry:
        return
    linears = [ops.column_linear, ops.row_linear, ops.moe_linear, ops.moe_linear_on_device]
    register_flop_formula(linears)(_linear)
    register_flop_formula(ops.column_linear_backward)(_linear_backward)
    register_flop_formula(ops.column_linears)(_linears)
    register_flop_formula(ops.column_linears_backward)(_linears_backward)
    backwards = [ops.moe_linear_backward, ops.moe_linear_on_device_backward]
    register_flop_formula(backwards)(_moe_linear_backward)
    register_flop_formula([ops.lora_linear_forward, ops.moe_lora_linear_forward])(_lora)
    register_flop_formula([ops.lora_linear_backward, ops.moe_lora_linear_backward])(_lora_backward)
