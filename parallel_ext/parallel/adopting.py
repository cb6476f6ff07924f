"""Plain models that a script has made, which become parallel once they are trained.

In force by ``px.patch``: what ``from_pretrained`` of a causal language model, or of one of images,
returns is parallel at once, but a model from scratch, a classifier, or a decoder alone, may be one
that only helps. Training says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.parallel.holders import Holders, modules_in_process
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.owners import owners_of
from parallel_ext.parallel.parallelize import parallelize
from parallel_ext.parallel.state import is_parallel
from parallel_ext.parallel.validate import CLASSIFIERS, is_decoder


class Patch(NamedTuple):
    """A ``px.patch`` that is in force: the mesh that it made, and the options that it was given."""

    mesh: Mesh
    options: dict[str, Any]
    sums: PartialGradients  # of what is trained beside all parallel models
    uses_cpu: bool  # it has told accelerate to use the CPU


patches: list[Patch] = []
"""The one that is in force, or none."""


def is_causal(cls: type) -> bool:
    """Return whether a class is one of causal language models, or derived from one.

    Those of images, such as ``Gemma3ForConditionalGeneration``, only hold a decoder of text.
    """
    if cls.__name__.endswith("ForConditionalGeneration"):
        return False
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return any(base.__name__ in names for base in cls.__mro__) or cls.__name__.endswith(
        "ForCausalLM"
    )


def may_adopt(model: object) -> bool:
    """Return whether :func:`adopt` makes a model parallel, or raises since it cannot."""
    cls = type(model)
    return (
        isinstance(model, transformers.PreTrainedModel)
        and (_has_decoder(model) or is_decoder(model))
        and any(cls.__name__ not in each.options["plain"] for each in patches)
        and patches[0].mesh.world_size > 1
        and not is_parallel(model)
    )


def _has_decoder(model: nn.Module) -> bool:
    """Return whether a model is one whose decoder is never adopted without it."""
    return is_causal(type(model)) or isinstance(model, CLASSIFIERS)


def _adoptable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the models that :func:`adopt` would make parallel of what a module is, or holds."""
    if may_adopt(module):
        yield module
    elif not _has_decoder(module):
        for child in module.children():
            yield from _adoptable(child)


def adopt(model: object, place: str) -> None:
    """Make a plain model parallel, in place, if it is one that px.patch serves; else do nothing.

    Copies of it become parallel with it, such as one that is to hold the average of its weights.
    Every rank comes here, with equal weights. ``place`` is the call that trains it, for errors.

    Raises:
        RuntimeError: it has gradients, which its new parameters would lack.
        ValueError, DisagreementError: of ``px.parallelize``.
    """
    if not may_adopt(model):
        return
    with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
    if with_gradient:
        raise RuntimeError(
            f"px.patch: {place} would make this {type(model).__name__} parallel, but "
            f"{with_gradient[0]} has a gradient, which would be lost; make the optimizer before "
            "the first backward"
        )
    arrive(place)
    mesh = patches[0].mesh
    copies = made_on_all(_copies_of(model), mesh, place)
    parallelize(model, mesh)
    for each in copies:
        try:
            parallelize(each, mesh)
        except ValueError as error:
            raise ValueError(
                f"px.patch: {place} trains a {type(model).__name__}, of which there is a copy that "
                f"cannot become parallel with it: {error}"
            ) from error
        each.parallel_ext_remembered.original = model.parallel_ext_remembered.original


def made_on_all(copies: list[nn.Module], mesh: Mesh, place: str) -> list[nn.Module]:
    """Return copies of a model, or none where only some ranks made them; every rank calls it."""
    counts = mesh.control.all_gather_object(len(copies), op_name=place)
    return copies if len(set(counts)) == 1 else []


def adopt_trained(module: object, place: str) -> None:
    """Make the model parallel that a module to be trained is, or those that it holds; see adopt."""
    for each in list(_adoptable(module)) if isinstance(module, nn.Module) else []:
        adopt(each, place)


def adopt_owners(tensors: Iterable[torch.Tensor], place: str) -> dict[int, nn.Parameter]:
    """Make the models parallel to which trained ones of some parameters belong.

    So become frozen ones in one module with those, as where only a head on them is trained.

    Args:
        tensors: parameters that an optimizer is given; in one order on all ranks.

    Returns:
        ``id`` of a parameter of such a model before -> the parameter in its place.
    """
    trained = [tensor for tensor in tensors if tensor.requires_grad] if patches else []
    owners, numbers = owners_of(trained), {id(each): n for n, each in enumerate(trained)}
    found: dict[tuple[int, int], tuple[nn.Module, dict[int, str]]] = {}
    held: set[int] = set()
    holders = Holders() if len(owners) < len(numbers) else None
    for model in plain_models() if holders is not None else ():
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if own := numbers.keys() & names.keys():
            found[min(numbers[each] for each in own), 0] = model, names
            if shared := held & own:
                raise RuntimeError(
                    f"px.patch: {place} gets {names[shared.pop()]}, which two models hold, a "
                    f"{type(model).__name__} and another; give each a parameter of its own"
                )
            held |= own
        elif (beside := _place_beside(model, holders.around(model), numbers)) is not None:
            if beside in found:
                raise RuntimeError(
                    f"px.patch: {place} gets a parameter of two modules, each around a model, a "
                    f"{type(model).__name__} and another; hold both models in one module"
                )
            found[beside] = model, names
    replaced: dict[int, nn.Parameter] = {}
    for _, (model, names) in sorted(found.items()):
        adopt(model, place)
        replaced |= {key: model.get_parameter(name) for key, name in names.items()}
    return replaced


def _place_beside(
    model: nn.Module, around: list[nn.Module], numbers: dict[int, int]
) -> tuple[int, int] | None:
    """Return where a model stands among those with none of some parameters, by which ranks sort.

    That is the first parameter in a module ``around`` the model, by the ``numbers`` of their ids,
    and the place of the model there; None if no such module has one.
    """
    places = []
    for holder in around:
        beside = [numbers[id(each)] for each in holder.parameters() if id(each) in numbers]
        place = next(n for n, each in enumerate(holder.modules()) if each is model)
        places += [(min(beside), place)] if beside else []
    return min(places, default=None)


def plain_models() -> list[nn.Module]:
    """Return all models of this process that :func:`adopt` would make parallel."""
    models = modules_in_process(transformers.PreTrainedModel)
    inside = {id(part) for each in models if _has_decoder(each) for part in each.modules()}
    return [
        each
        for each in models
        if may_adopt(each) and (_has_decoder(each) or id(each) not in inside)
    ]


def _copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the plain models that have a model's weights, and no gradients."""
    weights = dict(model.named_parameters())
    return [
        each
        for each in plain_models()
        if each is not model
        and type(each) is type(model)
        and (own := dict(each.named_parameters())).keys() == weights.keys()
        and all(_same(weight, own[name]) for name, weight in weights.items())
    ]


def _same(weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two parameters have the same numbers at the same kind of place."""
    comparable = (weight.device, weight.dtype) == (other.device, other.dtype)
    return weight is not other and comparable and other.grad is None and torch.equal(weight, other)
