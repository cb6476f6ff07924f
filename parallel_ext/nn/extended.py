"""Functions of other packages, extended in place: under every name that anybody has imported.

``from torch.nn.utils import clip_grad_norm_`` at the top of a script binds the function itself, so
that a replacement put into ``torch.nn.utils`` afterwards would not be called. What is exchanged
here is the code of that one function object, which all its names share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

_KEY = "key of the extended function"
_extended: dict[str, tuple[FunctionType, CodeType, FunctionType, Callable[..., Any]]] = {}


def _code_of_extended(*args: Any, **kwargs: Any) -> Any:
    # Runs with the globals of the extended function, which may not have `call`.
    from parallel_ext.nn.extended import call

    return call("key of the extended function", args, kwargs)


def call(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the extension with a key; only the code of extended functions calls it."""
    _, _, plain, extension = _extended[key]
    return extension(plain, *args, **kwargs)


def extend(function: Callable[..., Any], extension: Callable[..., Any]) -> None:
    """Let every call of ``function`` become one of ``extension(plain, *args, **kwargs)``.

    Name, signature and identity of the function stay. Extending it again changes nothing.

    Args:
        function: written in Python, at the top level of a module or in a class.
        extension: gets the function as it was, and the arguments of the call.

    Raises:
        TypeError: ``function`` is not written in Python, so that it has no code to exchange.

    Example:
        >>> extend(inspect.cleandoc, lambda plain, doc: plain(doc).upper())
        >>> inspect.cleandoc(" tp")
        'TP'
        >>> restore(inspect.cleandoc)
        >>> inspect.cleandoc(" tp")
        'tp'
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} is no function written in Python and cannot be extended")
    key = _key_of(function)
    if key in _extended:
        return
    code = function.__code__
    plain = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    plain.__kwdefaults__ = function.__kwdefaults__
    plain.__dict__.update(function.__dict__)
    signature = inspect.signature(function)
    _extended[key] = (function, code, plain, extension)
    own = _code_of_extended.__code__
    function.__code__ = own.replace(
        co_consts=tuple(key if each == _KEY else each for each in own.co_consts),
        co_freevars=code.co_freevars,  # which a code object for this function must have
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )
    function.__signature__ = signature


def restore(function: Callable[..., Any]) -> None:
    """Undo :func:`extend`; a function that is not extended stays as it is."""
    entry = _extended.pop(_key_of(function), None)
    if entry is not None:
        function.__code__ = entry[1]
        if "__signature__" in entry[2].__dict__:
            function.__signature__ = entry[2].__signature__
        else:
            del function.__signature__


def restore_all() -> None:
    """Undo every :func:`extend` of this process."""
    for function, *_ in list(_extended.values()):
        restore(function)


def _key_of(function: Callable[..., Any]) -> str:
    # Decorators copy the name of what they wrap, whose code is another function's.
    return f"{function.__module__}.{function.__qualname__} at {id(function):x}"
