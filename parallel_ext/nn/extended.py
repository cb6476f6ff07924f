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

_extended: dict[str, tuple[FunctionType, CodeType, FunctionType, Callable[..., Any]]] = {}

# The globals are those of the extended function. It uses as many variables of a function around it,
# in a statement that never runs: a code object that has such and does not use them crashes the
# interpreter when a debugger reads the locals of its frame. All is in one line, for which
# tracebacks show the first one of the function.
_BODY = "from parallel_ext.nn.extended import call; return call({key!r}, args, kwargs); ({names})"
_SOURCE = f"""
def around({{names}}):
    def extended(*args, **kwargs): {_BODY}
    return extended
"""


def _code_of_extended(key: str, code: CodeType) -> CodeType:
    """Return the code of a function that calls :func:`call`, for a function with this code."""
    names = "".join(f"free_{number}, " for number in range(len(code.co_freevars)))
    found: dict[str, Any] = {}
    exec(_SOURCE.format(names=names, key=key), found)
    return found["around"](*code.co_freevars).__code__.replace(
        co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
    )


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
    function.__code__ = _code_of_extended(key, code)
    function.__signature__ = signature


def extend_by_name(owner: Any, *extensions: Callable[..., Any]) -> None:
    """Extend functions of a module, or of a class, each by the extension with its name."""
    for extension in extensions:
        extend(getattr(owner, extension.__name__), extension)


def restore(function: Callable[..., Any]) -> None:
    """Undo :func:`extend`; a function that is not extended stays as it is."""
    entry = _extended.get(key := _key_of(function))
    if entry is not None:
        function.__code__ = entry[1]
        del _extended[key]  # which other threads may have called until here
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
