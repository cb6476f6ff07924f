"""The training loss of a causal language model whose logits are cut by vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.layout import Range
from parallel_ext.mesh import DisagreementError, Mesh


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
) -> torch.Tensor:
    """Next-token cross entropy, averaged over the valid tokens of all data-parallel ranks.

    Args:
        logits: [..., S, stop - start], this tp rank's columns of the vocabulary.
        labels: [..., S], int64, replicated over tp, not shifted.
        vocab_size: V.
        vocab_range: this rank's ids, ``(start, stop)``.
        mesh: the ranks.
        num_items_in_batch: valid tokens over all dp ranks and accumulation steps; counted with one
            all-gather of two numbers over dp when None.
        ignore_index: label of tokens that do not count.
        shift_labels: [..., S], labels already shifted; ``labels`` is not read then.

    Returns:
        ``local_sum * dp_size / count``, a scalar, equal on the tp ranks: the mean over the dp ranks
        is the loss of the job, and the mean of their gradients is its gradient. NaN when no token
        of the job is valid, as in torch.

    Raises:
        DisagreementError: some dp ranks compute gradients and others do not, as when one of them
            has evaluated on more batches than another; their counts do not belong together.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    local_sum = ops.vocab_cross_entropy(
        logits.flatten(0, -2),
        targets,
        vocab_size,
        vocab_range,
        ignore_index=ignore_index,
        reduction="sum",
        group=mesh.tp,
    )
    count: Any = num_items_in_batch
    if count is None:
        count = _count_over_dp(targets != ignore_index, mesh)
    if isinstance(count, torch.Tensor):
        count = count.to(local_sum)
    return local_sum * mesh.dp_size / count


def _count_over_dp(valid: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The valid tokens of all dp ranks, which must all be at the same kind of call."""
    if mesh.dp_size == 1:
        return valid.sum()
    own = torch.stack([valid.sum(), valid.new_full((), torch.is_grad_enabled())]).double()
    ranks = ops.gather_from_tp(own, [2] * mesh.dp_size, mesh.dp).view(-1, 2)
    if valid.device.type == "cpu" and len(set(ranks[:, 1].tolist())) > 1:
        training = [f"dp rank {rank}" for rank, grad in enumerate(ranks[:, 1].tolist()) if grad]
        raise DisagreementError(
            f"the loss of {', '.join(training)} is computed with gradients, that of the other dp "
            "ranks without; the dp ranks must make equally many forwards with labels"
        )
    return ranks[:, 0].sum()
