"""Typed Python entry points of the C++ ops.

Shapes: T tokens, H hidden, V the true vocabulary size. *Replicated* means equal on all ranks of the
group, *sharded* that each rank holds its range, *partial* that the sum over the ranks is the value.
Every rank of the group must call an op, with shapes that agree, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel_ext.layout import Range


class Group(NamedTuple):
    """A process group as the ops take it: plain data, so that modules copy and pickle.

    Attributes:
        name: what ``torch.distributed`` registered the group as; unused for a group of one.
        size: number of ranks.
        rank: this process's position.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Group:
        """The handle of a live process group."""
        return cls(process_group.group_name, process_group.size(), process_group.rank())


ALONE = Group("", 1, 0)
"""The group of one process: the ops communicate nothing."""


class Dropout(NamedTuple):
    """Dropout of an input [T, K] whose mask can be drawn again, by any rank, in any part.

    The random bits of an element are those of Philox4x32-10 for the counter of its global token and
    feature (``csrc/dropout.cpp``), so the mask depends neither on how the input is cut nor on what
    was drawn before.

    Attributes:
        p: probability of a zero, in [0, 1]; in effect the nearest multiple of 2^-16.
        key: of the layer's masks: 63 bits.
        step: of training, in [0, 2^32).
        token: global index of the first token, the last one below 2^32.
        feature: global index of the first feature.
    """

    p: float
    key: int
    step: int
    token: int = 0
    feature: int = 0


def reduce_from_tp(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial results; the border where a tensor-parallel region ends.

    Args:
        partial: [..., H], floating point; this rank's addend.
        group: the tensor-parallel group.

    Returns:
        [..., H], the sum, replicated. Its gradient passes through unchanged, because every rank
        already holds the gradient of the replicated value.

    Raises:
        TypeError: ``partial`` is not floating point.

    Source: Megatron-LM (arXiv 1909.08053), section 3, operator g.

    Example:
        >>> reduce_from_tp(torch.ones(2), ALONE)
        tensor([1., 1.])
    """
    return torch.ops.parallel_ext.reduce_from_tp(partial, group.size, group.name)


def copy_to_tp(input: torch.Tensor, group: Group) -> torch.Tensor:
    """Let a replicated input enter a tensor-parallel region; its gradient is summed there.

    Args:
        input: [..., H], floating point, replicated.
        group: the tensor-parallel group.

    Returns:
        [..., H], replicated. In backward every rank contributes the partial gradient of its shard
        and receives the sum.

    Raises:
        TypeError: ``input`` is not floating point.

    Source: Megatron-LM (arXiv 1909.08053), section 3, operator f.

    Example:
        >>> copy_to_tp(torch.ones(2), ALONE)
        tensor([1., 1.])
    """
    return torch.ops.parallel_ext.copy_to_tp(input, group.size, group.name)


def gather_from_tp(shard: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Join the ranks' columns; the border where sharded outputs become replicated.

    Args:
        shard: [..., sizes[group.rank]], any dtype; this rank's columns.
        sizes: columns of every rank, zeros allowed.
        group: the tensor-parallel group.

    Returns:
        [..., sum(sizes)], replicated; its gradient, which every rank holds whole, is cut to the
        own columns.

    Raises:
        ValueError: ``shard`` does not have this rank's columns, or the sizes are not one a rank.

    Example:
        >>> gather_from_tp(torch.ones(2, 3), [3], ALONE).shape
        torch.Size([2, 3])
    """
    return torch.ops.parallel_ext.gather_from_tp(
        shard, list(sizes), group.rank, group.size, group.name
    )


def column_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_stride: int | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Linear layer of which a rank holds some output features (rows of the weight).

    Args:
        input: [..., K], replicated.
        weight: [F, K], this rank's rows, same dtype.
        bias: [F], this rank's part, or None.
        row_stride: elements from one row of the output to the next, at least F (default F): aligned
            rows for the passes over the logits. What lies between the rows is never read.
        group: with the tensor-parallel group the gradient of ``input`` is summed over it, while the
            weight's gradient is computed. With ALONE that sum is left to :func:`copy_to_tp`, so
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
    stride = weight.size(0) if row_stride is None else row_stride
    return torch.ops.parallel_ext.column_linear(input, weight, bias, stride, group.size, group.name)


def row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = ALONE,
) -> torch.Tensor:
    """Linear layer of which a rank holds some input features (columns of the weight).

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
    """A linear layer and its low-rank adapter in one.

    ``input weight^T + scale (dropout(input) lora_a^T) lora_b^T``: the adapter's part is added in
    the product of the base, and nothing but the input, the weights and [T, r] is kept for backward.
    For a base cut by output features (rows of the weight) the group is ALONE: ``lora_a`` is
    replicated, ``lora_b`` cut like the base, and the gradients of the input and of ``lora_a`` are
    partial sums. For a base cut by input features the group is the tensor-parallel one: ``lora_a``
    is cut like the base, ``lora_b`` replicated with a partial gradient, and both parts of the
    output are summed in one all-reduce.

    Args:
        input: [..., K], this rank's features where the base is cut by them.
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
    return torch.ops.parallel_ext.lora_linear(
        input, weight, lora_a, lora_b, bias, scale, p, counter, group.size, group.name
    )


def vocab_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    vocab_size: int,
    vocab_start: int,
    *,
    padding_idx: int | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Look up rows of an embedding table that is cut by rows over the ranks.

    Args:
        ids: [...], int64, replicated, in ``[0, vocab_size)``.
        weight: [R, H], this rank's rows ``[vocab_start, vocab_start + R)``; R may be 0.
        vocab_size: V, rows of the whole table.
        vocab_start: first row of this rank.
        padding_idx: global id whose row gets no gradient, or None; negative ones count from V.
        group: the tensor-parallel group.

    Returns:
        [..., H] in the dtype of ``weight``, replicated: one all-reduce in forward. In backward each
        rank sums the gradients of its own rows in token order, in fp32, and communicates nothing.

    Raises:
        IndexError: an id is outside the vocabulary (on the CPU; see the agreement check for GPUs).
        TypeError, ValueError: dtypes or shapes do not fit.

    Source: Megatron-LM (arXiv 1909.08053), section 3, with the rows of the ranks uneven or empty.

    Example:
        >>> vocab_embedding(torch.tensor([1]), torch.eye(2), vocab_size=2, vocab_start=0)
        tensor([[0., 1.]])
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += vocab_size
    return torch.ops.parallel_ext.vocab_embedding(
        ids, weight, vocab_size, vocab_start, padding_idx, group.size, group.name
    )


def vocab_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    group: Group = ALONE,
) -> torch.Tensor:
    """Cross entropy of logits that are cut by vocabulary; the logits are never gathered.

    Args:
        logits: [T, stop - start], this rank's columns, floating point; rows may lie further apart
            than they are long.
        labels: [T], int64, replicated; in ``[0, vocab_size)`` or ``ignore_index``.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        ignore_index: label of tokens that count neither in the loss nor in its mean.
        reduction: "none" ([T], 0 where ignored, whatever the logits are), "sum" or "mean" (over the
            tokens not ignored; NaN when there are none, as in torch).
        group: the tensor-parallel group.

    Returns:
        The loss, replicated, the same bits on every rank; fp32 (fp64 for fp64 logits) whatever the
        dtype of the logits. One all-gather of three numbers a token in forward; backward gives
        each rank its columns of the gradient and communicates nothing.

    Raises:
        IndexError: a label is outside the vocabulary (on the CPU).
        TypeError, ValueError: dtypes or shapes do not fit, gathered logits included.

    Source: log-sum-exp by (maximum, sum) pairs, Milakov and Gimelshein (arXiv 1805.02867), eq. 4.

    Example:
        >>> vocab_cross_entropy(torch.zeros(1, 4), torch.tensor([2]), 4, (0, 4))
        tensor(1.3863)
    """
    return torch.ops.parallel_ext.vocab_cross_entropy(
        logits, labels, vocab_size, *vocab_range, ignore_index, reduction, group.size, group.name
    )


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
