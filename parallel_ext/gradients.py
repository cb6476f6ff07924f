"""The gradients of a parallel model: their norm, and accumulation over several backwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.sharded import local_part, named_shards, to_shards
from parallel_ext.state import model_of, state_of


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backwards leave partial gradients unsummed; the next backward outside sums them.

    For gradient accumulation: one sum for all micro-batches. Every rank must use it alike. Between
    the backwards the ``.grad`` of parameters with partial gradients is incomplete. What waits is
    dropped by an exception and by ``zero_grad()``, but not by ``zero_grad(set_to_none=False)``.

    Args:
        model: a parallel model. After ``data_parallel`` the sums over its ranks wait as well, and
            the gradients of whole parameters are kept meanwhile.

    Example:
        >>> with no_sync(model):  # doctest: +SKIP
        ...     model(**first_half).loss.backward()
        >>> model(**second_half).loss.backward()  # doctest: +SKIP
    """
    state, own = state_of(model), model_of(model)
    with nullcontext() if state.partials is None else state.partials.no_sync():
        if state.held is None:
            yield
            return
        own.set_requires_gradient_sync(False)
        try:
            yield
            state.held.anchor()
        except BaseException:
            state.held.drop()
            raise
        finally:
            own.set_requires_gradient_sync(True)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients of a parallel model by the norm that the single-process model has.

    Every rank calls it. Of what several ranks hold alike, the lowest of them counts it; with dp > 1
    that is right after ``data_parallel``, or once the gradients were averaged.

    Args:
        model: a parallel model, wrapped or not.
        max_norm: the largest norm that is left unchanged.
        norm_type: order of the norm, a positive number or ``inf``.
        error_if_nonfinite: raise instead of scaling by NaN or infinity.

    Returns:
        The norm before clipping, a scalar; the same bits on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
        CollectiveTimeout: not all ranks called it.

    Source: ``torch.nn.utils.clip_grad_norm_``, whose arithmetic it follows.
    """
    mesh = state_of(model).mesh
    mesh.meet("clip_grad_norm_")
    norm_type = float(norm_type)
    infinite = norm_type == float("inf")
    own = torch.zeros(1, dtype=torch.float64, device=mesh.device)  # the norm to its own power
    gradients = []
    to_shards(model)
    for _, parameter, layout in named_shards(model):
        if parameter.grad is None:
            continue
        gradient = local_part(parameter.grad)
        gradients.append(gradient)
        if gradient.numel() == 0 or not layout.owned(mesh.rank):
            continue
        part = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
        own = torch.maximum(own, part) if infinite else own + part**norm_type
    for group in (mesh.tp, mesh.dp):  # in rank order, so all ranks get the same bits
        ranks = ops.gather_from_tp(own, [1] * group.size, group)
        own = ranks.amax(0, keepdim=True) if infinite else ranks.sum(0, keepdim=True)
    norm = own[0] if infinite else own[0] ** (1.0 / norm_type)
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
