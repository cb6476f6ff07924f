"""What all modules with cut parameters share: their layouts, and loading into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from parallel_ext.layout import Box, TensorLayout
from parallel_ext.ops import Group


def take(tensor: torch.Tensor, layout: TensorLayout, rank: int) -> torch.Tensor:
    """Cut ``rank``'s shard out of a tensor of the full logical shape; always a copy."""
    if tuple(tensor.shape) != layout.shape:
        raise ValueError(
            f"{layout.name}: expected the full shape {layout.shape}, got {tuple(tensor.shape)}"
        )
    if layout.dim is None:
        return tensor.clone()
    pieces = [tensor[tuple(slice(*piece) for piece in box)] for box in layout.boxes(rank)]
    if not pieces:
        return tensor.new_empty(layout.local_shape(rank))
    return torch.cat(pieces, layout.dim).contiguous()


def shard_views(
    shard: torch.Tensor, layout: TensorLayout, rank: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes that ``rank`` holds, each with the part of its ``shard`` where it lies."""
    start = 0
    for box in layout.boxes(rank):
        if layout.dim is None:
            yield box, shard
            continue
        size = box[layout.dim][1] - box[layout.dim][0]
        yield box, shard.narrow(layout.dim, start, size)
        start += size


def is_cut_along(layout: TensorLayout, dim: int) -> bool:
    """Whether some rank holds only a part of dimension ``dim``."""
    return any(box[dim] != (0, layout.shape[dim]) for boxes in layout.held for box in boxes)


def reduced(layout: TensorLayout, dim: int) -> TensorLayout:
    """Where a tensor lives that has one number for all of ``dim``, such as the mean over it.

    Ranks that hold different parts of ``dim`` hold this number alike.

    Example:
        >>> layout = TensorLayout("weight", (5, 4), 0, ((((0, 3), (0, 4)),), (((3, 5), (0, 4)),)))
        >>> reduced(layout, 1).local_shape(1), reduced(layout, 0).local_shape(1)
        ((2, 1), (1, 4))
    """
    dim %= len(layout.shape)

    def one_of(box: Box) -> Box:
        return (*box[:dim], (0, 1), *box[dim + 1 :])

    shape = (*layout.shape[:dim], 1, *layout.shape[dim + 1 :])
    whole = TensorLayout(layout.name, shape)
    held = tuple(tuple(dict.fromkeys(map(one_of, boxes))) for boxes in layout.held)
    if all(box == whole.whole for boxes in held for box in boxes):
        return whole
    # What is cut along two dimensions is cut along the first, too: FSDP deals rows.
    return replace(whole, dim=0 if dim == layout.dim else layout.dim, held=held)


_modules: WeakSet[ShardedModule] = WeakSet()  # all there are


def parameters_cut_over_groups() -> Iterator[tuple[nn.Parameter, TensorLayout]]:
    """Those of all models of this process, each with its layout before FSDP dealt it."""
    for module in _modules:
        for attribute, layout in module.layouts.items():
            parameter = module._parameters.get(attribute)
            if parameter is not None and not layout.is_replicated:
                yield parameter, layout


class ShardedModule(nn.Module):
    """A module some of whose parameters are cut over the ranks of a group.

    Attributes:
        layouts: attribute name of a parameter -> where its logical tensor lives.
        group: the ranks that one copy is cut over, and which of them this process is: the
            tensor-parallel group, or for experts the expert-parallel one.
    """

    def __init__(self, layouts: Mapping[str, TensorLayout], group: Group) -> None:
        super().__init__()
        self.layouts = dict(layouts)
        self.group = group
        _modules.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        _modules.add(self)

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
        """Accept the full tensor, which is cut here, or exactly the local shard."""
        for attribute, layout in self.layouts.items():
            key = prefix + attribute
            if key not in state_dict:
                continue
            shape, local = tuple(state_dict[key].shape), layout.local_shape(self.group.rank)
            if shape == layout.shape:
                state_dict[key] = take(state_dict[key], layout, self.group.rank)
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


def named_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, TensorLayout]]:
    """Every parameter of ``model`` once, with its name in the model and its layout.

    A parameter of a plain module is replicated. Tied parameters come once, under their first name.
    Of a parameter that FSDP has sharded, the layout says which rows of it this rank has; its name
    is the logical one.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        layouts = dict(module.layouts) if isinstance(module, ShardedModule) else {}
        layouts |= vars(module).get("dealt_layouts", {})
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{path}.{attribute}" if path else attribute
            layout = layouts.get(attribute) or TensorLayout(name, tuple(parameter.shape))
            yield name, parameter, layout


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer of ``model`` that files hold, with each of its names; it is replicated."""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module.named_buffers(recurse=False):
            if attribute not in module._non_persistent_buffers_set:
                yield f"{path}.{attribute}" if path else attribute, buffer


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or gradient: of a DTensor its local tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def to_shards(model: nn.Module) -> None:
    """Free what FSDP has gathered, so that the parameters of ``model`` are this rank's shards."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
