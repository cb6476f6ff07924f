"""What methods of a model's class take: arguments of a call by name, and labels of its own."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn

_OF_LIBRARIES = ("transformers.", "parallel_ext.")


@lru_cache
def _signature(cls: type, method: str) -> inspect.Signature:
    return inspect.signature(getattr(cls, method))


def arguments_of(model: nn.Module, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, those of ``**kwargs`` beside the declared ones."""
    signature = _signature(type(model), method)
    arguments = dict(signature.bind(model, *args, **kwargs).arguments)
    del arguments[next(iter(arguments))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


@lru_cache
def has_own_loss(cls: type) -> bool:
    """Return whether a class derived from one of transformers takes labels in a forward of its own.

    What it does with them cannot be known, such as a loss with label smoothing.
    """
    take = [each for each in cls.__mro__ if "labels" in _parameters(vars(each).get("forward"))]
    known = [each.__module__.startswith(_OF_LIBRARIES) for each in take]
    return any(known) and not known[0]


def _parameters(function: Any) -> Any:
    return () if function is None else inspect.signature(function).parameters
