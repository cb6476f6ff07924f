"""Models and optimizers of a script under ``px.patch``, which the dp ranks train together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.interplay.refusals import tensors_in
from parallel_ext.nn.stale_parameters import newest
from parallel_ext.parallel import adopting
from parallel_ext.parallel.drift import check_replicas
from parallel_ext.parallel.extending import is_called_by_this_package
from parallel_ext.parallel.joining import arrive
from parallel_ext.parallel.owners import owners_of
from parallel_ext.parallel.state import (
    copies_of,
    is_parallel,
    model_of,
    parallel_models,
    state_of,
)
from parallel_ext.training.data_parallel import average_beside, data_parallel


class _Ranks(NamedTuple):
    """The mesh of one ``px.patch``, and its stage of ``px.data_parallel``."""

    mesh: Mesh
    zero: int


_in_force: list[_Ranks] = []  # one, or none


def start(mesh: Mesh, zero: int) -> None:
    """Let all that is trained from here on be trained by the dp ranks together."""
    _in_force.append(_Ranks(mesh, zero))


def stop() -> None:
    """Let each rank train what it likes from here on."""
    _in_force.clear()


def is_in_force() -> bool:
    """Return whether the dp ranks train all together, since ``px.patch`` says so."""
    return bool(_in_force)


def start_optimizer(
    plain: Callable[..., None], self: Optimizer, params: Any, defaults: dict[str, Any]
) -> None:
    """Extend ``Optimizer`` so that the dp ranks train one model together.

    Raises:
        RuntimeError: it gets parameters that each rank would train for itself.
    """
    if not isinstance(params, torch.Tensor):
        params = _trained_together(self, params)
    plain(self, params, defaults)


def add_group(plain: Callable[..., None], self: Optimizer, param_group: Any) -> None:
    """Extend ``Optimizer.add_param_group`` in the same way."""
    if isinstance(param_group, dict):
        (param_group,) = _trained_together(self, [param_group])
    plain(self, param_group)


def _trained_together(optimizer: Optimizer, params: Iterable[Any]) -> Iterable[Any]:
    """Return parameters, or groups of them, of models that the dp ranks train together."""
    mesh = _in_force[0].mesh
    if mesh.world_size == 1 or is_called_by_this_package():
        return params
    name = type(optimizer).__name__
    params = [_with_list(each) for each in params]
    now = {id(each): newest(each) for each in tensors_in(params)}
    now |= adopting.adopt_owners(now.values(), name)
    params = [_exchanged(each, now) for each in params]
    tensors = list(tensors_in(params))
    owners = owners_of(tensors)
    beside = [each for each in tensors if each.requires_grad and id(each) not in owners]
    models = list(dict.fromkeys(owned.model for owned in owners.values()))
    with_them = models or parallel_models()
    if beside and not with_them:
        raise RuntimeError(
            f"px.patch: {name} gets parameters of no parallel model, the first of shape "
            f"{tuple(beside[0].shape)}, which each rank would train for itself; train a causal "
            "language model of transformers, its decoder, or a classifier made of one, call "
            "px.parallelize(model, mesh), or px.unpatch() to train it so"
        )
    for model in models:
        train_together(model)
    if beside:
        named = {f"{each}, of shape {tuple(p.shape)}": p for each, p in enumerate(beside, 1)}
        average_beside(named, with_them[0], name)
    now = {
        key: owned.model.get_parameter(owned.name)  # data_parallel has replaced them
        for key, owned in owners.items()
    }
    return [_exchanged(each, now) for each in params]


def train_together(model: nn.Module) -> None:
    """Call ``px.data_parallel`` where each dp rank would train a model of its own.

    Copies of it come along: an average of weights needs the shards of what it is an average of.

    Raises:
        DisagreementError: the dp ranks hold other weights.
    """
    if not _trains_apart(model):
        return
    arrive("data_parallel")
    mesh = state_of(model).mesh
    copies = [each for each in copies_of(model_of(model)) if _trains_apart(each)]
    for each in (model, *adopting.made_on_all(copies, mesh, "data_parallel")):
        check_replicas(each)
        data_parallel(each, mesh, _in_force[0].zero)


def _trains_apart(model: nn.Module) -> bool:
    state = state_of(model)
    return state.trains_apart and state.zero is None


def prepare_to_train(module: nn.Module, place: str) -> None:
    """Make a model parallel and data parallel before its optimizer is made, under ``px.patch``.

    Anything else, and a model without trained parameters, stays as it is. ``place`` is the call
    that prepares it, for errors.
    """
    if _in_force and any(parameter.requires_grad for parameter in module.parameters()):
        adopting.adopt_trained(module, place)
        if is_parallel(module):
            train_together(module)


def _with_list(group: Any) -> Any:
    """Return a parameter, or a group of an optimizer with a list of its parameters."""
    if not isinstance(group, dict):
        return group
    inner = group["params"]
    return {**group, "params": [inner] if isinstance(inner, torch.Tensor) else list(inner)}


def _exchanged(group: Any, now: dict[int, torch.Tensor]) -> Any:
    if isinstance(group, torch.Tensor):
        return now.get(id(group), group)
    if isinstance(group, tuple):
        return group[0], _exchanged(group[1], now)
    return {**group, "params": [_exchanged(each, now) for each in group["params"]]}
