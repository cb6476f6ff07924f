"""The gradients of a parallel model: their norm, and accumulation over several backwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.sharded import named_shards
from parallel_ext.state import state_of


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backwards leave partial gradients unsummed; the next backward outside sums them.

    For gradient accumulation: one sum for all micro-batches. Every rank must use it alike. Between
    the backwards the ``.grad`` of replicated parameters with partial gradients is incomplete.

    Args:
        model: a parallel model; one without such parameters is left as it is.

    Example:
        >>> with no_sync(model):  # doctest: +SKIP
        ...     model(**first_half).loss.backward()
        >>> model(**second_half).loss.backward()  # doctest: +SKIP
    """
    partials = state_of(model).partials
    with nullcontext() if partials is None else partials.no_sync():
        yield


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients of a parallel model by the norm that the single-process model has.

    Every rank calls it. A shard counts its own elements, a replicated tensor counts once.

    Args:
        model: a parallel model, wrapped or not.
        max_norm: the largest norm that is left unchanged.
        norm_type: order of the norm, a positive number or ``inf``.
        error_if_nonfinite: raise instead of scaling by NaN or infinity.

    Returns:
        The norm before clipping, a scalar; the same bits on every rank of a tp group.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
        CollectiveTimeout: not all ranks called it.

    Source: ``torch.nn.utils.clip_grad_norm_``, whose arithmetic it follows.
    """
    mesh = state_of(model).mesh
    mesh.meet("clip_grad_norm_")
    norm_type = float(norm_type)
    infinite = norm_type == float("inf")
    # [of the shards that this rank owns, of the replicated tensors]; norms to the norm_type.
    parts = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    gradients = []
    for _, parameter, layout in named_shards(model):
        if parameter.grad is None:
            continue
        gradients.append(parameter.grad)
        if parameter.numel() == 0:
            continue
        if layout.dim is not None and layout.holders(mesh.rank)[0] != mesh.rank % layout.period:
            continue  # another rank holds the same shard and counts it
        part = torch.linalg.vector_norm(parameter.grad, norm_type, dtype=torch.float64)
        which = int(layout.dim is None)
        if infinite:
            parts[which] = torch.maximum(parts[which], part)
        else:
            parts[which] += part**norm_type
    ranks = ops.gather_from_tp(parts, [2] * mesh.tp_size, mesh.tp).view(mesh.tp_size, 2)
    if infinite:
        norm = torch.maximum(ranks[:, 0].max(), ranks[0, 1])
    else:
        norm = (ranks[:, 0].sum() + ranks[0, 1]) ** (1.0 / norm_type)
    wide = any(gradient.dtype == torch.float64 for gradient in gradients)
    norm = norm.to(torch.float64 if wide else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type} is {norm.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm
