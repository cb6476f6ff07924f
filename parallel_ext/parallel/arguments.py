"""What a call of a method of a model's class means: its arguments by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from torch import nn


@lru_cache
def _signature(cls: type, method: str) -> inspect.Signature:
    """Return the signature of a method; that of its base where it hands on ``*args``."""
    of_classes = [vars(each)[method] for each in cls.__mro__ if method in vars(each)]
    signatures = [inspect.signature(each) for each in of_classes]
    return next((each for each in signatures if not _takes_any(each)), signatures[0])


def _takes_any(signature: inspect.Signature) -> bool:
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


@lru_cache
def declared_by(cls: type, method: str) -> Collection[str]:
    """Return the names of the arguments that a class declares for a method."""
    return inspect.signature(getattr(cls, method)).parameters.keys()


def arguments_of(model: nn.Module, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, those of ``**kwargs`` beside the declared ones.

    Where all have names, it is left to the method itself to refuse some.
    """
    if not args:  # as in decoding, which has no time to look at the signature
        return dict(kwargs)
    signature = _signature(type(model), method)
    arguments = dict(signature.bind(model, *args, **kwargs).arguments)
    del arguments[next(iter(arguments))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


def wants_router_logits(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call of the forward, or else the configuration, asks for router logits."""
    asked = arguments.get("output_router_logits")
    # Decoders in models of images of transformers 5.15 have no such field.
    return bool(getattr(model.config, "output_router_logits", False) if asked is None else asked)
