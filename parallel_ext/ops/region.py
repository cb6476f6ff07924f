"""The borders of a region of ops whose operands are sharded over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_ext.ops.arguments import check_arguments
from parallel_ext.ops.group import ALONE, Group  # noqa: F401 (an example)


def reduce_from_region(partial: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum the ranks' partial results; the border where a tensor-parallel region ends.

    Args:
        partial: [..., H], floating point; this rank's addend.
        group: the ranks of the region, such as the tensor-parallel group.

    Returns:
        [..., H], the sum, replicated. Its gradient passes through unchanged, because every rank
        already holds the gradient of the replicated value.

    Raises:
        TypeError: ``partial`` is not floating point.

    Source: Megatron-LM (arXiv 1909.08053), section 3, operator g.

    Example:
        >>> reduce_from_region(torch.ones(2), ALONE)
        tensor([1., 1.])
    """
    check_arguments("reduce_from_region", group, partial=partial)
    return torch.ops.parallel_ext.reduce_from_region(partial, group.size, group.name)


def copy_to_region(input: torch.Tensor, group: Group) -> torch.Tensor:
    """Let a replicated input enter a tensor-parallel region; its gradient is summed there.

    Args:
        input: [..., H], floating point, replicated.
        group: the ranks of the region, such as the tensor-parallel group.

    Returns:
        [..., H], replicated. In backward every rank contributes the partial gradient of its shard
        and receives the sum.

    Raises:
        TypeError: ``input`` is not floating point.

    Source: Megatron-LM (arXiv 1909.08053), section 3, operator f.

    Example:
        >>> copy_to_region(torch.ones(2), ALONE)
        tensor([1., 1.])
    """
    check_arguments("copy_to_region", group, input=input)
    return torch.ops.parallel_ext.copy_to_region(input, group.size, group.name)


def gather_from_region(shard: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """All-gather the ranks' columns; the border where sharded outputs become replicated.

    Args:
        shard: [..., sizes[group.rank]], any dtype; this rank's columns.
        sizes: columns of every rank, zeros allowed.
        group: the ranks of the region, such as the tensor-parallel group.

    Returns:
        [..., sum(sizes)], replicated; its gradient, which every rank holds whole, is sliced to
        the own columns.

    Raises:
        ValueError: ``shard`` does not have this rank's columns, or the sizes are not one a rank.

    Example:
        >>> gather_from_region(torch.ones(2, 3), [3], ALONE).shape
        torch.Size([2, 3])
    """
    check_arguments("gather_from_region", group, shard=shard)
    return torch.ops.parallel_ext.gather_from_region(
        shard, list(sizes), group.rank, group.size, group.name
    )


def take_tokens(input: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Take this rank's tokens; the border where the ranks begin to keep tokens of their own.

    Args:
        input: [..., sum(sizes), H], floating point, replicated.
        sizes: tokens of every rank, zeros allowed.
        group: the ranks, such as the tensor-parallel group.

    Returns:
        [..., sizes[group.rank], H], this rank's tokens of each sequence, as a copy. Its gradient is
        gathered, so that every rank holds the gradient of all tokens.

    Raises:
        TypeError: ``input`` is not floating point.
        ValueError: it does not have as many tokens, or the sizes are not one a rank.

    Example:
        >>> take_tokens(torch.ones(2, 3, 4), [3], ALONE).shape
        torch.Size([2, 3, 4])
    """
    check_arguments("take_tokens", group, input=input)
    return torch.ops.parallel_ext.take_tokens(
        input, list(sizes), group.rank, group.size, group.name
    )


def gather_tokens(
    shard: torch.Tensor, sizes: Sequence[int], group: Group, partial_gradient: bool = True
) -> torch.Tensor:
    """All-gather the ranks' tokens; the border where each rank's own tokens enter a region.

    Args:
        shard: [..., sizes[group.rank], H], floating point, this rank's tokens.
        sizes: tokens of every rank, zeros allowed.
        group: the ranks, such as the tensor-parallel group.
        partial_gradient: whether each rank computes a part of the result's gradient, as in front of
            column-parallel layers. False where every rank computes all of it.

    Returns:
        [..., sum(sizes), H], replicated. Its gradient is that of :func:`sum_tokens`, a
        reduce-scatter, where it is partial, else this rank's slice.

    Raises:
        TypeError: ``shard`` is not floating point.
        ValueError: it does not have this rank's tokens, or the sizes are not one a rank.

    Source: "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
    section 4.2.2, operator g.

    Example:
        >>> gather_tokens(torch.ones(2, 3, 4), [3], ALONE).shape
        torch.Size([2, 3, 4])
    """
    check_arguments("gather_tokens", group, shard=shard)
    return torch.ops.parallel_ext.gather_tokens(
        shard, list(sizes), group.rank, bool(partial_gradient), group.size, group.name
    )


def sum_tokens(partial: torch.Tensor, sizes: Sequence[int], group: Group) -> torch.Tensor:
    """Reduce-scatter partial results by tokens; the border where own tokens leave a region.

    Args:
        partial: [..., sum(sizes), H], floating point; this rank's addend.
        sizes: tokens of every rank, zeros allowed.
        group: the ranks, such as the tensor-parallel group.

    Returns:
        [..., sizes[group.rank], H], the sums of this rank's tokens, in fp32 or wider and rounded
        once. Their gradient is gathered.

    Raises:
        TypeError: ``partial`` is not floating point.
        ValueError: it does not have as many tokens, or the sizes are not one a rank.

    Source: as :func:`gather_tokens`, operator g-bar.

    Example:
        >>> sum_tokens(torch.ones(2, 3, 4), [3], ALONE).shape
        torch.Size([2, 3, 4])
    """
    check_arguments("sum_tokens", group, partial=partial)
    return torch.ops.parallel_ext.sum_tokens(
        partial, list(sizes), group.rank, group.size, group.name
    )
