"""Embedding and loss of a vocabulary that is cut over the ranks."""

from __future__ import annotations

import torch

from parallel_ext.layout import Range
from parallel_ext.ops.group import ALONE, Group


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
