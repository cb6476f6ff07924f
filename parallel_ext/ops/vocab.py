"""Embedding of a vocabulary that is sharded over the ranks, and choice of the next token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_ext.ops.arguments import check_arguments, check_whole
from parallel_ext.ops.group import ALONE, Group, Range


def vocab_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    vocab_size: int,
    vocab_start: int,
    *,
    padding_idx: int | None = None,
    sizes: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Look up rows of an embedding table whose rows are sharded over the ranks.

    Args:
        ids: [...], int64, replicated, in ``[0, vocab_size)``.
        weight: [R, H], this rank's rows ``[vocab_start, vocab_start + R)``; R may be 0.
        vocab_size: V, rows of the whole table.
        vocab_start: first row of this rank.
        padding_idx: global id whose row gets no gradient, or None; negative ones count from V.
        sizes: rows of each rank, in rank order; None for those of :func:`layout.split`.
        tokens: how many of the last dimension of ``ids`` each rank keeps, in rank order, zeros
            allowed; None where every rank is given the rows of all.
        group: the tensor-parallel group; ALONE gives zeros for rows that it has not.

    Returns:
        [..., H] in the dtype of ``weight``, replicated, the bits of the rows. One exchange in
        forward: on the CPU each row that is looked up travels once, from its rank to the other
        p - 1 ranks, unless some rank owns more than 2 T / p of the different ids; then, and on
        other devices, where the ids are not read, one all-reduce. In backward each rank sums the
        gradients of its own rows in token order, in fp32, and communicates nothing.

        With ``tokens`` [..., tokens[group.rank], H], the rows of this rank's tokens. On the CPU a
        row goes once to each rank that looks it up, and in backward the gradient of a token to the
        rank of its row; on other devices there is a reduce-scatter, and an all-gather in backward.

    Raises:
        IndexError: an id is outside the vocabulary (on the CPU; see the agreement check for GPUs).
        TypeError, ValueError: dtypes, shapes or ``sizes`` do not fit.

    Source: Megatron-LM (arXiv 1909.08053), section 3, with the rows of the ranks uneven or empty.

    Example:
        >>> vocab_embedding(torch.tensor([1]), torch.eye(2), vocab_size=2, vocab_start=0)
        tensor([[0., 1.]])
    """
    if padding_idx is not None and padding_idx < 0:
        padding_idx += vocab_size
    check_arguments("vocab_embedding", group, ids=ids, weight=weight)
    table = ids, weight, vocab_size, vocab_start, padding_idx, sizes or ()
    if tokens is None:
        return torch.ops.parallel_ext.vocab_embedding(*table, group.size, group.name)
    return torch.ops.parallel_ext.vocab_embedding_of_tokens(
        *table, list(tokens), group.rank, group.size, group.name
    )


def vocab_argmax(
    logits: torch.Tensor, vocab_size: int, vocab_range: Range, *, group: Group = ALONE
) -> torch.Tensor:
    """Return the id of the largest logit of each row, without gathering logits.

    Args:
        logits: [B, stop - start], this rank's columns, floating point.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        group: the tensor-parallel group.

    Returns:
        [B], int64, replicated: the lowest id of equal ones, and of the first NaN where there is
        one, as ``torch.argmax``. One exchange of 16 bytes a row and rank.

    Raises:
        TypeError, ValueError: dtype or shape do not fit, gathered logits included.

    Example:
        >>> vocab_argmax(torch.tensor([[0.0, 2.0, 2.0]]), 3, (0, 3))
        tensor([1])
    """
    check_arguments("vocab_argmax", group, logits=logits)
    check_whole("vocab_argmax", group, vocab_size, vocab_range)
    return torch.ops.parallel_ext.vocab_argmax(
        logits, vocab_size, *vocab_range, group.size, group.name
    )


def vocab_sample(
    logits: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int,
    step: int,
    group: Group = ALONE,
) -> torch.Tensor:
    """Draw an id for each row from ``softmax(logits / temperature)``, without gathering logits.

    The filters apply one after the other in the order of the arguments, and ids as probable as the
    last one that a filter keeps stay with it. Logits go by their fp32 value. The random number of
    an id is a function of ``seed``, ``step``, the number of the row and the id, so that the draws
    are the same for every way to shard the vocabulary.

    Args:
        logits: [B, stop - start], this rank's columns, floating point.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        temperature: positive.
        top_k: keep the ``top_k`` most probable ids; 0 for all. One more exchange, of
            ``4 * (top_k + 1)`` bytes a row and rank.
        top_p: keep the fewest most probable ids whose share of what is left reaches it; 1 for all.
            After ``top_k`` it costs nothing more; alone, five more exchanges, of 8 KiB in all a row
            and rank, whatever the distribution.
        min_p: keep the ids with at least this share of the largest probability; 0 for all. Alone,
            one more exchange, of 4 bytes a row and rank.
        seed: same on all ranks, and so is ``step``; the lower 32 bits of the latter count.
        group: the tensor-parallel group.

    Returns:
        [B], int64, replicated; -1 where the largest logit is NaN or infinite. One exchange of 16
        bytes a row and rank, and those of the filters.

    Raises:
        TypeError, ValueError: dtype, shape or filters do not fit, gathered logits included.

    Source: Gumbel-max, Maddison et al. (NeurIPS 2014), section 2; top-p: Holtzman et al. (arXiv
    1904.09751), section 3.1; min-p: arXiv 2407.01082, section 3.

    Example:
        >>> vocab_sample(torch.tensor([[0.0, 9.0, 0.0]]), 3, (0, 3), top_k=1, seed=7, step=0)
        tensor([1])
    """
    check_arguments("vocab_sample", group, logits=logits)
    check_whole("vocab_sample", group, vocab_size, vocab_range)
    return torch.ops.parallel_ext.vocab_sample(
        logits,
        vocab_size,
        *vocab_range,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        step,
        group.size,
        group.name,
    )
