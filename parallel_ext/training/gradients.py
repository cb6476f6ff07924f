"""The gradients of a parallel model: their norm, and accumulation over several backwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.parallel.state import state_of
from parallel_ext.sharding._torch_private import foreach_norm, multiply_all
from parallel_ext.sharding.blocks import counted_blocks
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.slices import (
    from_each_rank,
    gather_rows,
    local_part,
    primary_views,
    take_block,
)

LaidOut = tuple[torch.Tensor, TensorLayout]
"""What this rank holds of a parameter or its gradient, and where the full tensor lies."""

_PIECE = 1 << 15  # elements that a CPU converts to fp64 at once: they stay in its cache


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards inside the context leave partial gradients unsummed; the next after it sums.

    For gradient accumulation: one sum for all micro-batches. Every rank must use it in the
    same way. Between the backwards the ``.grad`` of parameters with partial gradients is
    incomplete, so nothing may read or change it. What waits is dropped by an exception and by
    ``zero_grad()``, but after ``data_parallel`` not by ``zero_grad(set_to_none=False)``.

    Args:
        model: a parallel model. After ``data_parallel`` the sums over its ranks wait as well, and
            the gradients of whole parameters are kept meanwhile.

    Example:
        >>> with no_sync(model):  # doctest: +SKIP
        ...     model(**first_half).loss.backward()
        >>> model(**second_half).loss.backward()  # doctest: +SKIP
    """
    state = state_of(model)
    with ExitStack() as stack:
        for waiting in (state.partials, state.fsdp_gradients):
            if waiting is not None:
                stack.enter_context(waiting.no_sync())
        yield


def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the gradients of a parallel model by the norm that the single-process model has.

    Every rank calls it. Of a shard that several ranks hold, the lowest rank's counts; with
    dp > 1 this is right after ``data_parallel``, or once the gradients were averaged.
    ``torch.nn.utils.clip_grad_norm_`` does the same with ``model.parameters()``.

    Args:
        model: a parallel model, wrapped or not.
        max_norm: the largest norm that is left unchanged.
        norm_type: order of the norm, a positive number or ``inf``.
        error_if_nonfinite: raise instead of scaling by NaN or infinity.

    Returns:
        The norm before clipping, a scalar; the same bits on every rank.

    Raises:
        TypeError: it is no parallel model.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
        CollectiveTimeout: not all ranks called it.

    Source: ``torch.nn.utils.clip_grad_norm_``, whose arithmetic it follows.
    """
    op_name = "clip_grad_norm_"
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"px.{op_name} takes the model, got a {type(model).__name__}; "
            f"torch.nn.utils.{op_name} takes its parameters, and does the same"
        )
    mesh = state_of(model).mesh
    to_shards(model)
    gradients = [
        (local_part(parameter.grad), layout)
        for _, parameter, layout in named_shards(model)
        if parameter.grad is not None
    ]
    norm = total_norm({mesh: gradients}, [], norm_type, error_if_nonfinite, op_name)
    scale_to_norm([gradient for gradient, _ in gradients], max_norm, norm)
    return norm


@torch.no_grad()
def total_norm(
    tensors: Mapping[Mesh, Sequence[LaidOut]],
    beside: Sequence[torch.Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    op_name: str,
) -> torch.Tensor:
    """Compute the norm of full tensors of which each rank holds its shards; every rank calls it.

    Args:
        tensors: of each mesh, of which there is at least one.
        beside: tensors of no parallel model, which all ranks hold equal.
        norm_type: its order, a positive number or ``inf``.

    Returns:
        A scalar in fp32, in fp64 where a tensor is; the same bits on every rank.

    Raises:
        ValueError: another order.
        DisagreementError: the ranks hold other values of ``beside``; on all ranks.
        RuntimeError: it is not finite, and ``error_if_nonfinite`` is set; on all ranks.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"{op_name}: norm_type must be a positive number or inf, got {norm_type}")
    infinite = norm_type == float("inf")

    def powers_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        norms = _norms(chain.from_iterable(map(_pieces, tensors)), norm_type)
        return norms if infinite else norms**norm_type

    def joined(powers: torch.Tensor) -> torch.Tensor:
        return powers.amax(0) if infinite else powers.sum(0)

    def of_all(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            of_dtype.setdefault(tensor.dtype, []).append(tensor)
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        return joined(torch.cat([zero, *map(powers_of, of_dtype.values())]))

    powers, everything = [], list(beside)
    for mesh, held in tensors.items():
        mesh.control.barrier(op_name)
        everything += [tensor for tensor, _ in held]
        if beside and not powers:
            powers.append(of_all(beside, mesh.device))
            name = "the norm of the gradients that belong to no parallel model"
            value, advice = powers[0].item(), "average these gradients first"
            require_equal(mesh.control, op_name, {name: value}, advice=advice)
        in_blocks = any((layout.rows_of or layout).blocks for _, layout in held)
        if in_blocks and not infinite:  # the largest number is the same in any order
            powers.append(_sum_of_squares(held, mesh, norm_type, op_name))
            continue
        own = chain.from_iterable(_primary_parts(t, layout, mesh.rank) for t, layout in held)
        power = of_all([part for part in own if part.numel() > 0], mesh.device)
        for group in (mesh.tp, mesh.dp):  # in rank order, so all ranks get the same bits
            power = joined(from_each_rank(power, group))
        powers.append(power)
    norm = joined(torch.stack(powers))
    norm = norm if infinite else norm ** (1.0 / norm_type)
    wide = any(tensor.dtype == torch.float64 for tensor in everything)
    norm = norm.to(torch.float64 if wide else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"{op_name}: the gradients' norm of order {norm_type} is {norm.item()}; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    return norm


def _primary_parts(shard: torch.Tensor, layout: TensorLayout, rank: int) -> list[torch.Tensor]:
    """Return what of a shard this rank counts: the boxes that no lower rank holds."""
    primary = layout.primary_boxes(rank)
    if not primary or len(primary) == len(layout.boxes(rank)):
        return [shard] if primary else []
    return [view for _, view in primary_views(shard, layout, rank)]


def _sum_of_squares(
    held: Sequence[LaidOut], mesh: Mesh, norm_type: float, op_name: str
) -> torch.Tensor:
    """Return the sum of the squares of all gradients, with the same bits on any layout.

    Of each block it is computed alone, and the sum of all blocks is exact, whatever their order.
    """
    if norm_type != 2.0:
        raise ValueError(
            f"{op_name}: under px.Invariant norm_type must be 2 or inf, got {norm_type}"
        )
    group = mesh.tp if mesh.ep_size <= mesh.tp_size else mesh.ep  # whose ranks hold everything
    norms, counts = [], [0] * group.size
    for tensor, layout in held:
        shard, whole = gather_rows(tensor, layout, mesh)  # over dp, one at a time
        of_ranks = [counted_blocks(whole, rank) for rank in range(group.size)]
        counts = [count + len(of_rank) for count, of_rank in zip(counts, of_ranks, strict=True)]
        pieces = [_pieces(take_block(shard, whole, block)) for block in of_ranks[group.rank]]
        if pieces:
            of_pieces = _norms(chain.from_iterable(pieces), 2.0)
            norms += map(torch.linalg.vector_norm, of_pieces.split([*map(len, pieces)]))
    none = torch.zeros(0, dtype=torch.float64, device=mesh.device)  # where a rank counts no block
    squares = torch.cat([none, *(norm.view(1) for norm in norms)]).square()
    everyone = ops.gather_from_region(squares, counts, group)
    return torch.tensor(math.fsum(everyone.tolist()), dtype=torch.float64, device=mesh.device)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return parts of a tensor that are converted to fp64 one at a time, by its size alone."""
    whole = tensor.device.type != "cpu" or tensor.numel() <= _PIECE
    return [tensor] if whole else tensor.reshape(-1).split(_PIECE)


def _norms(tensors: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norms of tensors of one dtype in fp64; a GPU makes no copies of them in fp64."""
    return torch.stack(foreach_norm(list(tensors), norm_type))


@torch.no_grad()
def scale_to_norm(gradients: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients of the norm ``norm`` in place, so that it is at most ``max_norm``."""
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    of_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        of_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), each in of_kind.items():
        multiply_all(each, factor.to(device, dtype))
