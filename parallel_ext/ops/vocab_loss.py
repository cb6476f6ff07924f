"""Cross entropy of a vocabulary that is sharded over the ranks, with or without output head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parallel_ext.ops.arguments import check_group, check_tensors, check_whole
from parallel_ext.ops.group import ALONE, Group, Range


@dataclass(frozen=True, eq=False)
class LossOptions:
    """Options of the vocabulary's cross entropy, equal on all ranks.

    All is computed of ``z = softcap * tanh(logit_scale * logits / softcap)``, the options that
    torch has as torch computes them.

    Attributes:
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

    Source: z-loss: ST-MoE (arXiv 2202.08906), section 3; softcap: Gemma 2 (arXiv 2408.00118),
    section 2.

    Example:
        >>> LossOptions(label_smoothing=0.1).reduction
        'mean'
    """

    weight: torch.Tensor | None = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


_DEFAULT = LossOptions()
_NO_STATISTICS = (False, False, False)


class VocabStatistics(NamedTuple):
    """The results of :func:`vocab_cross_entropy_statistics`; None where not asked for."""

    loss: torch.Tensor
    log_sum_exp: torch.Tensor | None
    entropy: torch.Tensor | None
    argmax: torch.Tensor | None


def in_order(
    op_name: str, options: LossOptions, group: Group, vocab_size: int, vocab_range: Range
) -> tuple[Any, ...]:
    """Return the last arguments of the loss ops in the order of their schemas, checked."""
    check_group(op_name, group)
    if not isinstance(options, LossOptions):
        raise TypeError(f"{op_name}: options must be LossOptions, got {options!r}")
    if not isinstance(options.reduction, str):  # which strings there are is for the op to say
        raise TypeError(
            f"{op_name}: reduction must be 'none', 'sum' or 'mean', got {options.reduction!r}"
        )
    check_whole(op_name, group, vocab_size, vocab_range)
    return (
        group.size,
        group.name,
        options.weight,
        vocab_size,
        *vocab_range,
        options.ignore_index,
        options.reduction,
        options.label_smoothing,
        options.z_loss,
        options.softcap,
        options.logit_scale,
    )


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
    options: LossOptions = _DEFAULT,
    *,
    consume_logits: bool = False,
    group: Group = ALONE,
) -> torch.Tensor:
    """Compute the cross entropy of logits sharded by vocabulary, without gathering logits.

    Args:
        logits: [T, stop - start], this rank's columns, floating point; rows may lie further apart
            than they are long. Never written to but with ``consume_logits``.
        labels: [T], int64, replicated; in ``[0, vocab_size)`` or ``ignore_index``.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        options: of the loss.
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
        TypeError, ValueError: dtypes, shapes or options do not fit, gathered logits included;
            ranges of the ranks that overlap or leave ids out, and class weights that are negative
            or not finite (on the CPU); ``consume_logits`` for a leaf, which the user keeps, or for
            rows that overlap.

    Source: log-sum-exp by (maximum, sum) pairs, Milakov and Gimelshein (arXiv 1805.02867), eq. 4.

    Example:
        >>> vocab_cross_entropy(torch.zeros(1, 4), torch.tensor([2]), 4, (0, 4))
        tensor(1.3863)
    """
    op_name = "vocab_cross_entropy"
    last = in_order(op_name, options, group, vocab_size, vocab_range)
    check_tensors(op_name, logits=logits, labels=labels)
    return torch.ops.parallel_ext.vocab_cross_entropy(
        logits, labels, _NO_STATISTICS, consume_logits, *last
    )[0]


def vocab_cross_entropy_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    options: LossOptions = _DEFAULT,
    *,
    log_sum_exp: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    group: Group = ALONE,
) -> VocabStatistics:
    """Compute :func:`vocab_cross_entropy` and statistics of each token in the same exchange.

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
    op_name, wanted = "vocab_cross_entropy_statistics", (log_sum_exp, entropy, argmax)
    last = in_order(op_name, options, group, vocab_size, vocab_range)
    check_tensors(op_name, logits=logits, labels=labels)
    outputs = torch.ops.parallel_ext.vocab_cross_entropy(logits, labels, wanted, False, *last)
    return _statistics(outputs, wanted)


def linear_vocab_cross_entropy(
    input: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    options: LossOptions = _DEFAULT,
    *,
    bias: torch.Tensor | None = None,
    tokens: Sequence[int] | None = None,
    group: Group = ALONE,
) -> torch.Tensor:
    """Compute output head and :func:`vocab_cross_entropy` in one; only a tile of logits exists.

    Args:
        input: [T, H], floating point, replicated hidden states.
        head_weight: [stop - start, H], this rank's rows of the head, in the dtype of ``input``.
        labels: [T], int64, replicated; in ``[0, vocab_size)`` or ``ignore_index``.
        vocab_size: V.
        vocab_range: this rank's half-open range of ids, ``(start, stop)``; may be empty.
        options: of the loss.
        bias: [stop - start], of this rank's ids, or None.
        tokens: how many tokens of each sequence each rank has, in rank order, zeros allowed;
            ``input`` is then [B, tokens[group.rank], H], and T is B * sum(tokens). None where every
            rank has all.
        group: the tensor-parallel group.

    Returns:
        The loss, replicated, the same bits on every rank; fp32 (fp64 for fp64) whatever the dtype.
        Backward sums the input's gradient over the group in one all-reduce and gives each rank its
        rows of the others. It may run again (``retain_graph=True``), but has no derivative of its
        own.

        A head that is trained: for "mean" and "sum" the forward computes all gradients, tile by
        tile, in three GEMMs and with one all-gather a tile (1024 tokens, 8192 on a GPU); backward
        scales them. For "none", for fp16's "mean" and for a second backward the logits are made
        again.

        A head without gradients (LoRA, probing): two GEMMs and one all-gather, for every reduction;
        with ``softcap`` as for a head that is trained.

        With ``tokens`` the forward gathers the hidden states, and the input's gradient is
        reduce-scattered where it is computed. What a trained head keeps for backward is then of own
        tokens only; what a frozen head keeps, [T, H] in fp32, is of all tokens.

        Memory beyond gradients: a tile, [T, H] numbers in fp32, and for a trained head in bf16 or
        fp16 its gradient in fp32, in which it is summed.

    Raises:
        IndexError, TypeError, ValueError: as :func:`vocab_cross_entropy`.

    Source: rescaled sums over tiles of ids as in FlashAttention (arXiv 2205.14135), algorithm 1,
    with the head's rows for keys and values.

    Example:
        >>> hidden, head = torch.zeros(1, 3), torch.eye(4, 3)
        >>> linear_vocab_cross_entropy(hidden, head, torch.tensor([2]), 4, (0, 4))
        tensor(1.3863)
    """
    op_name = "linear_vocab_cross_entropy"
    last = in_order(op_name, options, group, vocab_size, vocab_range)
    check_tensors(op_name, input=input, head_weight=head_weight, labels=labels)
    return torch.ops.parallel_ext.linear_vocab_cross_entropy(
        *(input, head_weight, bias, labels, _NO_STATISTICS, list(tokens or ()), group.rank), *last
    )[0]


def linear_vocab_cross_entropy_statistics(
    input: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    options: LossOptions = _DEFAULT,
    *,
    bias: torch.Tensor | None = None,
    log_sum_exp: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    group: Group = ALONE,
) -> VocabStatistics:
    """Compute :func:`linear_vocab_cross_entropy` and statistics of each token.

    The statistics, and their arguments and returns, are those of
    :func:`vocab_cross_entropy_statistics`. A backward from a statistic makes the logits again.

    Example:
        >>> hidden, head = torch.zeros(1, 3), torch.eye(4, 3)
        >>> linear_vocab_cross_entropy_statistics(
        ...     hidden, head, torch.tensor([2]), 4, (0, 4), argmax=True
        ... ).argmax
        tensor([0])
    """
    op_name, wanted = "linear_vocab_cross_entropy_statistics", (log_sum_exp, entropy, argmax)
    last = in_order(op_name, options, group, vocab_size, vocab_range)
    check_tensors(op_name, input=input, head_weight=head_weight, labels=labels)
    outputs = torch.ops.parallel_ext.linear_vocab_cross_entropy(
        *(input, head_weight, bias, labels, wanted, (), group.rank), *last
    )
    return _statistics(outputs, wanted)
