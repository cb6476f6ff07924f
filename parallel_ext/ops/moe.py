"""Rows of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from parallel_ext.ops.group import ALONE, Group


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


class ExchangePlan(NamedTuple):
    """How many rows of a mixture of experts go where; plain numbers, the same for the way back.

    Attributes:
        send_counts: [E]; rows of this rank for each expert.
        receive_counts: [ranks * own experts]; rows from each rank for each of this rank's experts.
        experts_per_rank: [ranks]; rank r holds so many experts after those of rank r - 1.
    """

    send_counts: list[int]
    receive_counts: list[int]
    experts_per_rank: list[int]

    def rows_per_expert(self, rank: int) -> list[int]:
        """Rows of each expert that ``rank``, whose plan this is, holds."""
        own = self.experts_per_rank[rank]
        return [sum(self.receive_counts[expert::own]) for expert in range(own)]


def moe_exchange(
    rows: torch.Tensor, plan: ExchangePlan, *, back: bool = False, group: Group = ALONE
) -> torch.Tensor:
    """Bring rows to the ranks that hold their experts, or the results back.

    Args:
        rows: [N, H], floating point, in expert order; with ``back`` in the order that it returned.
        plan: of this rank.
        back: whether the rows return to the ranks that they came from.
        group: the expert-parallel group.

    Returns:
        The rows of this rank's experts in the order of (expert, rank, row), those of one expert
        side by side; with ``back`` this rank's own rows in expert order. Every rank takes part,
        whatever it sends or holds. In backward the gradients travel the other way, by the same
        counts.

    Raises:
        TypeError, ValueError: dtypes, shapes or counts do not fit.

    Example:
        >>> moe_exchange(torch.ones(3, 2), ExchangePlan([1, 2], [1, 2], [2])).shape
        torch.Size([3, 2])
    """
    return torch.ops.parallel_ext.moe_exchange(
        rows, *plan, not back, group.rank, group.size, group.name
    )


def moe_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    counts: Sequence[int],
    weight_grad_scale: float = 1.0,
) -> torch.Tensor:
    """A linear layer of each expert on its own rows.

    Args:
        rows: [N, K], floating point; the rows of one expert lie side by side.
        weight: [e, F, K], same dtype.
        counts: e numbers; rows of each expert, zeros allowed.
        weight_grad_scale: multiplies the gradient of the weight, before it is rounded; that of the
            rows is left as it is.

    Returns:
        [N, F]. The gradient of the weight of an expert without rows is zero.

    Raises:
        TypeError, ValueError: dtypes, shapes or counts do not fit.

    Example:
        >>> moe_linear(torch.ones(2, 3), torch.ones(2, 1, 3), [2, 0])
        tensor([[3.],
                [3.]])
    """
    return torch.ops.parallel_ext.moe_linear(rows, weight, list(counts), weight_grad_scale)


def moe_take_tokens(
    input: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int], group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take this rank's share of the tokens that all ranks hold.

    Args:
        input: [T, H], floating point, replicated.
        weights: [T, top_k], floating point, of the choices, replicated; its dtype may be another.
        sizes: tokens of every rank, zeros allowed; T in all.
        group: the tensor-parallel group.

    Returns:
        [sizes[group.rank], H] and [sizes[group.rank], top_k], copies of this rank's rows. In
        backward one message brings the gradients of all ranks' rows to every rank, replicated: of
        both, or of the one that requires a gradient, which must be the same on all ranks.

    Raises:
        TypeError, ValueError: dtypes, shapes or sizes do not fit.

    Example:
        >>> moe_take_tokens(torch.ones(3, 2), torch.ones(3, 1), [3], ALONE)[0].shape
        torch.Size([3, 2])
    """
    return torch.ops.parallel_ext.moe_take_tokens(
        input, weights, list(sizes), group.rank, group.size, group.name
    )


def moe_gather_tokens(slice: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Join the ranks' shares of the tokens.

    Args:
        slice: [sizes[group.rank], H], floating point; this rank's rows.
        sizes: tokens of every rank, zeros allowed; T in all.
        group: the tensor-parallel group.

    Returns:
        [T, H], replicated; its gradient, which every rank holds whole, is cut to the own rows.

    Raises:
        TypeError, ValueError: dtype, shape or sizes do not fit.

    Example:
        >>> moe_gather_tokens(torch.ones(3, 2), [3], ALONE).shape
        torch.Size([3, 2])
    """
    return torch.ops.parallel_ext.moe_gather_tokens(
        slice, list(sizes), group.rank, group.size, group.name
    )
