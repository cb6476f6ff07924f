"""The parallel model that a bare tensor belongs to: found by the parameter, or its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.parallel.head_beside import shards_beside, with_head
from parallel_ext.parallel.holders import Holders
from parallel_ext.parallel.state import parallel_models, state_of
from parallel_ext.sharding._torch_private import holds_any
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.named_shards import named_shards, to_shards
from parallel_ext.sharding.slices import address_of, local_part


class Owned(NamedTuple):
    """A parameter of a parallel model, or a shard of the head beside it."""

    name: str  # in the HuggingFace model, or the one around it
    parameter: nn.Parameter  # this rank's shard
    layout: TensorLayout  # where the full tensor lies
    model: nn.Module  # the HuggingFace model

    @property
    def mesh(self) -> Mesh:
        return state_of(self.model).mesh

    @property
    def is_sharded(self) -> bool:
        """Return whether some rank holds only a part of the parameter."""
        return not self.layout.is_replicated


def owned_by(model: nn.Module) -> Iterator[Owned]:
    """Iterate over the parameters of a parallel model, tied ones once; then over its head's."""
    for name, parameter, layout in named_shards(model):
        yield Owned(name, parameter, layout, model)
    for name, (parameter, layout) in shards_beside(model).items():
        yield Owned(name, parameter, layout, model)


def owners_of(tensors: Iterable[torch.Tensor]) -> dict[int, Owned]:
    """Find which of some tensors are parameters, or gradients, of parallel models.

    What FSDP has gathered for a forward is found as well, and given back to its shards: the result
    names the shard.

    Returns:
        ``id`` of a tensor -> what it belongs to; tensors of no parallel model are left out.
    """
    tensors = list(tensors)
    wanted = {id(tensor) for tensor in tensors}
    # What FSDP has replaced by what it gathered is in no module at that time.
    may_be_put_aside = any(hasattr(tensor, "to_local") for tensor in tensors)
    found: dict[int, Owned] = {}
    for model in parallel_models():
        # Every initialization of a new parameter asks, of another model too.
        if not may_be_put_aside and not holds_any(with_head(model), wanted):
            continue
        gathered = {id(each): name for name, each, _ in named_shards(model)}
        to_shards(model)
        shards = {owned.name: owned for owned in owned_by(model)}
        for owned in shards.values():
            own = (owned.parameter, owned.parameter.grad)
            found |= {id(tensor): owned for tensor in own if tensor is not None}
        found |= {key: shards[name] for key, name in gathered.items()}
    return {key: owned for key, owned in found.items() if key in wanted}


def owners_in(optimizer: torch.optim.Optimizer | None) -> dict[int, Owned]:
    """Find which parameters of an optimizer are of parallel models, as :func:`owners_of` does."""
    groups = [] if optimizer is None else optimizer.param_groups
    return owners_of(parameter for group in groups for parameter in group["params"])


def models_held_with(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """Return the parallel models that are in one module with some parameters beside them."""
    holders, wanted = Holders(), {id(each) for each in parameters}
    return [
        model
        for model in parallel_models()
        if any(holds_any(holder, wanted) for holder in holders.around(model))
    ]


def owner_of_memory(tensor: torch.Tensor) -> Owned | None:
    """Find the parameter of a parallel model of whose memory a plain tensor is a part.

    Such as a view of it, rows of it, or its ``.data``. Gradients are not looked at.
    """
    address = address_of(tensor)
    for model in parallel_models() if address else ():
        for owned in owned_by(model):
            if address_of(local_part(owned.parameter)) == address:
                return owned
    return None
