"""What a module of a user's own holds beside the parallel models in it, such as a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.nn.vocab import TiedHead
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.parallel.state import own_state
from parallel_ext.parallel.validate import is_decoder
from parallel_ext.sharding._torch_private import input_hooks
from parallel_ext.sharding.digests import content_digest
from parallel_ext.sharding.layout import ModelLayout, TensorLayout
from parallel_ext.sharding.named_shards import named_shards, persistent_buffers


def parallel_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Map the path of each parallel model in a module to it; that of the module itself is empty."""
    return {path: each for path, each in module.named_modules() if own_state(each) is not None}


def beginnings_inside(module: nn.Module) -> tuple[str, ...]:
    """Return how the names begin of all that belongs to a parallel model in a module."""
    return tuple(f"{path}." if path else "" for path in parallel_parts(module))


def is_around(module: nn.Module) -> bool:
    """Return whether a module is one of a user's own around a parallel model; PEFT's is not."""
    return next(iter(parallel_parts(module)), "") not in ("", "base_model.model")


Beside = dict[str, tuple[nn.Parameter, TensorLayout]]
"""Parameters beside parallel models by name, each with its layout."""


def parameters_beside(module: nn.Module) -> Beside:
    """Return the parameters of a module that belong to no parallel model in it, by name.

    Each rank holds all of them whole, but for its rows of an output head that is sharded with the
    decoder. They come in the module's order, each once.
    """
    inside = {id(p) for model in parallel_parts(module).values() for p in model.parameters()}
    shards = named_shards(module)
    return {name: (p, layout) for name, p, layout in shards if id(p) not in inside}


def whole_and_shards(beside: Beside) -> tuple[dict[str, nn.Parameter], Beside]:
    """Return of :func:`parameters_beside` what every rank holds whole, and what is sharded."""
    whole = {name: each for name, (each, layout) in beside.items() if layout.is_replicated}
    return whole, {name: own for name, own in beside.items() if name not in whole}


def tensors_beside(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what files hold of a module beside the parallel models in it, by each of its names."""
    inside = beginnings_inside(module)
    tensors = (*module.named_parameters(remove_duplicate=False), *persistent_buffers(module))
    return ((name, each) for name, each in tensors if not name.startswith(inside))


class _TellLabels:
    """A forward pre-hook of a model around a parallel decoder, which does not see the labels."""

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder

    def __deepcopy__(self, memo: dict[int, Any]) -> _TellLabels:
        """Tell the copy of the decoder."""
        return type(self)(memo.get(id(self.decoder), self.decoder))

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = arguments_of(module, "forward", args, kwargs)
        own_state(self.decoder).around["labels of the model around it"] = given.get("labels")


def tell_labels(module: nn.Module) -> None:
    """Let the decoders in a module compare its ``labels``, too, over the tp ranks."""
    told = [hook.decoder for hook in input_hooks(module) if isinstance(hook, _TellLabels)]
    for path, model in parallel_parts(module).items():
        compares = own_state(model).agreement is not None
        if path and compares and is_decoder(model) and model not in told:
            module.register_forward_pre_hook(_TellLabels(model), with_kwargs=True)


def check_equal_beside(parameters: dict[str, nn.Parameter], mesh: Mesh, op_name: str) -> None:
    """Raise unless all ranks hold the same parameters beside a model; every rank calls it."""
    require_equal(
        mesh.control,
        op_name,
        {name: content_digest(parameter) for name, parameter in parameters.items()},
        noun="the parameter beside the model ",
        advice="call torch.manual_seed with one seed on all ranks before it is made",
    )


def tied_beside(module: nn.Module) -> dict[str, str]:
    """Map names of weights of heads beside parallel models to those they are tied to.

    Raises:
        ValueError: the embedding of a head was replaced, so that its weight would get lost.
    """
    paths = {id(each): path for path, each in module.named_modules()}
    heads = {path: each for path, each in module.named_modules() if isinstance(each, TiedHead)}
    for path, head in heads.items():
        if id(head.tied_to) not in paths:
            raise ValueError(
                f"{path} has the weight of an embedding that is in the model no more, as after "
                'merge_and_unload of an adapter with modules_to_save=["embed_tokens"]: save the '
                "adapter before, and merge it in one process, or untie the head before "
                "px.parallelize"
            )
    return {f"{path}.weight": f"{paths[id(head.tied_to)]}.weight" for path, head in heads.items()}


def layout_around(module: nn.Module, inside: ModelLayout) -> ModelLayout:
    """Return the layout of a module that holds one parallel model, or is it, by its own names.

    Every rank has what is beside that model, whose layout is ``inside``.
    """
    (prefix,) = beginnings_inside(module)
    if not prefix:
        return inside
    tied_beside(module)  # raises where a head would get lost
    layouts = {id(parameter): each for parameter, each in parameters_beside(module).values()}
    return layout_with_beside(module, prefix, inside, layouts)


def layout_with_beside(
    module: nn.Module,
    prefix: str,
    inside: ModelLayout,
    layouts: Mapping[int, TensorLayout] = MappingProxyType({}),
) -> ModelLayout:
    """Return the layout of a module around a model, parallel or not, by its own names.

    Args:
        prefix: how the names begin of what belongs to that model.
        inside: its layout.
        layouts: of parameters beside it, by their ``id``; of all others a rank has the whole.
    """
    layout, buffers = below(prefix, inside), dict(persistent_buffers(module))
    tensors, tied = dict(layout.tensors), dict(layout.tied)
    named = {**dict(module.named_parameters(remove_duplicate=False)), **buffers}
    first_name = {id(each): name for name, each in named.items() if name.startswith(prefix)}
    for name, each in named.items():
        if name.startswith(prefix):
            continue
        if (first := first_name.setdefault(id(each), name)) == name:
            whole = TensorLayout(name, tuple(each.shape))
            tensors[name] = replace(layouts.get(id(each), whole), name=name)
        else:
            tied[name] = first
    beside = frozenset(buffers) & (tensors.keys() - layout.tensors)
    return replace(layout, tensors=tensors, tied=tied, buffers=layout.buffers | beside)


def below(prefix: str, layout: ModelLayout) -> ModelLayout:
    """Return the layout of a model in a module where its names begin with ``prefix``."""

    def at(name: str) -> str:
        return f"{prefix}{name}"

    return ModelLayout(
        {at(name): replace(each, name=at(name)) for name, each in layout.tensors.items()},
        {at(alias): at(name) for alias, name in layout.tied.items()},
        {
            at(name): tuple(replace(p, name=at(p.name), source=at(name)) for p in parts)
            for name, parts in layout.parts.items()
        },
        frozenset(map(at, layout.buffers)),
    )
