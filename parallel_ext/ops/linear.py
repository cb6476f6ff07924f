"""Linear layers whose weight is sharded over the ranks, with and without adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from parallel_ext.ops.arguments import check_arguments, check_group, check_tensors
from parallel_ext.ops.group import ALONE, Group


class Dropout(NamedTuple):
    """Dropout of an input [T, K] whose mask can be drawn again, by any rank, in any part.

    The random bits of an element are those of Philox4x32-10 for the counter of its global token and
    feature (``csrc/linear/dropout.cpp``), so the mask depends neither on how the input is
    sharded nor on what was drawn before.

    Attributes:
        p: probability of a zero, in [0, 1]; in effect the nearest multiple of 2^-16.
        key: of the layer's masks: 63 bits.
        step: number of the layer's forward, in [0, 2^32).
        token: global index of the first token, the last one below 2^32.
        feature: global index of the first feature, the last one below 2^35.
    """

    p: float
    key: int
    step: int
    token: int = 0
    feature: int = 0


def column_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_stride: int | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Apply a linear layer of which each rank holds some output features (rows of the weight).

    Args:
        input: [..., K], replicated.
        weight: [F, K], this rank's rows, same dtype.
        bias: [F], this rank's part, or None.
        row_stride: elements from one row of the output to the next, at least F (default F): aligned
            rows for the passes over the logits. What lies between the rows is nobody's.
        group: with the tensor-parallel group the gradient of ``input`` is summed over it, while the
            weight's gradient is computed. With ALONE that sum is left to :func:`copy_to_region`, so
            that several layers on one input share it.

    Returns:
        [..., F], sharded. Under autocast in its lower precision, as ``torch.nn.functional.linear``.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit.

    Source: Megatron-LM (arXiv 1909.08053), section 3.

    Example:
        >>> column_linear(torch.ones(1, 2), torch.ones(3, 2))
        tensor([[2., 2., 2.]])
    """
    check_arguments("column_linear", group, input=input, weight=weight)
    stride = weight.size(0) if row_stride is None else row_stride
    return torch.ops.parallel_ext.column_linear(input, weight, bias, stride, group.size, group.name)


def column_linears(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    group: Group = ALONE,
) -> list[torch.Tensor]:
    """Apply up to three linear layers that read one input, sharded by output features.

    Args:
        input: [..., K], replicated.
        weights: [F, K] of each layer, this rank's rows, same dtype.
        biases: [F] of each layer, this rank's part, or None; None for no biases at all.
        group: the tensor-parallel group. The gradient of ``input`` is summed over it while the
            gradients of the weights are computed. Nothing is summed with ALONE.

    Returns:
        Of each layer [..., F], sharded: what :func:`column_linear` returns. The gradients have its
        bits too, where the layers were called in this order on a result of :func:`copy_to_region`.
        Under autocast in its lower precision, that of ``input`` as well.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit, or there are more than three weights.

    Source: Megatron-LM (arXiv 1909.08053), section 3.

    Example:
        >>> column_linears(torch.ones(1, 2), [torch.ones(3, 2), torch.ones(1, 2)])
        [tensor([[2., 2., 2.]]), tensor([[2.]])]
    """
    check_group("column_linears", group)
    count, given = len(weights), [None] * len(weights) if biases is None else [*biases]
    if not 1 <= count <= 3 or len(given) != count:
        raise ValueError(
            f"column_linears: needs one to three weights, with as many biases if any, got {count} "
            f"weights and {len(given)} biases"
        )
    names = ("weight", "second", "third")
    check_tensors("column_linears", input=input, **dict(zip(names, weights, strict=False)))
    absent = [weights[0].new_empty(0, weights[0].size(-1)) for _ in range(3 - count)]
    given += [None] * len(absent)
    outputs = torch.ops.parallel_ext.column_linears(
        input, *weights, *absent, *given, group.size, group.name
    )
    return list(outputs[:count])


def row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = ALONE,
) -> torch.Tensor:
    """Apply a linear layer of which each rank holds some input features (weight columns).

    Args:
        input: [..., K], this rank's features of it (sharded).
        weight: [F, K], this rank's columns, same dtype.
        bias: [F], replicated, or None; added once, after the sum.
        group: the tensor-parallel group.

    Returns:
        [..., F], replicated: one all-reduce in forward, nothing in backward. Under autocast in its
        lower precision, as ``torch.nn.functional.linear``.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit.

    Source: Megatron-LM (arXiv 1909.08053), section 3.

    Example:
        >>> row_linear(torch.ones(1, 2), torch.ones(3, 2))
        tensor([[2., 2., 2.]])
    """
    check_arguments("row_linear", group, input=input, weight=weight)
    return torch.ops.parallel_ext.row_linear(input, weight, bias, group.size, group.name)


def lora_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout: Dropout | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Apply a linear layer and its low-rank adapter in one.

    ``input weight^T + scale (dropout(input) lora_a^T) lora_b^T``: the adapter's part is added in
    the product of the base, and nothing but the input, the weights and [r, T] is kept for backward.
    For a base sharded by output features (rows of the weight) the group is ALONE: ``lora_a`` is
    replicated, ``lora_b`` sharded like the base, and the gradients of the input and of ``lora_a``
    are partial sums. For a base sharded by input features the group is the tensor-parallel one:
    ``lora_a`` is sharded like the base, ``lora_b`` replicated with a partial gradient, and
    both parts of the output are summed in one all-reduce.

    Args:
        input: [..., K], this rank's features where the base is sharded by them.
        weight: [F, K], this rank's part, same dtype as ``input``.
        lora_a: [r, K].
        lora_b: [F, r], same dtype as ``lora_a``; both enter the products in the input's dtype.
        bias: [F] or None; with a group it is replicated and added once.
        scale: of the adapter's part.
        dropout: of the input of the adapter, or None.
        group: whose partial outputs are summed.

    Returns:
        [..., F]: sharded without a group, replicated with one. Under autocast in its lower
        precision. Gradients of ``lora_a`` and ``lora_b`` are in their own dtype.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit.

    Source: LoRA (arXiv 2106.09685), section 4.1.

    Example:
        >>> x, w = torch.ones(1, 2), torch.ones(3, 2)
        >>> lora_linear(x, w, torch.ones(1, 2), torch.ones(3, 1), scale=0.5)
        tensor([[3., 3., 3.]])
    """
    p, *counter = dropout or (0.0,)
    check_arguments("lora_linear", group, input=input, weight=weight, lora_a=lora_a, lora_b=lora_b)
    return torch.ops.parallel_ext.lora_linear(
        input, weight, lora_a, lora_b, bias, scale, p, counter, group.size, group.name
    )


def seeded_dropout(input: torch.Tensor, dropout: Dropout) -> torch.Tensor:
    """Set elements to zero at random, by a mask that any rank can draw again in any part.

    Args:
        input: [..., K], this rank's features where it is sharded by them.
        dropout: the mask; ``token`` and ``feature`` are those of the first element.

    Returns:
        [..., K]: zeros with the probability ``dropout.p``, elsewhere ``input / (1 - p)``. Nothing
        is kept for backward, which draws the mask again.

    Raises:
        TypeError, ValueError: the dtype, or a number of ``dropout``, does not fit.

    Example:
        >>> seeded_dropout(torch.ones(2), Dropout(p=0.0, key=1, step=1))
        tensor([1., 1.])
    """
    check_tensors("seeded_dropout", input=input)
    if not isinstance(dropout, Dropout):
        raise TypeError(f"seeded_dropout: dropout must be a Dropout, got {dropout!r}")
    p, *counter = dropout
    return torch.ops.parallel_ext.seeded_dropout(input, p, counter)
