"""From the shards of the ranks to full tensors: what saving and ``full_state_dict`` share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from parallel_ext.checkpoint.safetensors_file import CheckpointError, row_stripes
from parallel_ext.layout import Box, ModelLayout, TensorLayout
from parallel_ext.mesh import Mesh
from parallel_ext.sharded import named_shards


def local_values(model: nn.Module, layout: ModelLayout, tp_rank: int) -> dict[str, torch.Tensor]:
    """This rank's shard of every tensor of ``layout``, in its order; nothing is copied.

    Args:
        model: its parameters and persistent buffers are taken, by HuggingFace name.
        layout: what a file of the model holds.
        tp_rank: this rank.

    Raises:
        CheckpointError: the model does not hold exactly the tensors of ``layout``, in the shapes
            of this rank's shards.
    """
    values: dict[str, torch.Tensor] = {}
    for own_name, parameter, shard in named_shards(model):
        name = layout.tied.get(shard.name, shard.name)
        if name in values:
            raise CheckpointError(
                f"{own_name} was tied to {name} when the model was made parallel, but is a "
                "parameter of its own now; call model.tie_weights()"
            )
        values[name] = parameter.detach()
    values.update(_persistent_buffers(model))
    for kind, names in (
        ("lacks", layout.tensors.keys() - values.keys()),
        ("holds, unknown to its layout,", values.keys() - layout.tensors.keys()),
    ):
        if names:
            raise CheckpointError(f"the model {kind} {', '.join(sorted(names)[:8])}")
    for name, value in values.items():
        expected = layout[name].local_shape(tp_rank)
        if tuple(value.shape) != expected or value.is_meta:
            raise CheckpointError(
                f"{name}: expected a shard of shape {expected}, "
                f"{layout[name].describe(tp_rank)}; got {tuple(value.shape)} on {value.device}"
            )
    return {name: values[name] for name in layout.tensors}


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            if attribute not in module._non_persistent_buffers_set:
                yield f"{path}.{attribute}" if path else attribute, buffer


def shard_views(
    shard: torch.Tensor, layout: TensorLayout, tp_rank: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes that ``tp_rank`` holds, each with the part of its ``shard`` where it lies."""
    start = 0
    for box in layout.boxes(tp_rank):
        if layout.dim is None:
            yield box, shard
            continue
        size = box[layout.dim][1] - box[layout.dim][0]
        yield box, shard.narrow(layout.dim, start, size)
        start += size


def gather_tensor(
    value: torch.Tensor, layout: TensorLayout, mesh: Mesh, owner: int
) -> torch.Tensor | None:
    """Assemble one full tensor on one rank from the shards of its tp group.

    Every rank of the tp group calls it, for the same tensors in the same order. Each element is
    sent once, in stripes of at most ``STRIPE_BYTES``, so that the full tensor is the only large
    memory that the owner needs.

    Args:
        value: this rank's shard of the logical tensor, of ``layout.local_shape(mesh.tp_rank)``;
            any dtype, the same on all ranks, any device. The parameter, its gradient, or what else
            has an element for each of its.
        layout: where the logical tensor lives.
        mesh: the ranks; the groups of different ``dp_rank`` do not communicate.
        owner: the tp rank that receives the tensor.

    Returns:
        On the owner a new CPU tensor of ``layout.shape``; None on the others.
    """
    shard, full = value.detach(), None
    at_owner = set(layout.boxes(owner))
    if mesh.tp_rank == owner:
        full = torch.empty(layout.shape, dtype=shard.dtype)
        for box, view in shard_views(shard, layout, owner):
            _part(full, box).copy_(view)
    for sender in range(mesh.tp_size):
        sent = [box for box in layout.owned(sender) if box not in at_owner]
        if full is not None:
            for box in sent:
                _receive(_part(full, box), mesh, sender)
        elif mesh.tp_rank == sender:
            for box, view in shard_views(shard, layout, sender):
                if box in sent:
                    _send(view, mesh, owner)
    return full


def _part(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(start, stop) for start, stop in box)]


def _send(part: torch.Tensor, mesh: Mesh, owner: int) -> None:
    group = mesh.process_groups[mesh.tp_control.name]
    for stripe in row_stripes(part):
        dist.send(stripe.cpu().contiguous(), group=group, group_dst=owner)


def _receive(part: torch.Tensor, mesh: Mesh, sender: int) -> None:
    group = mesh.process_groups[mesh.tp_control.name]
    for stripe in row_stripes(part):
        if stripe.is_contiguous():
            dist.recv(stripe, group=group, group_src=sender)
        else:
            received = torch.empty(stripe.shape, dtype=stripe.dtype)
            dist.recv(received, group=group, group_src=sender)
            stripe.copy_(received)


def full_state_dict(
    model: nn.Module, mesh: Mesh, layout: ModelLayout, writer_only: bool = True
) -> dict[str, torch.Tensor]:
    """The state dict of the unsharded model, gathered from the ranks.

    Every rank must call it. The other calls of this package never hold the whole model; this one
    does, on the CPU of the ranks that receive it.

    Args:
        model: the parallel model.
        mesh: its ranks.
        layout: where its tensors live.
        writer_only: only rank 0 receives the tensors, else every rank of the job does.

    Returns:
        HuggingFace name -> full tensor on the CPU, a copy; tied names share one tensor. Empty on
        ranks that do not receive.

    Raises:
        CollectiveTimeout: not all ranks called it.
        CheckpointError: the model does not hold what its layout says; on all ranks.

    Example:
        >>> state = full_state_dict(model, mesh, layout)  # doctest: +SKIP
    """
    what = "full_state_dict" if writer_only else "full_state_dict on all ranks"
    mesh.meet(what)
    values = mesh.together(what, lambda: local_values(model, layout, mesh.tp_rank))
    if writer_only and mesh.dp_rank != 0:
        return {}
    state: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        full = gather_tensor(value, layout[name], mesh, owner=0)
        if not writer_only and mesh.tp_size > 1:
            if full is None:
                full = torch.empty(layout[name].shape, dtype=value.dtype)
            group = mesh.process_groups[mesh.tp_control.name]
            # as bytes, since gloo broadcasts few dtypes
            dist.broadcast(full.view(-1).view(torch.uint8), group=group, group_src=0)
        if full is not None:
            state[name] = full
    for alias, name in layout.tied.items():
        if name in state:
            state[alias] = state[name]
    return state
