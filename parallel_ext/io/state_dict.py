"""The tensors of a model by name: this rank's shards, and the gathered whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.sharding.layout import ModelLayout, TensorLayout
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers, to_shards
from parallel_ext.sharding.reshard import gather_tensor
from parallel_ext.sharding.slices import local_part


def local_values(model: nn.Module, layout: ModelLayout, rank: int) -> dict[str, torch.Tensor]:
    """Return this rank's shard of every tensor of ``layout``, in its order, without a copy.

    Parameters and persistent buffers are taken, by HuggingFace name.

    Raises:
        CheckpointError: the model does not hold exactly the tensors of ``layout``, in their places
            and in the shapes of this rank's shards.
    """
    values: dict[str, torch.Tensor] = {}
    to_shards(model)
    for own_name, parameter, shard in named_shards(model):
        if not _are_of_one_place(own_name, shard.name):
            raise _error(
                model,
                f"{own_name} was {shard.name} when the model was made parallel; change the order "
                "of layers, and exchange modules, in a plain model, before px.parallelize",
            )
        name = layout.tied.get(shard.name, shard.name)
        if name in values:
            raise _error(
                model,
                f"{own_name} was tied to {name} when the model was made parallel, but is a "
                "parameter of its own now; call model.tie_weights()",
            )
        values[name] = local_part(parameter.detach())
    values.update(persistent_buffers(model))
    if lacks := layout.tensors.keys() - values.keys():
        hint = "taken out of it since; take modules such as layers out of a plain model"
        if lacks & {name for name, _ in model.named_parameters(remove_duplicate=False)}:
            hint = "tied since to another parameter; tie weights"
        names = first_few(sorted(lacks))
        raise _error(model, f"the model lacks {names}, {hint}, before px.parallelize")
    if added := values.keys() - layout.tensors.keys():
        raise _error(
            model,
            f"the model holds {first_few(sorted(added))}, added to it since; add parameters before "
            "px.parallelize, or to a module around the model (docs/own-modules.md)",
        )
    check_shapes(values, layout, rank)
    return {name: values[name] for name in layout.tensors}


def _are_of_one_place(name: str, logical: str) -> bool:
    """Return whether a name in a model may stand for a logical name; outside of layers any may.

    The model may be around the parallel one, and others may have wrapped its modules.
    """
    found, wanted = name.split("."), logical.split(".")
    rest = iter(found)
    return all(part in rest for part in wanted) or not any(
        part.isdigit() for part in (*found, *wanted)
    )


def _error(model: nn.Module, what: str) -> CheckpointError:
    """Return the error that the names of a model are not those of its layout."""
    of_adapters = (".base_layer.", "lora_", ".modules_to_save.")
    if any(mark in name for name, _ in model.named_parameters() for mark in of_adapters):
        what = "the model has adapters; merge_and_unload() them, or save them by save_pretrained"
    return CheckpointError(what)


def check_shapes(values: Mapping[str, torch.Tensor], layout: ModelLayout, rank: int) -> None:
    """Raise a CheckpointError unless tensors have the shapes of ``rank``'s shards, and memory."""
    for name, value in values.items():
        expected = layout[name].local_shape(rank)
        # FSDP leaves alone what is empty here, so its other sides stay what they were.
        fits = tuple(value.shape) == expected or value.numel() == math.prod(expected) == 0
        if not fits or value.is_meta:
            raise CheckpointError(
                f"{name}: expected a shard of shape {expected}, "
                f"{layout[name].describe(rank)}; got {tuple(value.shape)} on {value.device}"
            )


def gather_in_step(
    shards: Mapping[str, tuple[torch.Tensor, TensorLayout]],
    mesh: Mesh,
    op_name: str,
    writer_only: bool = True,
) -> dict[str, torch.Tensor]:
    """Gather full tensors one by one; every rank calls it, and if one fails, all raise.

    Args:
        shards: by name this rank's shard and its layout; the same names in one order on all ranks.
        writer_only: only rank 0 receives the tensors, else every rank of the job does.

    Returns:
        Name -> full tensor on the CPU, a copy; empty on ranks that do not receive.
    """
    receivers = range(1 if writer_only else mesh.world_size)

    def room_for(name: str) -> torch.Tensor | None:
        if mesh.rank not in receivers:
            return None
        shard, layout = shards[name]
        return torch.empty(layout.shape, dtype=shard.dtype, device="cpu")

    def gather(name: str, out: torch.Tensor | None) -> None:
        shard, layout = shards[name]
        gather_tensor(local_part(shard), layout, mesh, receivers, out)

    full: dict[str, torch.Tensor] = {}
    for name in shards:
        # By itself, since a large model may not fit.
        out = mesh.control.run_on_all(op_name, partial(room_for, name))
        mesh.control.run_on_all(op_name, partial(gather, name, out))
        if out is not None:
            full[name] = out
    return full


def gather_state_dict(
    model: nn.Module, mesh: Mesh, layout: ModelLayout, writer_only: bool = True
) -> dict[str, torch.Tensor]:
    """Gather the state dict of the unsharded model from the ranks.

    Every rank must call it. The other calls of this package never hold the whole model; this one
    does, on the CPU of the ranks that receive it.

    Args:
        writer_only: only rank 0 receives the tensors, else every rank of the job does.

    Returns:
        HuggingFace name -> full tensor on the CPU, a copy; tied names share one tensor. Empty on
        ranks that do not receive.

    Raises:
        CollectiveTimeout: not all ranks called it.
        CheckpointError: the model does not hold what its layout says; on all ranks.
    """
    op_name = "full_state_dict" if writer_only else "full_state_dict on all ranks"
    mesh.control.barrier(op_name)
    values = mesh.control.run_on_all(op_name, lambda: local_values(model, layout, mesh.rank))
    shards = {name: (value, layout[name]) for name, value in values.items()}
    state = gather_in_step(shards, mesh, op_name, writer_only)
    for alias, name in layout.tied.items():
        if name in state:
            state[alias] = state[name]
    return state
