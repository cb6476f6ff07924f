"""What methods of a model's class take: arguments of a call by name, and labels of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn

_OF_LIBRARIES = ("transformers.", "parallel_ext.")


@lru_cache
def _signature(cls: type, method: str) -> inspect.Signature:
    return inspect.signature(getattr(cls, method))


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


@lru_cache
def has_own_loss(cls: type) -> bool:
    """Return whether a class derived from one of transformers takes labels for a loss of its own.

    Not where it hands them to ``loss_function`` or to the forward of its base, whose loss is known.
    """
    take = [each for each in cls.__mro__ if "labels" in _parameters(vars(each).get("forward"))]
    known = [each.__module__.startswith(_OF_LIBRARIES) for each in take]
    if known[:1] != [False] or not any(known):
        return False
    code = inspect.unwrap(take[0].forward).__code__
    by_name = any(isinstance(each, tuple) and "labels" in each for each in code.co_consts)
    asks_base = "__class__" in code.co_freevars and by_name
    return not asks_base and "loss_function" not in code.co_names


def _parameters(function: Any) -> Any:
    return () if function is None else inspect.signature(function).parameters
