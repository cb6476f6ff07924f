"""The training loss of a causal model: of logits sharded by vocabulary, and of a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.errors import DisagreementError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.routing import fixed_softmax
from parallel_ext.ops.group import Range
from parallel_ext.sharding.slices import from_each_rank

if TYPE_CHECKING:  # it needs more than torch, which the heads of nn do without
    from parallel_ext.nn.replicas import ReplicaPiece
    from parallel_ext.nn.trained_parts import TrainedParts

LOSS_OPTIONS = ("label_smoothing", "z_loss", "softcap", "logit_scale")
"""Options of :class:`ops.LossOptions` that a call of a model takes beside its labels."""

OPTIONS_OF_THE_OP = ("weight", "reduction")
"""Options that it refuses: a model's loss is a mean over the tokens of all batches."""


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    vocab_range: Range,
    mesh: Mesh,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    head: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    compared: ReplicaPiece | None = None,
    trained: TrainedParts | None = None,
    blocks: ops.Blocks | None = None,
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None,
    tokens: list[int] | None = None,
    sums_over_dp: bool = False,
    tp: ops.Group | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the next-token cross entropy, averaged over the valid tokens of all dp ranks.

    Args:
        logits: [..., S, stop - start], this tp rank's columns of the vocabulary; with ``head`` the
            hidden states [..., S, H], replicated over tp, of which it makes them.
        labels: [..., S], int64 or int32, replicated over tp, not shifted.
        vocab_size: V.
        vocab_range: this rank's ids, ``(start, stop)``.
        mesh: the ranks.
        num_items_in_batch: valid tokens over all dp ranks and accumulation steps; counted when
            None, with ``sums_over_dp`` on this rank alone. Counting and comparing are one
            all-gather of four numbers over dp.
        ignore_index: label of tokens that do not count.
        shift_labels: [..., S], labels already shifted; ``labels`` is not read then.
        head: weight [stop - start, H] and bias [stop - start] or None, this tp rank's rows.
        compared: a part of a parameter that the dp ranks compare meanwhile.
        trained: what they train, which they compare as well.
        blocks: of the rows of ``head`` under ``px.Invariant``, else None.
        adapter: with ``blocks``, of the head: [..., S, R] and [stop - start, R], whose product is
            added to the logits.
        tokens: with ``head``, how many tokens of each sequence each tp rank has, if the hidden
            states are those of this rank's, [B, tokens[rank], H].
        sums_over_dp: whether the caller sums the losses of the dp ranks, instead of averaging.
        tp: the ranks that hold the columns; those of ``mesh`` by default.
        options: those of ``LOSS_OPTIONS``.

    Returns:
        ``local_sum * dp_size / count``, a scalar, equal on the tp ranks: the mean over the dp ranks
        is the loss of the job, and the mean of their gradients is its gradient. NaN when no token
        of the job is valid, as in torch. With ``sums_over_dp`` it is ``local_sum / count``.

    Raises:
        DisagreementError: some dp ranks compute gradients and others do not, as when one of them
            has evaluated on more batches than another; their counts do not belong together. Or
            they hold different values of ``compared``, or train different parts of the model.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    if targets.dtype == torch.int32:
        targets = targets.long()
    how = ops.LossOptions(ignore_index=ignore_index, reduction="sum", **options)
    tp = tp or mesh.tp
    inputs, asked = logits.flatten(0, -2), (targets, vocab_size, vocab_range, how)
    if head is None:
        local_sum = ops.vocab_cross_entropy(inputs, *asked, group=tp)
    elif blocks is None:
        weight, bias = head
        local_sum = ops.linear_vocab_cross_entropy(
            logits if tokens else inputs, weight, *asked, bias=bias, tokens=tokens, group=tp
        )
    else:
        low_rank = adapter and (adapter[0].flatten(0, -2), adapter[1])
        of_blocks = head[0], targets, blocks, vocab_size, vocab_range, how, low_rank
        local_sum = ops.block_linear_cross_entropy(inputs, *of_blocks, group=tp)
    count: Any = num_items_in_batch
    if count is None and sums_over_dp:
        count = (targets != ignore_index).sum()
    elif count is None or compared is not None or trained is not None:
        counted = _count_over_dp(targets != ignore_index, mesh, compared, trained)
        count = counted if count is None else count
    if isinstance(count, torch.Tensor):
        count = count.to(local_sum)
    return local_sum * (1 if sums_over_dp else mesh.dp_size) / count


def with_a_label(labels: torch.Tensor) -> torch.Tensor:
    """Return labels of which one counts where none does: a mean over none is NaN, also times 0.

    Args:
        labels: [...], of which integers of -100 do not count.
    """
    if labels.is_floating_point():
        return labels
    changed = labels.flatten().clone()
    changed[:1] = torch.where((labels == -100).all(), 0, changed[:1])
    return changed.view_as(labels)


def share_of_loss(
    loss: torch.Tensor, labels: torch.Tensor, mesh: Mesh, trained: TrainedParts | None
) -> torch.Tensor:
    """Return this dp rank's share of a mean over the labels of all dp ranks.

    Args:
        loss: the mean over this rank's labels, a scalar.
        labels: [...], of which integers of -100 do not count. Where none counts, ``loss`` is finite
            if it is that of :func:`with_a_label`.
        mesh: the ranks.
        trained: what the dp ranks train, which they compare meanwhile.

    Returns:
        ``loss * own * dp_size / count``, a scalar: the mean over the dp ranks is the loss of the
        job, and the mean of their gradients is its gradient.
    """
    valid = torch.ones_like(labels, dtype=torch.bool)
    if not labels.is_floating_point():
        valid = labels != -100
    count = _count_over_dp(valid, mesh, None, trained)
    return loss * (valid.sum() * mesh.dp_size / count).to(loss)


def balance_loss(
    router_logits: Sequence[torch.Tensor],
    top_k: int,
    attention_mask: torch.Tensor | None,
    mesh: Mesh,
) -> torch.Tensor:
    """Return this dp rank's share of the load balancing loss of the whole batch.

    E times the sum over the experts of (choices per token) times (mean probability), both over all
    layers and tokens of all dp ranks; one all-gather of E + 1 numbers over dp.

    Args:
        router_logits: of each layer [tokens, E], replicated over tp.
        top_k: experts that a token chooses.
        attention_mask: [batch, sequence], zero for padding, which does not count; or None.
        mesh: the ranks.

    Returns:
        A scalar, equal on the tp ranks; the mean over the dp ranks is the loss of the job, and the
        mean of their gradients is its gradient.

    Source: equations 4 to 6 of Switch Transformers (arXiv 2101.03961) as HuggingFace computes them:
    with top_k choices a token, so that perfect balance gives top_k.
    """
    first = router_logits[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    num_experts = first.size(-1)
    chosen = first.new_zeros(num_experts, dtype=wide)
    probability, tokens = torch.zeros_like(chosen), chosen.new_zeros(1)
    weight = _valid(first, attention_mask, wide)
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        choices = probabilities.topk(top_k, -1).indices
        chosen.scatter_add_(0, choices.flatten(), weight.repeat_interleave(top_k))
        probability = probability + weight @ probabilities.to(wide)
        tokens += weight.sum()
    own = torch.cat([chosen, tokens])
    total = from_each_rank(own, mesh.dp).sum(0)
    chosen, tokens = total[:-1] / total[-1], total[-1]
    return mesh.dp_size * num_experts * (chosen @ probability) / tokens


class BalanceOfLeaves:
    """The load balancing loss of a batch whose leaves run one by one, a sum of shares of leaves.

    A share needs how often the whole batch chose each expert. So all leaves are counted first, in
    forwards of their own, and then each is given its share: with equal bits on any layout, and to
    rounding that of :func:`balance_loss` on the batch.

    Args:
        num_experts: E.
        top_k: experts that a token chooses.
        mesh: the ranks; the leaves of all dp ranks are one batch.
    """

    def __init__(self, num_experts: int, top_k: int, mesh: Mesh) -> None:
        self.num_experts, self.top_k, self.mesh = num_experts, top_k, mesh
        # Choices of each expert, and tokens, in all layers: integers, which fp64 adds exactly.
        self._own = torch.zeros(num_experts + 1, dtype=torch.float64, device=mesh.device)
        self._of_all: torch.Tensor | None = None

    def count(self, router_logits: Sequence[torch.Tensor], mask: torch.Tensor | None) -> None:
        """Count what a leaf of this rank has chosen; arguments as of :func:`balance_loss`."""
        for logits in router_logits:
            valid = _valid(logits, mask, torch.float64)
            choices = logits.softmax(-1).topk(self.top_k, -1).indices.flatten()
            self._own.scatter_add_(0, choices, valid.repeat_interleave(self.top_k))
            self._own[-1] += valid.sum()

    def sum_over_dp(self) -> None:
        """Add the counts of all dp ranks."""
        self._of_all = from_each_rank(self._own, self.mesh.dp).sum(0)

    def share(
        self, router_logits: Sequence[torch.Tensor], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a leaf's share of the loss, a scalar; 0 while tokens are only counted."""
        first = router_logits[0]
        wide = torch.promote_types(first.dtype, torch.float32)
        if self._of_all is None:
            return first.new_zeros((), dtype=wide)
        chosen, tokens = self._of_all[:-1], self._of_all[-1]
        factors = (self.num_experts * chosen / tokens.square()).to(wide)
        shares = [
            (fixed_softmax(logits) * factors).sum(-1) * _valid(logits, mask, wide)
            for logits in router_logits
        ]
        return _sum_in_halves(torch.cat(shares))


def _valid(logits: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if mask is None:
        return logits.new_ones(len(logits), dtype=dtype)
    return mask.reshape(-1).to(logits.device, dtype)


def _sum_in_halves(values: torch.Tensor) -> torch.Tensor:
    """Add the elements of a vector in an order that depends on their number alone."""
    while (size := len(values)) > 1:
        half = size // 2
        values = torch.cat([values[:half] + values[half : 2 * half], values[2 * half :]])
    return values[0]


def _count_over_dp(
    valid: torch.Tensor,
    mesh: Mesh,
    compared: ReplicaPiece | None,
    trained: TrainedParts | None,
) -> torch.Tensor:
    """Return the number of valid tokens of all dp ranks, which must all make the same call."""
    if mesh.dp_size == 1:
        return valid.sum()
    number = 0 if compared is None else compared.number() >> 16  # exact in fp64
    parts = 0 if trained is None else trained.number()
    own = valid.new_tensor([0, torch.is_grad_enabled(), number, parts], dtype=torch.float64)
    own[0] = valid.sum()
    ranks = from_each_rank(own, mesh.dp)
    if valid.device.type == "cpu" and len(set(ranks[:, 1].tolist())) > 1:
        training = [f"dp rank {rank}" for rank, grad in enumerate(ranks[:, 1].tolist()) if grad]
        raise DisagreementError(
            f"the loss of {', '.join(training)} is computed with gradients, that of the other dp "
            "ranks without; the dp ranks must make equally many forwards with labels"
        )
    if trained is not None:
        trained.check(ranks[:, 3].tolist(), mesh)
    if compared is not None:
        compared.check(ranks[:, 2].tolist(), "the loss")
    return ranks[:, 0].sum()
