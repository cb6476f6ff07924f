"""Models and optimizers of a script under ``px.patch``, which the dp ranks train together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
import transformers
from torch import nn
from torch.optim import Optimizer

from parallel_ext.interplay.refusals import tensors_in
from parallel_ext.nn.stale_parameters import newest
from parallel_ext.parallel import adopting
from parallel_ext.parallel.compare import check_replicas
from parallel_ext.parallel.extending import called_by_this_package, is_called_by_this_package
from parallel_ext.parallel.holders import Holders
from parallel_ext.parallel.joining import arrive, remember
from parallel_ext.parallel.owners import models_held_with, owned_by, owners_of
from parallel_ext.parallel.state import copies_of, is_parallel, model_of, parallel_models, state_of
from parallel_ext.training.data_parallel import average_beside, data_parallel

_holders: WeakSet[nn.Module] = WeakSet()  # of parallel models, whose saves others join


def start_optimizer(
    plain: Callable[..., None], self: Optimizer, params: Any, defaults: dict[str, Any]
) -> None:
    """Extend ``Optimizer`` so that the dp ranks train one model together."""
    if not isinstance(params, torch.Tensor):
        params = _trained_together(self, params)
    with called_by_this_package():  # it adds its groups by add_param_group
        plain(self, params, defaults)


def add_group(plain: Callable[..., None], self: Optimizer, param_group: Any) -> None:
    """Extend ``Optimizer.add_param_group`` so that the dp ranks train its parameters together."""
    if isinstance(param_group, dict):
        (param_group,) = _trained_together(self, [param_group])
    plain(self, param_group)


def _trained_together(optimizer: Optimizer, params: Iterable[Any]) -> Iterable[Any]:
    """Return parameters, or groups of them, of models that the dp ranks train together."""
    if adopting.patches[0].mesh.world_size == 1 or is_called_by_this_package():
        return params
    name = type(optimizer).__name__
    params = [_with_list(each) for each in params]
    now = {id(each): newest(each) for each in tensors_in(params)}
    now |= adopting.adopt_owners(now.values(), name)
    now = {key: newest(each) for key, each in now.items()}  # also of a head beside a decoder
    params = [_exchanged(each, now) for each in params]
    tensors = list(tensors_in(params))
    owners = owners_of(tensors)
    models = list(dict.fromkeys(owned.model for owned in owners.values()))
    for model in models:
        train_together(model)
    if beside := [each for each in tensors if id(each) not in owners]:
        _train_beside(beside, models or models_held_with(beside) or parallel_models(), name)
    of_models = {  # data_parallel has replaced some
        (owned.model, owned.name): owned.parameter for model in models for owned in owned_by(model)
    }
    now = {key: of_models[owned.model, owned.name] for key, owned in owners.items()}
    return [_exchanged(each, now) for each in params]


def _train_beside(parameters: list[torch.Tensor], models: list[nn.Module], name: str) -> None:
    """Let the dp ranks train parameters together that every rank holds whole.

    Args:
        parameters: of no parallel model, frozen ones too, which may be trained later.
        models: parallel ones, with which they are trained; there may be none yet.

    Raises:
        RuntimeError: they have nothing to do with a model that ``px.patch`` serves.
        DisagreementError: ranks hold other values.
    """
    trained = [each for each in parameters if each.requires_grad]
    if trained and not models and not adopting.plain_models():
        raise RuntimeError(
            f"px.patch: {name} gets parameters of no parallel model, the first of shape "
            f"{tuple(trained[0].shape)}, which each rank would train for itself; train a causal "
            "language model of transformers, its decoder, or a classifier made of one, call "
            "px.parallelize(model, mesh), or px.unpatch() to train it so"
        )
    patched = adopting.patches[0]
    named = {f"{n}, of shape {tuple(p.shape)}": p for n, p in enumerate(parameters, 1)}
    sums = state_of(models[0]).partials if models else patched.sums
    average_beside(named, patched.mesh, sums, name)


def train_together(model: nn.Module) -> None:
    """Call ``px.data_parallel`` where each dp rank would train a model of its own.

    Copies of it come along: an average of weights needs the shards of what it is an average of.
    """
    _remember_holders(model_of(model))
    if not _lacks_data_parallel(model):
        return
    arrive("data_parallel")
    mesh = state_of(model).mesh
    copies = [each for each in copies_of(model_of(model)) if _lacks_data_parallel(each)]
    for each in (model, *adopting.made_on_all(copies, mesh, "data_parallel")):
        check_replicas(each)
        data_parallel(each, mesh, adopting.patches[0].options["zero"])


def _remember_holders(model: nn.Module) -> None:
    """Let ranks join the saves of a model of the script's own that holds a parallel one."""
    kinds = transformers.PreTrainedModel
    around = [each for each in Holders().around(model) if isinstance(each, kinds)]
    for holder in sorted(around, key=lambda each: type(each).__name__):
        if holder not in _holders:
            _holders.add(holder)
            remember(holder)


def _lacks_data_parallel(model: nn.Module) -> bool:
    state = state_of(model)
    return state.trains_apart and state.zero is None


def prepare_to_train(module: nn.Module, place: str) -> None:
    """Make a model parallel and data parallel before its optimizer is made, under ``px.patch``.

    Anything else, and a model without trained parameters, stays as it is. ``place`` is the call
    that prepares it, for errors.
    """
    if adopting.patches and any(parameter.requires_grad for parameter in module.parameters()):
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
