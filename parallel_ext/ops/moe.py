"""Rows of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoutePlan(NamedTuple):
    """Where the rows of T tokens with top_k choices go.

    Attributes:
        counts: [E], int64; rows of each expert.
        slots: [T, top_k], int64; the place of each choice among all rows, which lie in the order of
            (expert, token, choice).
        sources: [T * top_k], int64; the choice in each place, as token * top_k + its number.
    """

    counts: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor


def moe_route_plan(expert_ids: torch.Tensor, num_experts: int) -> RoutePlan:
    """Sort the choices of a router by expert: a stable counting sort.

    Args:
        expert_ids: [T, top_k], int64, in ``[0, num_experts)``.
        num_experts: E, those without a token included.

    Raises:
        IndexError: an id is outside of ``[0, num_experts)``; names token and choice on the CPU.
        TypeError, ValueError: dtype or shape does not fit.

    Example:
        >>> moe_route_plan(torch.tensor([[2, 0], [0, 2]]), 3).counts
        tensor([2, 0, 2])
    """
    return RoutePlan(*torch.ops.parallel_ext.moe_route_plan(expert_ids, num_experts))


def moe_dispatch(input: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy each token's row to the places of its choices.

    Args:
        input: [T, H], floating point.
        slots: [T, top_k] of :func:`moe_route_plan`, a permutation of ``range(T * top_k)``.

    Returns:
        [T * top_k, H], rows in expert order. Its gradient sums a token's rows in fp32 (fp64 for
        fp64), in the order of the choices.

    Raises:
        IndexError: ``slots`` is no permutation (on the CPU).
        TypeError, ValueError: dtypes or shapes do not fit.

    Example:
        >>> moe_dispatch(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]))
        tensor([[2.],
                [1.]])
    """
    return torch.ops.parallel_ext.moe_dispatch(input, slots)


def moe_combine(
    rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum each token's rows, weighted, back into one.

    Args:
        rows: [T * top_k, H], floating point, in expert order.
        slots: [T, top_k] of :func:`moe_route_plan`.
        weights: [T, top_k], floating point, of the choices; None for ones.

    Returns:
        [T, H] in the dtype of ``rows``: summed in fp32 (fp64 for fp64) in the order of the choices,
        rounded once. The gradient of ``weights`` comes in the same pass as that of ``rows``.

    Raises:
        IndexError: ``slots`` is no permutation (on the CPU).
        TypeError, ValueError: dtypes or shapes do not fit.

    Example:
        >>> rows, slots = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0]])
        >>> moe_combine(rows, slots, torch.tensor([[0.5, 0.25]]))
        tensor([[1.2500]])
    """
    return torch.ops.parallel_ext.moe_combine(rows, slots, weights)
