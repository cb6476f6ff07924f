"""Layers whose bits do not depend on how many ranks share them, for ``px.Invariant``.

A sharded dimension lies in blocks, whose borders no layout changes. What is summed over it is one
product a block, and the blocks are added over a tree that depends on their number alone
(``csrc/base/tree.h``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from parallel_ext.ops.arguments import check_arguments, check_group, check_tensors
from parallel_ext.ops.group import ALONE, Group, Range
from parallel_ext.ops.vocab_loss import LossOptions, in_order


class Blocks(NamedTuple):
    """The blocks of a sharded dimension on one rank.

    Attributes:
        own: ranges of this rank's blocks in its own shard, in order.
        count: of the blocks of all ranks, which ``split`` gives to the ranks.
    """

    own: tuple[tuple[int, int], ...]
    count: int


def _flat(ranges: Iterable[Range]) -> list[int]:
    return list(chain.from_iterable(ranges))


def block_linears(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    blocks: Sequence[Blocks],
    copies: int = 1,
    group: Group = ALONE,
) -> list[torch.Tensor]:
    """Apply up to three linear layers that read one input, sharded by output features.

    Args:
        input: [..., K], replicated.
        weights: [F, K] of each layer, this rank's rows, same dtype.
        blocks: of the rows of each; equally many of each layer.
        copies: that many consecutive blocks hold the same rows of the second and third weight, as
            a key-value head that several query heads read.
        group: the tensor-parallel group.

    Returns:
        Of each layer [..., the width of its blocks], sharded. In backward the gradient of ``input``
        is replicated: the layers' products are added in each block, and the blocks over the tree.

    Raises:
        TypeError, ValueError: dtypes, shapes or blocks do not fit.

    Example:
        >>> weight, blocks = torch.ones(4, 2), Blocks(((0, 2), (2, 4)), 2)
        >>> block_linears(torch.ones(1, 2), [weight], [blocks])
        [tensor([[2., 2., 2., 2.]])]
    """
    check_group("block_linears", group)
    check_tensors("block_linears", input=input, weight=weights[0])
    none = weights[0].new_empty(0, weights[0].size(1)), Blocks(((0, 0),) * len(blocks[0].own), 0)
    all_three = [*zip(weights, blocks, strict=True), *[none] * (3 - len(weights))]
    bounds = _flat(chain.from_iterable(of_layer.own for _, of_layer in all_three))
    outputs = torch.ops.parallel_ext.block_linears(
        input, *(w for w, _ in all_three), bounds, copies, blocks[0].count, group.size, group.name
    )
    return list(outputs[: len(weights)])


def block_row_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    blocks: Blocks,
    bias: torch.Tensor | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Apply a linear layer sharded by input features, its blocks summed over the tree.

    Args:
        input: [..., K], this rank's features of it (sharded).
        weight: [F, K], this rank's columns, same dtype.
        blocks: of the columns.
        bias: [F], replicated, or None; added once, after the sum.
        group: the tensor-parallel group.

    Returns:
        [..., F], replicated. Nothing is communicated in backward.

    Raises:
        TypeError, ValueError: dtypes, shapes or blocks do not fit.

    Example:
        >>> block_row_linear(torch.ones(1, 4), torch.ones(1, 4), Blocks(((0, 2), (2, 4)), 2))
        tensor([[4.]])
    """
    check_arguments("block_row_linear", group, input=input, weight=weight)
    return torch.ops.parallel_ext.block_row_linear(
        input, weight, bias, _flat(blocks.own), blocks.count, group.size, group.name
    )


def block_bias(
    input: torch.Tensor,
    bias: torch.Tensor,
    blocks: Blocks,
    copies: int = 1,
    group: Group = ALONE,
) -> torch.Tensor:
    """Add a bias to the output of a layer of :func:`block_linears`.

    Args:
        input: [..., the width of the blocks], sharded.
        bias: [F], this rank's rows, same dtype.
        blocks: of these rows.
        copies: that many consecutive blocks hold the same rows.
        group: the tensor-parallel group.

    Returns:
        [..., the width of the blocks], sharded. In backward the gradient of ``bias`` is summed over
        all tokens in one order, and over the tree of the blocks that share rows.

    Raises:
        TypeError, ValueError: dtypes, shapes or blocks do not fit.

    Example:
        >>> block_bias(torch.zeros(1, 4), torch.arange(4.0), Blocks(((0, 2), (2, 4)), 2))
        tensor([[0., 1., 2., 3.]])
    """
    check_arguments("block_bias", group, input=input, bias=bias)
    return torch.ops.parallel_ext.block_bias(
        input, bias, _flat(blocks.own), copies, blocks.count, group.size, group.name
    )


def block_scale(
    input: torch.Tensor, weight: torch.Tensor, blocks: Blocks, group: Group = ALONE
) -> torch.Tensor:
    """Multiply each head of a sharded attention by one weight, as a norm of heads does.

    Args:
        input: [..., heads, D], this rank's heads.
        weight: [D], replicated, same dtype.
        blocks: of the heads.
        group: the tensor-parallel group.

    Returns:
        [..., heads, D], sharded. In backward the gradient of ``weight`` is replicated: summed over
        all tokens and heads of a block in one order, and over the tree of the blocks.

    Raises:
        TypeError, ValueError: dtypes, shapes or blocks do not fit.

    Example:
        >>> block_scale(torch.ones(2, 1), torch.tensor([3.0]), Blocks(((0, 2),), 1))
        tensor([[3.],
                [3.]])
    """
    check_arguments("block_scale", group, input=input, weight=weight)
    return torch.ops.parallel_ext.block_scale(
        input, weight, _flat(blocks.own), blocks.count, group.size, group.name
    )


def repeat_heads(input: torch.Tensor, head_dim: int, times: int) -> torch.Tensor:
    """Repeat each head, one behind the other; its gradient is summed over the tree of the repeats.

    Args:
        input: [..., heads * head_dim].
        head_dim: features of a head.
        times: at least 1.

    Returns:
        [..., heads * times * head_dim].

    Example:
        >>> repeat_heads(torch.tensor([1.0, 2.0]), 1, 2)
        tensor([1., 1., 2., 2.])
    """
    check_tensors("repeat_heads", input=input)
    return torch.ops.parallel_ext.repeat_heads(input, head_dim, times)


def fixed_sigmoid(input: torch.Tensor) -> torch.Tensor:
    """Compute ``sigmoid(input)`` with bits that depend on nothing but the element.

    Args:
        input: [...], floating point; computed in fp32 or wider and rounded once.

    Example:
        >>> fixed_sigmoid(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """
    check_tensors("fixed_sigmoid", input=input)
    return torch.ops.parallel_ext.fixed_sigmoid(input)


def fixed_silu(input: torch.Tensor) -> torch.Tensor:
    """Compute ``input * sigmoid(input)`` with bits that depend on nothing but the element.

    Args:
        input: [...], floating point; computed in fp32 or wider and rounded once.

    Example:
        >>> fixed_silu(torch.zeros(2))
        tensor([0., 0.])
    """
    check_tensors("fixed_silu", input=input)
    return torch.ops.parallel_ext.fixed_silu(input)


def fixed_gelu(input: torch.Tensor) -> torch.Tensor:
    """Compute gelu by tanh with bits that depend on nothing but the element.

    Args:
        input: [...], floating point; computed in fp32 or wider and rounded once.

    Example:
        >>> fixed_gelu(torch.zeros(2))
        tensor([0., 0.])
    """
    check_tensors("fixed_gelu", input=input)
    return torch.ops.parallel_ext.fixed_gelu(input)


def block_experts(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Apply the linear layer of each expert to the rows that each leaf of a batch has for it.

    Args:
        rows: [N, K], floating point; those of an expert side by side, in the order of the leaves.
        weight: [leaves, e, F, K], same dtype: equal for all leaves, with a gradient of each.
        counts: e * leaves numbers of rows, zeros allowed.

    Returns:
        [N, F]. The gradient of a weight without rows is zero.

    Raises:
        TypeError, ValueError: dtypes, shapes or counts do not fit.

    Example:
        >>> block_experts(torch.ones(2, 3), torch.ones(1, 2, 1, 3), [2, 0])
        tensor([[3.],
                [3.]])
    """
    check_tensors("block_experts", rows=rows, weight=weight)
    return torch.ops.parallel_ext.block_experts(rows, weight, list(counts))


def sum_leaves(
    values: Sequence[torch.Tensor], nodes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> torch.Tensor:
    """Add values over the tree of all leaves of a batch, and round once.

    Args:
        values: [...] each, floating point, those of a leaf or sums of several; fp64 alone or other
            dtypes together. They are added in fp32, or in fp64.
        nodes: of each value its first leaf and how many it covers, a power of two that divides the
            first one. They follow each other.
        dtype: of the result.

    Example:
        >>> sum_leaves([torch.ones(2), torch.ones(2)], [(2, 1), (3, 1)], torch.float32)
        tensor([2., 2.])
    """
    return torch.ops.parallel_ext.sum_leaves([*values], _flat(nodes), dtype)


def block_linear_cross_entropy(
    input: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    blocks: Blocks,
    vocab_size: int,
    vocab_range: Range,
    options: LossOptions,
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Compute :func:`linear_vocab_cross_entropy` from blocks of the vocabulary.

    Args:
        input: [T, H], replicated.
        head_weight: [stop - start, H], this rank's rows.
        labels: [T], int64.
        blocks: of the rows.
        vocab_size, vocab_range: as of :func:`linear_vocab_cross_entropy`.
        options: of the loss; the reduction is ``"sum"`` or ``"mean"``.
        adapter: ``lora_a_out``, replicated [T, R], and this rank's rows ``lora_b``
            [stop - start, R], whose product is added to the logits; None for none.
        group: the tensor-parallel group.

    Returns:
        The loss, a scalar in fp32 or wider. One backward can follow.

    Raises:
        TypeError, ValueError: as of :func:`linear_vocab_cross_entropy`.
        NotImplementedError: a second backward of one loss.

    Example:
        >>> hidden, head, blocks = torch.zeros(1, 3), torch.eye(4, 3), Blocks(((0, 2), (2, 4)), 2)
        >>> options = LossOptions()
        >>> block_linear_cross_entropy(hidden, head, torch.tensor([2]), blocks, 4, (0, 4), options)
        tensor(1.3863)
    """
    op_name = "block_linear_cross_entropy"
    last = in_order(op_name, options, group, vocab_size, vocab_range)
    lora_a_out, lora_b = adapter or (each.new_empty(len(each), 0) for each in (input, head_weight))
    check_tensors(op_name, input=input, head_weight=head_weight, labels=labels)
    check_tensors(op_name, lora_a_out=lora_a_out, lora_b=lora_b)
    return torch.ops.parallel_ext.block_linear_cross_entropy(
        input, head_weight, lora_a_out, lora_b, labels, _flat(blocks.own), blocks.count, *last
    )
