"""The base of all modules with sharded parameters: their layouts, and loading into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from parallel_ext.distributed.control import world
from parallel_ext.ops import Group
from parallel_ext.sharding._torch_private import input_hooks, output_hooks, own_parameters
from parallel_ext.sharding.layout import TensorLayout, shard_along, split
from parallel_ext.sharding.shards import LocalShard
from parallel_ext.sharding.slices import like, local_part, take


class Mark:
    """Whether a layer's own forward has run, for who asks after a forward of a module around it."""

    is_set = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self  # PEFT trains a copy of a layer in its place


class ShardedModule(nn.Module):
    """A module some of whose parameters are sharded over the ranks of a group.

    Attributes:
        layouts: attribute name of a parameter -> where its logical tensor lives.
        group: the ranks that one copy is sharded over, and which of them this process is: the
            tensor-parallel group, or for experts the expert-parallel one.
        mark: set by a forward of a layer in an attention, an MLP or a mixture.
    """

    def __init__(self, layouts: Mapping[str, TensorLayout], group: Group) -> None:
        super().__init__()
        self.group, self.mark = group, Mark()
        self.set_layouts(layouts)

    @property
    def communicates(self) -> bool:
        """Return whether another forward in its place would leave something to be summed."""
        return self.group.size > 1

    def set_layouts(self, layouts: Mapping[str, TensorLayout]) -> None:
        """Take other sizes; the parameters are set by the caller."""
        self.layouts = dict(layouts)
        self._shapes = {name: each.local_shape(self.group.rank) for name, each in layouts.items()}

    def shard(self, attribute: str) -> torch.Tensor | None:
        """Return this rank's shard of a parameter, for a forward; None if there is no parameter.

        Raises:
            ValueError: somebody has put a tensor of another shape there, such as the full one,
                with which every rank would compute all, and the sum over them be a multiple.
        """
        own = own_parameters(self)  # faster than by attribute, which a parametrization needs
        tensor = own[attribute] if attribute in own else getattr(self, attribute)
        if tensor is not None and tensor.shape != self._shapes[attribute]:
            layout, rank = self.layouts[attribute], self.group.rank
            raise ValueError(
                f"{layout.name} must have the shape {self._shapes[attribute]} of this rank's "
                f"shard, {layout.describe(rank)}, got {tuple(tensor.shape)}; "
                "model.load_state_dict takes full tensors"
            )
        return tensor

    def places(self) -> dict[str, TensorLayout]:
        """Return each parameter's current layout by attribute name, FSDP's sharding included."""
        return self.layouts | vars(self).get("fsdp_layouts", {})

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for attribute, place in self.places().items():
            value = destination.get(prefix + attribute)
            if value is not None and not keep_vars and not place.is_replicated:
                shard = LocalShard.of(local_part(value), place, world()[0])
                destination[prefix + attribute] = shard

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load full tensors, which are sharded here, or exactly this rank's shards."""
        for attribute, layout in self.layouts.items():
            key = prefix + attribute
            value = state_dict.get(key)
            if not isinstance(value, torch.Tensor):
                continue  # it is not there, or torch says what it is instead
            if isinstance(value, LocalShard):
                parameter, place = getattr(self, attribute), value.place
                value = state_dict[key] = value.plain()
                is_own = place == self.places()[attribute]
                if is_own and value.shape == local_part(parameter).shape:
                    state_dict[key] = like(value, parameter)
                    continue
            shape, local = tuple(value.shape), layout.local_shape(self.group.rank)
            if shape == layout.shape:
                state_dict[key] = take(value, layout, self.group.rank)
            elif shape != local:
                del state_dict[key]
                error_msgs.append(
                    f"{key}: got shape {shape}; expected the full {layout.shape} or this rank's "
                    f"shard {local}, {layout.describe(self.group.rank)} at tp={self.group.size}"
                )
                strict = False  # the error above says it; the key is not missing
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        shards = (
            f"{attribute}={layout.describe(self.group.rank)}"
            for attribute, layout in self.layouts.items()
        )
        return f"tp_rank {self.group.rank} of {self.group.size}: " + "; ".join(shards)


class ShardedLinear(ShardedModule):
    """The base of linear layers [out, in] of which each rank holds a part.

    Attributes:
        in_features, out_features: of the whole layer.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layouts: Mapping[str, TensorLayout],
        group: Group,
    ) -> None:
        super().__init__(layouts, group)
        self.weight, self.bias = weight, bias

    def set_layouts(self, layouts: Mapping[str, TensorLayout]) -> None:
        super().set_layouts(layouts)
        self.out_features, self.in_features = layouts["weight"].shape


def does_more(module: nn.Module, is_known: Callable[[Any], bool] = lambda hook: False) -> bool:
    """Return whether a module does more than its class: by hooks, or a forward of its own.

    Args:
        module: of torch's classes.
        is_known: whether a hook does not count.
    """
    hooks = (*input_hooks(module), *output_hooks(module))
    return "forward" in vars(module) or not all(map(is_known, hooks))


def require_plain(plain: nn.Module, kind: type[nn.Module], op_name: str) -> None:
    """Raise unless a module is torch's own of a kind, so that its weights say all that it does.

    Raises:
        TypeError: it is another.
        ValueError: it has a forward, hooks, or parametrizations that its shards would not have.
    """
    if not isinstance(plain, kind):
        raise TypeError(f"{op_name} takes a torch.nn.{kind.__name__}, got {type(plain).__name__}")
    if type(plain).forward is not kind.forward or does_more(plain) or is_parametrized(plain):
        raise ValueError(
            f"{op_name}: this {type(plain).__name__} has a forward, hooks or parametrizations of "
            "its own, which its shards would lose; take them off before"
        )


def group_of_shards(group: Group | dist.ProcessGroup) -> Group:
    """Return the handle of a group over whose ranks a module may be sharded.

    Args:
        group: of consecutive ranks of the job, as tensor-parallel groups have: of 4 ranks (0, 1)
            and (2, 3), not (0, 2) and (1, 3).

    Raises:
        TypeError: it is no group, such as what ``new_group`` returns on ranks outside of it.
        ValueError: its ranks are others.
    """
    if not isinstance(group, (Group, dist.ProcessGroup)):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup of which this rank is a member, or an "
            f"ops.Group, got {group!r}"
        )
    handle = group if isinstance(group, Group) else Group.of(group)
    own = world()[0]
    ranks = [own - handle.rank + place for place in range(handle.size)]
    if not isinstance(group, Group):
        ranks = dist.get_process_group_ranks(group)  # so that all of them raise
    if ranks[0] % len(ranks) or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        shown = ", ".join(map(str, ranks))
        raise ValueError(
            f"the group of rank {own} is of ranks {shown}; a module is sharded "
            "over groups of consecutive ranks, of which each begins at a multiple of their size"
        )
    return handle


def row_layouts(plain: nn.Linear, group: Group, multiple_of: int) -> dict[str, TensorLayout]:
    """Return the layouts of a linear layer's weight and bias, sharded by output features.

    Args:
        plain: the full layer.
        group: the ranks to shard over.
        multiple_of: boundaries between the ranks' features are multiples of this.
    """
    ranges = split(plain.out_features, group.size, multiple_of)
    return {
        name: shard_along(name, tuple(parameter.shape), 0, ranges)
        for name, parameter in (("weight", plain.weight), ("bias", plain.bias))
        if parameter is not None
    }


def shard_of(parameter: torch.Tensor, layout: TensorLayout, group: Group) -> nn.Parameter:
    """Return the part of a full parameter that this rank of a group holds, as a parameter."""
    part = take(parameter.detach(), layout, group.rank)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
