"""Find what stands in the place of parameters that a model has replaced, or refuse their use."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from parallel_ext.distributed.errors import first_few
from parallel_ext.sharding._torch_private import (
    gradient_hooks,
    own_parameters,
    tree_leaves,
)

# A parameter that nobody may train -> its name, and how an optimizer may have come to hold it.
_stale: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Place:
    """A place in a model that has held several parameters, one after the other.

    Attributes:
        newest: what stands there now; held, since torch cannot convert what has weak references.
    """

    newest: nn.Parameter


# A parameter that was replaced -> its place.
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
# ``id`` of the newest parameter -> its place, as long as there is an older one.
_places_now: weakref.WeakValueDictionary[int, _Place] = weakref.WeakValueDictionary()


class _Replaced(nn.Parameter):
    """A parameter in whose place a model holds another, to which its gradient belongs.

    ``grad`` and ``requires_grad`` are those of the other, for lists that are older. Its numbers
    cannot be read, since they are those of before.
    """

    def __repr__(self) -> str:
        return f"<{_stale[self][0]}, which has been replaced>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_THE_NEWEST:
            args = (newest(args[0]), *args[1:])
        elif func not in _OF_ANY:
            first = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
            name, reason = _stale[first]
            raise RuntimeError(
                f"this {name} {reason.partition(' and ')[0]}; take it from the model again"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_OF_THE_NEWEST = {
    *(torch.Tensor.grad.__get__, torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__),
    *(torch.Tensor.requires_grad.__get__, torch.Tensor.requires_grad.__set__),
    torch.Tensor.requires_grad_,
}
_OF_ANY = {  # which is known without its numbers
    *(torch.Tensor.shape.__get__, torch.Tensor.ndim.__get__, torch.Tensor.dtype.__get__),
    *(torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.is_meta.__get__),
    *(torch.Tensor.is_leaf.__get__, torch.Tensor.grad_fn.__get__, torch.Tensor.nbytes.__get__),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.numel, torch.Tensor.__len__),
    *(torch.Tensor.nelement, torch.Tensor.element_size, torch.Tensor.is_floating_point),
    *(torch.is_floating_point, torch.Tensor.is_complex, torch.is_complex),
    *(torch.Tensor.layout.__get__, torch.Tensor.is_sparse.__get__, torch.Tensor.is_contiguous),
}


def mark_stale(parameter: nn.Parameter, name: str, reason: str) -> None:
    """Let :func:`refuse_stale` refuse steps on ``parameter``, which a model has held as ``name``.

    ``reason`` says how an optimizer holds it: "was built before px.parallelize, ...".
    """
    _stale[parameter] = (name, reason)


def mark_replaced(old: nn.Parameter, new: nn.Parameter, name: str, function: str) -> None:
    """Mark ``old`` as stale, since ``function`` has put ``new`` in its place.

    :func:`newest` finds the new one. What reads the old one raises, and a gradient that reaches it.

    Args:
        old, new: what a model has held under ``name``, and holds now.
        name: for errors.
        function: such as "px.parallelize", for errors.
    """
    if newest(old) is new:  # under another name, of tied ones
        return
    reason = f"was built before {function} and still holds parameters that it replaced"
    mark_stale(old, name, reason)
    place = _places[old] = _places_now.pop(id(old), None) or _Place()
    place.newest = new
    _places_now[id(new)] = place
    if old.requires_grad:
        old.register_hook(partial(_refuse_gradient, name, function))
    if type(old) is nn.Parameter:
        old.__class__ = _Replaced


def newest(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a model holds now in the place of a parameter; other tensors as they are."""
    place = _places.get(tensor)
    return tensor if place is None else place.newest


def _refuse_gradient(name: str, function: str, gradient: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        f"a gradient reaches {name} as it was before {function}, which has replaced it; take it "
        "from the model again"
    )


def watch_replaced(module: nn.Module) -> None:
    """Let a module that another one has replaced in a model raise where it runs with old weights.

    Raises:
        RuntimeError: of its forward, if one of its parameters is stale; names it.
    """
    module.register_forward_pre_hook(_refuse_old_module)


def _refuse_old_module(module: nn.Module, args: Any) -> None:
    for parameter in own_parameters(module).values():
        if parameter is not None and parameter in _stale:
            name, reason = _stale[parameter]
            raise RuntimeError(
                f"this {type(module).__name__} {reason}: {name}; take it from the model again"
            )


def refuse_gradient_hooks(op_name: str, name: str, parameter: nn.Parameter) -> None:
    """Raise if a parameter that is to be replaced has hooks, which the new one would not have."""
    if any(gradient_hooks(parameter)):
        raise ValueError(
            f"{op_name}: {name} has gradient hooks, which would be lost; add them after {op_name}"
        )


def refuse_stale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise a RuntimeError if an optimizer holds parameters that :func:`mark_stale` has marked.

    A hook for ``register_optimizer_step_pre_hook``.
    """
    found = [
        _stale[parameter]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in _stale
    ]
    if found:
        names = first_few([name for name, _ in found])
        raise RuntimeError(
            f"{type(optimizer).__name__} {found[0][1]}: {names}; build the optimizer from the "
            "parallel model"
        )
