"""The parameters and buffers of a model by name: what this rank has of each, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from parallel_ext.sharding._torch_private import (
    is_persistent,
    own_modules,
    own_parameters,
    without_wrappers,
)
from parallel_ext.sharding.layout import TensorLayout


def named_shards(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, TensorLayout]]:
    """Yield every parameter of ``model`` once, with its name in the model and its layout.

    A module with sharded parameters has a method ``places``, which returns their layouts by the
    names of its attributes; a parameter of a plain module is replicated. Tied parameters come once,
    under their first name. Of a parameter that FSDP has sharded, the layout says which rows of it
    this rank has; its name is the logical one.
    """
    seen: set[int] = set()
    for path, module in _named_modules(model):
        parameters = own_parameters(module)
        if not parameters:
            continue
        layouts = vars(module).get("fsdp_layouts", {})
        if hasattr(type(module), "places"):  # of the class: wrappers forward attributes
            layouts = module.places()
        for attribute, parameter in parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{path}.{attribute}" if path else attribute
            layout = layouts.get(attribute)
            layout = layout or TensorLayout(without_wrappers(name), tuple(parameter.shape))
            yield name, parameter, layout


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``model.named_modules()`` does, which passes each through all levels above it."""
    seen, todo = set(), [("", model)]
    while todo:
        path, module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        prefix = f"{path}." if path else ""
        children = reversed(own_modules(module).items())
        todo += [(prefix + name, child) for name, child in children if child is not None]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every buffer of ``model`` that files hold, by each of its names; it is replicated."""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module.named_buffers(recurse=False):
            if is_persistent(module, attribute):
                yield without_wrappers(f"{path}.{attribute}" if path else attribute), buffer


def to_shards(model: nn.Module) -> None:
    """Free what FSDP has gathered, so that the parameters of ``model`` are this rank's shards.

    Raises:
        RuntimeError: what it has gathered was changed, by ``before_reshard`` of the model.
    """
    for _, module in _named_modules(model):
        if hasattr(type(module), "reshard"):
            if "before_reshard" in vars(module):
                module.before_reshard()
            module.reshard()
