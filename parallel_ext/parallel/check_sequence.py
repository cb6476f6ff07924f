"""What sequence parallelism asks of a model, whose tokens between the sublayers are divided."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn

from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.spec import ModelSpec, Sublayer
from parallel_ext.models.sublayers import AttentionNames, RegionNames
from parallel_ext.parallel.validate import dropouts_of

POSITIONS = "position_embeddings"
"""The argument of a decoder layer and its attention that has a place for each token."""

_IMAGES = "visual_pos_masks"
"""The argument of a decoder that adds features of images to its hidden states, as Qwen3-VL's."""


def check_sequence_parallel(model: nn.Module, spec: ModelSpec) -> None:
    """Raise a ValueError unless ranks can divide the tokens between a model's sublayers."""
    for problem in _problems(model, spec):
        raise ValueError(f"parallelize: sequence_parallel=True {problem}")


def _problems(model: nn.Module, spec: ModelSpec) -> Iterator[str]:
    """Yield what keeps the tokens from being divided, each an end of a sentence."""
    if path := spec.layer_embedding_in(dict(model.named_parameters())):
        yield f"gives layers this rank's tokens, to which they would add all that {path} looks up"
    for path, sublayer in sublayers_of_layers(model, spec).items():
        if path.rpartition(".")[0] == spec.layers:
            yield f"does not serve experts beside the MLP, as those of {path}"
            continue
        module = model.get_submodule(path)
        for name in beside_experts(module, sublayer) if isinstance(sublayer, MixtureNames) else []:
            linear = type(each := module.get_submodule(name)) is nn.Linear
            of_router = f"{name}.".startswith(f"{sublayer.router}.")
            if name and not of_router and not linear:  # without a name: the mixture itself
                yield (
                    "gives a mixture this rank's tokens, of which beside router and experts only "
                    f"linears are right; {path}.{name} is a {type(each).__name__}"
                )
        noisy = isinstance(sublayer, MixtureNames) and sublayer.jitter_of(model.config) > 0
        if noisy and sublayer.block_jitter is None:
            yield (
                f"needs the attribute of {path} with the noise of {sublayer.jitter}; name it by "
                "block_jitter in the spec"
            )
        if isinstance(sublayer, RegionNames) and sublayer.entry is not None:
            yield f"does not serve the entry of {path}; leave it out"
        if isinstance(sublayer, AttentionNames) and (
            POSITIONS not in inspect.signature(type(module).forward).parameters
        ):
            yield (
                f"needs an attention that is given {POSITIONS}, which tell the number of tokens; "
                f"{path} is a {type(module).__name__}"
            )
    layer = type(model.get_submodule(f"{spec.layers}.0"))
    if spec.attention is None and POSITIONS not in inspect.signature(layer.forward).parameters:
        yield (
            f"needs decoder layers that are given {POSITIONS}, which tell the number of tokens; "
            f"{spec.layers}.0 is a {layer.__name__}"
        )
    decoder = type(model.get_submodule(spec.decoder))
    if _IMAGES in inspect.signature(decoder.forward).parameters:
        yield f"does not serve {decoder.__name__}, which adds features of images to all tokens"
    if not spec.embedding.startswith(spec.in_decoder):
        yield (
            f"needs the embedding beside the decoder layers in {spec.decoder!r}, but it is "
            f"{spec.embedding}"
        )
    norms = norms_of(model, spec)
    for path in norms:
        if "Norm" not in type(module := model.get_submodule(path)).__name__:
            yield (
                "divides the tokens of what stands between the sublayers, which must be norms; "
                f"{path} is a {type(module).__name__}"
            )
    behind = [path for path in norms if not path.startswith(f"{spec.layers}.")]
    if len(behind) != 1:
        there = ", ".join(behind) or "none"
        yield f"needs one norm with weights behind the decoder layers, but there are {there}"
    for place, probability in dropouts_of(model).items():
        if spec.head is None and not place.startswith((spec.in_decoder, "config.")):
            continue  # behind the final norm, in what classifies all tokens
        yield (
            "does not serve dropout between the sublayers, whose masks would depend on the layout; "
            f"set that of {place}, {probability}, to 0"
        )


def sublayers_of_layers(model: nn.Module, spec: ModelSpec) -> dict[str, Sublayer]:
    """Return the sublayers of the decoder layers, between which the tokens are divided."""
    found = spec.sublayers(dict(model.named_parameters()))
    return {path: each for path, each in found.items() if path.startswith(f"{spec.layers}.")}


def beside_layers(model: nn.Module, spec: ModelSpec) -> set[str]:
    """Return the paths of what has sublayers or towers in the decoder, beside its layers."""
    decoder = spec.in_decoder
    paths = (*spec.towers, *spec.shared, *spec.sublayers(dict(model.named_parameters())))
    return {
        f"{decoder}{path.removeprefix(decoder).partition('.')[0]}"
        for path in paths
        if path.startswith(decoder) and not path.startswith(f"{spec.layers}.")
    }


def norms_of(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the paths of modules with parameters between the sublayers, and behind the last."""
    others = (*sublayers_of_layers(model, spec), *beside_layers(model, spec), spec.embedding)
    found = [path for path in _outside(others, model) if path.startswith(spec.in_decoder)]
    return sorted(found, key=lambda path: not path.startswith(f"{spec.layers}."))


def beside_experts(mixture: nn.Module, names: MixtureNames) -> list[str]:
    """Return the names of the modules of a mixture whose parameters every rank holds."""
    sharded = [names.experts] if names.shared is None else [names.experts, names.shared.name]
    return _outside(sharded, mixture)


def _outside(paths: Sequence[str], model: nn.Module) -> list[str]:
    """Return the names of modules with parameters of their own that are not in one of ``paths``."""
    return [
        name
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
        and not f"{name}.".startswith(tuple(f"{path}." for path in paths))
    ]
