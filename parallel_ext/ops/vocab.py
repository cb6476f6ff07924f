"""Embedding, loss and next token of a vocabulary that is cut over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    sizes: Sequence[int] | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Look up rows of an embedding table that is cut by rows over the ranks.

    Args:
        ids: [...], int64, replicated, in ``[0, vocab_size)``.
        weight: [R, H], this rank's rows ``[vocab_start, vocab_start + R)``; R may be 0.
        vocab_size: V, rows of the whole table.
        vocab_start: first row of this rank.
        padding_idx: global id whose row gets no gradient, or None; negative ones count from V.
        sizes: rows of each rank, in rank order; None for those of :func:`layout.split`.
        group: the tensor-parallel group; a group of one gives zeros for rows that it has not.

    Returns:
        [..., H] in the dtype of ``weight``, replicated, the bits of the rows. One exchange in
        forward: on the CPU each row that is looked up travels once, from its owner to the other
        p - 1 ranks, unless some rank owns more than 2 T / p of the different ids; then, and on
        other devices, where the ids are not read, one all-reduce. In backward each rank sums the
        gradients of its own rows in token order, in fp32, and communicates nothing.

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
    return torch.ops.parallel_ext.vocab_embedding(
        ids, weight, vocab_size, vocab_start, padding_idx, sizes or (), group.size, group.name
    )


class VocabStatistics(NamedTuple):
    """What :func:`vocab_cross_entropy_statistics` returns; None where not asked for."""

    loss: torch.Tensor
    log_sum_exp: torch.Tensor | None
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None


def _statistics(outputs: tuple[torch.Tensor, ...], wanted: tuple[bool, ...]) -> VocabStatistics:
    loss, *others = outputs
    return VocabStatistics(
        loss, *(value if want else None for value, want in zip(others, wanted, strict=True))
    )


def vocab_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    consume_logits: bool = False,
    group: Group = ALONE,
) -> torch.Tensor:
    """Cross entropy of logits that are cut by vocabulary; the logits are never gathered.

    All is computed of ``z = softcap * tanh(logit_scale * logits / softcap)``, the names that torch
    has as torch computes them.

    Args:
        logits: [T, stop - start], this rank's columns, floating point; rows may lie further apart
            than they are long. Never written to but with ``consume_logits``.
        labels: [T], int64, replicated; in ``[0, vocab_size)`` or ``ignore_index``.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        weight: [V], floating point, replicated: of each class, finite and not negative; or None.
        ignore_index: label of tokens that count neither in the loss nor in its mean.
        reduction: "none" ([T], 0 where ignored, whatever the logits are), "sum" or "mean" (over the
            weights of the labels of the tokens not ignored; NaN when there are none, as in torch).
        label_smoothing: in [0, 1): this share of the loss is that of the uniform distribution over
            the V classes.
        z_loss: not negative; ``z_loss * log_sum_exp**2`` is added to each token's loss. Class
            weights do not touch it: "mean" averages it over the tokens not ignored.
        softcap: positive, or None for no cap.
        logit_scale: finite.
        consume_logits: the logits are the loss's own: backward writes their gradient over them and
            takes no memory. It runs once, and who else uses the logits in a backward gets torch's
            error for tensors that were modified in place.
        group: the tensor-parallel group.

    Returns:
        The loss, replicated, the same bits on every rank; fp32 (fp64 for fp64 logits) whatever the
        dtype of the logits. One all-gather in forward, of three numbers a token, or five with label
        smoothing; backward gives each rank its columns of the gradient and communicates nothing. It
        may run again (``retain_graph=True``), but has no derivative of its own.

    Raises:
        IndexError: a label is outside the vocabulary (on the CPU).
        TypeError, ValueError: dtypes, shapes or options do not fit, gathered logits included, and
            class weights that are negative or not finite (on the CPU), and ``consume_logits`` for a
            leaf, which the user keeps, or for rows that overlap.

    Source: log-sum-exp by (maximum, sum) pairs, Milakov and Gimelshein (arXiv 1805.02867), eq. 4;
    z-loss: ST-MoE (arXiv 2202.08906), section 3; softcap: Gemma 2 (arXiv 2408.00118), section 2.

    Example:
        >>> vocab_cross_entropy(torch.zeros(1, 4), torch.tensor([2]), 4, (0, 4))
        tensor(1.3863)
    """
    return torch.ops.parallel_ext.vocab_cross_entropy(
        logits,
        labels,
        weight,
        vocab_size,
        *vocab_range,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        (False, False, False),
        consume_logits,
        group.size,
        group.name,
    )[0]


def vocab_cross_entropy_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    *,
    log_sum_exp: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    group: Group = ALONE,
) -> VocabStatistics:
    """:func:`vocab_cross_entropy`, and what else the same exchange can tell of each token.

    Args:
        log_sum_exp: whether to return it.
        entropy: whether to return it; one more number a token travels.
        argmax: whether to return it; one more number a token travels.

    The others are those of :func:`vocab_cross_entropy`, and so are the errors.

    Returns:
        The loss, and what was asked for, [T], replicated, the same bits on every rank, also of
        tokens that are ignored: ``log_sum_exp`` and ``entropy`` (in nats, 0 log 0 being 0) in the
        dtype of the loss, ``argmax`` in int64, the lowest id of the largest, or of the first NaN.
        Loss, ``log_sum_exp`` and ``entropy`` have gradients, ``argmax`` has none.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 2.0]])
        >>> vocab_cross_entropy_statistics(logits, torch.tensor([0]), 3, (0, 3), argmax=True).argmax
        tensor([1])
    """
    wanted = (log_sum_exp, entropy, argmax)
    outputs = torch.ops.parallel_ext.vocab_cross_entropy(
        logits,
        labels,
        weight,
        vocab_size,
        *vocab_range,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        wanted,
        False,
        group.size,
        group.name,
    )
    return _statistics(outputs, wanted)


def linear_vocab_cross_entropy(
    input: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    *,
    bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    group: Group = ALONE,
) -> torch.Tensor:
    """Output head and :func:`vocab_cross_entropy` in one; of the logits only a tile exists.

    Args:
        input: [T, H], floating point, replicated hidden states.
        head_weight: [stop - start, H], this rank's rows of the head, in the dtype of ``input``.
        labels: [T], int64, replicated; in ``[0, vocab_size)`` or ``ignore_index``.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        bias: [stop - start], of this rank's ids, or None.

    The others are those of :func:`vocab_cross_entropy`, and so are the errors.

    Returns:
        The loss, replicated, the same bits on every rank; fp32 (fp64 for fp64) whatever the dtype.
        Backward sums the input's gradient over the group in one all-reduce and gives each rank its
        rows of the others. It may run again (``retain_graph=True``), but has no derivative of its
        own.

        A head that is trained: for "mean" and "sum" the forward computes all gradients, tile by
        tile, in three GEMMs and with one all-gather a tile (256 tokens in fp32, 512 in bf16; 4096
        on a GPU); backward scales them. For "none", for fp16's "mean" and for a second backward the
        logits are made once more.

        A head without gradients (LoRA, probing): two GEMMs and one all-gather, for every reduction;
        with ``softcap`` as for a head that is trained.

        Memory beyond gradients: a tile, [T, H] numbers in fp32, and for a trained head in bf16 or
        fp16 its gradient in fp32, in which it is summed.

    Source: rescaled sums over tiles of ids as in FlashAttention (arXiv 2205.14135), algorithm 1,
    with the head's rows for keys and values.

    Example:
        >>> hidden, head = torch.zeros(1, 3), torch.eye(4, 3)
        >>> linear_vocab_cross_entropy(hidden, head, torch.tensor([2]), 4, (0, 4))
        tensor(1.3863)
    """
    return torch.ops.parallel_ext.linear_vocab_cross_entropy(
        input,
        head_weight,
        bias,
        labels,
        weight,
        vocab_size,
        *vocab_range,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        (False, False, False),
        group.size,
        group.name,
    )[0]


def linear_vocab_cross_entropy_statistics(
    input: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    *,
    bias: torch.Tensor | None = None,
    log_sum_exp: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    group: Group = ALONE,
) -> VocabStatistics:
    """:func:`linear_vocab_cross_entropy` with the statistics of
    :func:`vocab_cross_entropy_statistics`, whose arguments and returns these are.

    A backward from a statistic makes the logits once more.

    Example:
        >>> hidden, head = torch.zeros(1, 3), torch.eye(4, 3)
        >>> linear_vocab_cross_entropy_statistics(
        ...     hidden, head, torch.tensor([2]), 4, (0, 4), argmax=True
        ... ).argmax
        tensor([0])
    """
    wanted = (log_sum_exp, entropy, argmax)
    outputs = torch.ops.parallel_ext.linear_vocab_cross_entropy(
        input,
        head_weight,
        bias,
        labels,
        weight,
        vocab_size,
        *vocab_range,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        wanted,
        group.size,
        group.name,
    )
    return _statistics(outputs, wanted)


def vocab_argmax(
    logits: torch.Tensor, vocab_size: int, vocab_range: Range, *, group: Group = ALONE
) -> torch.Tensor:
    """The id of the largest logit of each row; the logits are never gathered.

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
    are the same for every way to cut the vocabulary.

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
