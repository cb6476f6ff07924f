"""Ops on the rows of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from parallel_ext.ops.arguments import check_arguments, check_tensors
from parallel_ext.ops.group import ALONE, Group


def moe_router(
    logits: torch.Tensor,
    top_k: int,
    normalized: bool = True,
    expert_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by a softmax over all of them, and weight these.

    Args:
        logits: [T, E], floating point.
        top_k: experts a token gets, at most E.
        normalized: whether its weights are divided by their sum.
        expert_ids: [T, top_k], int64, in ``[0, E)``: what else has chosen. Such choices are
            weighted by the same probabilities.

    Returns:
        The weights [T, top_k], in fp32 (fp64 for fp64), and the ids of the experts [T, top_k],
        int64: the largest probabilities, the largest first, of equal ones the lower id. Gradients
        flow through the weights. On the CPU the bits are those of torch's own operations.

    Raises:
        IndexError: an id is outside of ``[0, E)`` (on the CPU).
        TypeError, ValueError: dtypes or shapes do not fit.

    Example:
        >>> logits = torch.tensor([[2.0, 3.0, 3.0, 2.0]]).log()
        >>> moe_router(logits, 3, normalized=False)
        (tensor([[0.3000, 0.3000, 0.2000]]), tensor([[1, 2, 0]]))
    """
    check_tensors("moe_router", logits=logits)
    return torch.ops.parallel_ext.moe_router(logits, expert_ids, top_k, normalized)


class RoutePlan(NamedTuple):
    """The slots and rows in which the choices of T tokens, top_k each, travel; int64.

    A *slot* is the place of a choice in the order of (expert, token, choice). A message to a rank
    has a row for each of its slots, or one for each of its tokens, in the order of their first
    slots.

    Attributes:
        counts: [E]; choices of each expert.
        rows_per_rank: [ranks]; rows in the message to each.
        rows_of_choices: [T, top_k]; the row that serves a choice, among those of all messages.
        sources: [T * top_k]; the choice in each slot, as token * top_k + its number.
        tokens: [T * top_k]; the token of each row, zeros after the last row.
    """

    counts: torch.Tensor
    rows_per_rank: torch.Tensor
    rows_of_choices: torch.Tensor
    sources: torch.Tensor
    tokens: torch.Tensor


def moe_route_plan(
    expert_ids: torch.Tensor, experts_per_rank: Sequence[int], row_bytes: int, rank: int
) -> RoutePlan:
    """Sort the choices of a router by expert, and say which rows each rank is sent for them.

    A token that several experts of a rank want is sent to it once, where that saves bytes: each
    choice then costs 4 bytes that say which row it means. To itself a rank sends nothing.

    Args:
        expert_ids: [T, top_k], int64, in ``[0, E)``.
        experts_per_rank: of the ``E = sum(experts_per_rank)`` experts, in order.
        row_bytes: of one token's row.
        rank: this rank.

    Raises:
        IndexError: an id is outside of ``[0, E)``. A GPU does not raise, for which the host would
            have to wait: it counts no such id, so that ``counts`` do not add up to T * top_k, which
            :func:`moe_dispatch` refuses.
        TypeError, ValueError: dtype, shape or a number does not fit.

    Example:
        >>> plan = moe_route_plan(torch.tensor([[2, 0], [3, 2]]), [2, 2], row_bytes=4096, rank=0)
        >>> plan.counts, plan.rows_per_rank  # the second token goes once to rank 1
        (tensor([1, 0, 2, 1]), tensor([1, 2]))
    """
    check_tensors("moe_route_plan", expert_ids=expert_ids)
    return RoutePlan(
        *torch.ops.parallel_ext.moe_route_plan(expert_ids, list(experts_per_rank), row_bytes, rank)
    )


class ExchangePlan(NamedTuple):
    """How many rows of a mixture of experts go where; plain numbers, as one rank sees them.

    Attributes:
        send: [E + ranks]; this rank's choices of each expert, then its rows for each rank. Empty,
            as ``receive``, where one rank has all experts and its numbers lie on a GPU.
        receive: [ranks * (own experts + 1)]; of each rank, its choices of each of this rank's
            experts, then its rows for this rank.
        experts_per_rank: [ranks]; rank r holds so many experts after those of rank r - 1.
    """

    send: list[int]
    receive: list[int]
    experts_per_rank: list[int]

    @classmethod
    def alone(cls, num_experts: int) -> ExchangePlan:
        """Build the plan of one rank with all experts, whose numbers nobody has read."""
        return cls([], [], [num_experts])

    @classmethod
    def of(
        cls, messages: Sequence[Sequence[int]], experts_per_rank: list[int], rank: int
    ) -> ExchangePlan:
        """Build the plan of ``rank`` from the ``send`` of every rank.

        Raises:
            ValueError: a message is not one number for each expert and rank, or one is negative;
                ``rank`` is none of the ranks.
        """
        ranks, length = len(experts_per_rank), sum(experts_per_rank) + len(experts_per_rank)
        if not 0 <= rank < ranks or len(messages) != ranks:
            raise ValueError(
                f"ExchangePlan.of: {len(messages)} messages and rank {rank} do not fit {ranks} "
                "ranks, which experts_per_rank has"
            )
        for sender, message in enumerate(messages):
            if len(message) != length:
                raise ValueError(
                    f"ExchangePlan.of: the message of rank {sender} has {len(message)} numbers "
                    f"instead of {length}, one for each expert and rank"
                )
            if min(message) < 0:
                raise ValueError(
                    f"ExchangePlan.of: the message of rank {sender} has a negative number: "
                    f"{list(message)}"
                )
        start = sum(experts_per_rank[:rank])
        stop, rows = start + experts_per_rank[rank], sum(experts_per_rank) + rank
        received = [[*message[start:stop], message[rows]] for message in messages]
        return cls(list(messages[rank]), sum(received, []), experts_per_rank)

    def choices_per_expert(self) -> list[int]:
        """Return how many choices of each of the E experts this rank's tokens made."""
        return self.send[: sum(self.experts_per_rank)]

    def rows_per_expert(self, rank: int) -> list[int]:
        """Return the number of rows of each expert on ``rank``, whose plan this must be."""
        own = self.experts_per_rank[rank]
        return [sum(self.receive[expert :: own + 1]) for expert in range(own)]


def moe_dispatch(
    input: torch.Tensor,
    weights: torch.Tensor,
    route: RoutePlan,
    plan: ExchangePlan,
    group: Group = ALONE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring tokens, and the weights of their choices, to the ranks that hold the experts.

    Args:
        input: [T, H], floating point; this rank's tokens.
        weights: [T, top_k], floating point.
        route: of these tokens.
        plan: of this rank.
        group: the expert-parallel group. Every rank takes part, whatever it sends or holds.

    Returns:
        The rows [M, H] of this rank's experts, in the order of (expert, rank that they come from,
        token); their weights [M], in fp32 (fp64 for fp64); and, for :func:`moe_combine`, [M] int64:
        which of the rows that arrived each is. In backward one exchange brings the gradients back:
        that of a token is summed over its choices in fp32 (fp64 for fp64) on the rank of the
        experts, rounded, and summed again at home.

    Raises:
        IndexError: ``route`` is not one of :func:`moe_route_plan` (on the CPU).
        TypeError, ValueError: dtypes, shapes or counts do not fit.

    Example:
        >>> route = moe_route_plan(torch.tensor([[1], [0]]), [2], row_bytes=4, rank=0)
        >>> plan = ExchangePlan.of([[1, 1, 2]], [2], 0)
        >>> moe_dispatch(torch.tensor([[1.0], [2.0]]), torch.ones(2, 1), route, plan)[0]
        tensor([[2.],
                [1.]])
    """
    check_arguments("moe_dispatch", group, input=input, weights=weights)
    return torch.ops.parallel_ext.moe_dispatch(
        input, weights, *route[2:], *plan, group.rank, group.size, group.name
    )


def moe_combine(
    rows: torch.Tensor,
    origins: torch.Tensor,
    route: RoutePlan,
    plan: ExchangePlan,
    group: Group = ALONE,
) -> torch.Tensor:
    """Sum what the experts made of each token, at the rank that it came from.

    Args:
        rows: [M, H], floating point, in the order that :func:`moe_dispatch` returned; weighted.
        origins: [M], its third result.
        route, plan, group: as given to it.

    Returns:
        [T, H], this rank's own tokens: summed over the choices like the gradients there. In
        backward the gradients travel the other way.

    Raises:
        IndexError: ``route`` or ``origins`` do not belong to ``plan`` (on the CPU).
        TypeError, ValueError: dtypes, shapes or counts do not fit.

    Example:
        >>> route = moe_route_plan(torch.tensor([[1, 0]]), [2], row_bytes=4, rank=0)
        >>> plan = ExchangePlan.of([[1, 1, 2]], [2], 0)
        >>> moe_combine(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), route, plan)
        tensor([[3.]])
    """
    check_arguments("moe_combine", group, rows=rows, origins=origins)
    return torch.ops.parallel_ext.moe_combine(
        rows,
        origins,
        route.rows_of_choices,
        route.tokens,
        *plan,
        group.rank,
        group.size,
        group.name,
    )


def moe_gated_silu(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) * up``, times the weight of each row.

    Args:
        gate_up: [M, 2 I], floating point; gate before up.
        weights: [M], fp32 (fp64 for fp64).

    Returns:
        [M, I] in the dtype of ``gate_up``, computed in that of ``weights``. Nothing but the
        arguments is kept for backward.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit.

    Example:
        >>> moe_gated_silu(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0]))
        tensor([[0.]])
    """
    check_tensors("moe_gated_silu", gate_up=gate_up, weights=weights)
    return torch.ops.parallel_ext.moe_gated_silu(gate_up, weights)


def moe_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    counts: Sequence[int] | torch.Tensor,
    weight_grad_scale: float = 1.0,
) -> torch.Tensor:
    """Apply the linear layer of each expert to the expert's own rows.

    Args:
        rows: [N, K], floating point; the rows of one expert lie side by side.
        weight: [e, F, K], same dtype.
        counts: e numbers; rows of each expert, zeros allowed. Or a tensor of them [e], int64, on
            the device of the rows, which the host does not read where torch has a grouped product
            (bf16 on GPUs of compute capability 9 and 10); then nobody checks that they add up to N.
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
    if isinstance(counts, torch.Tensor):
        check_tensors("moe_linear_on_device", rows=rows, weight=weight, counts=counts)
        op = torch.ops.parallel_ext.moe_linear_on_device
        return op(rows, weight, counts, weight_grad_scale)
    check_tensors("moe_linear", rows=rows, weight=weight)
    return torch.ops.parallel_ext.moe_linear(rows, weight, list(counts), weight_grad_scale)


def moe_lora_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    counts: Sequence[int],
    *,
    scale: float = 1.0,
    weight_grad_scale: float = 1.0,
) -> torch.Tensor:
    """Apply each expert's linear layer and its low-rank adapter in one to the expert's own rows.

    ``rows weight^T + scale (rows lora_a^T) lora_b^T``, each row by those of its expert: nothing of
    the size of ``weight`` is made, and nothing but the arguments and [N, r] is kept for backward.

    Args:
        rows: [N, K], floating point; the rows of one expert lie side by side.
        weight: [e, F, K], same dtype.
        lora_a: [e, r, K], floating point.
        lora_b: [e, F, r], same dtype as ``lora_a``; both enter the products in that of the rows.
        counts: e numbers; rows of each expert, zeros allowed.
        scale: of the adapter's part.
        weight_grad_scale: multiplies the gradients of weight and factors; that of the rows is left
            as it is.

    Returns:
        [N, F]. Gradients of ``lora_a`` and ``lora_b`` are in their own dtype, zeros for an expert
        without rows.

    Raises:
        TypeError, ValueError: dtypes, shapes or counts do not fit.

    Source: LoRA (arXiv 2106.09685), section 4.1.

    Example:
        >>> rows, weight = torch.ones(2, 3), torch.ones(2, 1, 3)
        >>> a, b = torch.ones(2, 1, 3), torch.ones(2, 1, 1)
        >>> moe_lora_linear(rows, weight, a, b, [2, 0], scale=0.5)
        tensor([[4.5000],
                [4.5000]])
    """
    check_tensors("moe_lora_linear", rows=rows, weight=weight, lora_a=lora_a, lora_b=lora_b)
    return torch.ops.parallel_ext.moe_lora_linear(
        rows, weight, lora_a, lora_b, list(counts), scale, weight_grad_scale
    )


def moe_take_tokens(
    input: torch.Tensor, weights: torch.Tensor, sizes: Sequence[int], group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take this rank's share of the replicated tokens.

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
    check_arguments("moe_take_tokens", group, input=input, weights=weights)
    return torch.ops.parallel_ext.moe_take_tokens(
        input, weights, list(sizes), group.rank, group.size, group.name
    )
