"""Optimizers on shards: which step as one process would, and what their ``state_dict()`` holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from parallel_ext.distributed.control import world
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.parallel.extending import called_by_this_package, is_called_by_this_package
from parallel_ext.parallel.owners import Owned, models_held_with, owners_in
from parallel_ext.parallel.state import STATE_NAME, ParallelState, parallel_models, state_of
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.optimizer_layouts import layout_of_state
from parallel_ext.sharding.shards import LocalShard, Unplaced
from parallel_ext.sharding.slices import like, local_part, take

_ELEMENTWISE = {
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD"),
}
"""torch's optimizers that look at single elements."""


class _Known(NamedTuple):
    """An optimizer that looks beyond single elements."""

    instead: str  # what to use, for the error
    of: str = ""  # a part of the names of the parameters at which it looks so


# Known optimizers by the name of their class, since transformers has an Adafactor, too.
_KNOWN = {
    "Adafactor": _Known("use px.Adafactor"),
    "LBFGS": _Known("use torch's AdamW or SGD, or px.Adafactor"),
    "LoraFAOptimizer": _Known(
        "use torch's AdamW or SGD, or adapt no o_proj and down_proj", "lora_A"
    ),
    "Muon": _Known("use torch's AdamW or SGD, or px.Adafactor"),
    "ZeroRedundancyOptimizer": _Known("use px.data_parallel, which shards the optimizer's state"),
}
_ANY = _Known(
    "use torch's AdamW or SGD, or px.Adafactor; an optimizer of which you know that it treats each "
    "element alone may say so by an attribute elementwise = True"
)
_STEPS = 20  # of an optimizer that is tried
_verdicts: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()
_compared: WeakKeyDictionary[torch.optim.Optimizer, set[int]] = WeakKeyDictionary()


def refuse_without_gradients(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Raise if an optimizer steps before the gradients are those of the batch.

    A hook for ``register_optimizer_step_pre_hook``. The backwards of a closure are looked at when
    it has run.

    Returns:
        None, or the arguments of the step with another closure.
    """

    def check() -> None:
        _refuse_among_leaves(optimizer)
        _refuse_before_sums(optimizer)

    def checked() -> Any:
        loss = closure()
        check()
        return loss

    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return check()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs


def refuse_on_shards(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer that looks beyond single elements is about to step on shards.

    A hook for ``register_optimizer_step_pre_hook``.

    Raises:
        RuntimeError: it is, or nothing shows that it looks at single elements; or it is fused, and
            the model has ``px.Invariant``.
        DisagreementError: ranks have other gradients of a parameter beside the parallel model,
            when it has one for the first time.
    """
    _refuse_unequal_beside(optimizer)
    if optimizer not in _verdicts:
        _refuse_fused(optimizer)
        _step_one_by_one(optimizer)
        _verdicts[optimizer] = _verdict(optimizer)
    if not (verdict := _verdicts[optimizer]):
        return
    known = _known(optimizer) or _ANY
    for owned in owners_in(optimizer).values():
        if owned.is_sharded and known.of in owned.name:
            raise RuntimeError(
                f"{type(optimizer).__name__} {verdict}, but {owned.name} is sharded: rank 0 holds "
                f"{owned.layout.describe(0)}; its steps would not be those of one process; "
                f"{known.instead}"
            )


def _refuse_among_leaves(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a model of the optimizer has no gradients yet, but those of some leaves."""
    if all(state_of(model).leaf_loop is None for model in parallel_models()):
        return
    for owned in owners_in(optimizer).values():
        state = state_of(owned.model)
        if state.leaf_loop is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step before all leaves of a step of px.Invariant("
                f"leaves={state.invariant.leaves}) have run; around accelerate every batch has an "
                "accelerator.backward(loss), and an epoch is a multiple of "
                "gradient_accumulation_steps * dp batches"
            )


def _refuse_before_sums(optimizer: torch.optim.Optimizer) -> None:
    """Raise if gradients of a model of the optimizer have not been summed over the ranks."""
    waiting = [model for model in parallel_models() if _waits(state_of(model))]
    if waiting and any(owned.model in waiting for owned in owners_in(optimizer).values()):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step after a backward under px.no_sync, whose gradients "
            "the next backward outside of it sums over the ranks: run the last backward before a "
            "step outside of px.no_sync"
        )


def _waits(state: ParallelState) -> bool:
    return any(
        each is not None and each.is_waiting() for each in (state.partials, state.fsdp_gradients)
    )


def _refuse_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer whose kernel has other bits for the last elements of a tensor."""
    if any(group.get("fused") for group in optimizer.param_groups):
        for owned in owners_in(optimizer).values():
            if state_of(owned.model).invariant is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} with fused=True has other bits at the end of a "
                    "shard, which px.Invariant rules out; pass fused=False, or to px.Trainer "
                    'optim="adamw_torch"'
                )


def _refuse_unequal_beside(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the first gradients of parameters beside a parallel model are equal on ranks.

    As long as some of these parameters have had none, all ranks compare which have one: whether
    they do is decided by the parameters alone, which are equal on all ranks.
    """
    compared = _compared.setdefault(optimizer, set())
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    others = [p for p in parameters if p.requires_grad and id(p) not in compared]
    if not others or is_called_by_this_package() or not parallel_models():
        return
    owners = owners_in(optimizer)
    compared.update(owners)
    beside = [p for p in others if id(p) not in owners]
    models = [owned.model for owned in owners.values()] or models_held_with(beside)
    if not models:
        compared.update(map(id, beside))
    if not models or not beside:
        return
    new = {number: p for number, p in enumerate(beside, 1) if p.grad is not None}
    shapes = [f"number {number}, of shape {tuple(p.shape)}" for number, p in new.items()]
    what = "which parameters beside the parallel model have a gradient"
    _require_equal(models[0], optimizer, what, ", ".join(shapes) or "none")
    if new:
        norm = torch.nn.utils.get_total_norm([_whole(p.grad) for p in new.values()]).item()
        what = "the norm of the gradients of parameters beside the parallel model"
        _require_equal(models[0], optimizer, what, norm)
        compared.update(map(id, new.values()))


def _require_equal(
    model: nn.Module, optimizer: torch.optim.Optimizer, what: str, value: str | float
) -> None:
    require_equal(
        state_of(model).mesh.control,
        f"{type(optimizer).__name__}.step",
        {what: value},
        advice="give px.data_parallel the module that holds the model and them, which averages "
        "them, or average them yourself; tp ranks need the same inputs and random states",
    )


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _step_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Let groups with DTensors and plain tensors step one by one, which torch's kernels refuse."""
    for group in optimizer.param_groups:
        if len({hasattr(parameter, "device_mesh") for parameter in group["params"]}) > 1:
            group.update((key, False) for key in ("foreach", "fused") if key in group)


def _known(optimizer: torch.optim.Optimizer) -> _Known | None:
    names = (cls.__name__ for cls in type(optimizer).__mro__)
    return next((_KNOWN[name] for name in names if name in _KNOWN), None)


def _verdict(optimizer: torch.optim.Optimizer) -> str:
    """Return in words why an optimizer cannot step on shards; empty if it can."""
    kind = type(optimizer)
    if getattr(optimizer, "of_whole_tensors", False) or getattr(optimizer, "elementwise", False):
        return ""
    if kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE:
        return ""
    if _known(optimizer) is not None:
        return "takes norms, means or inverses of what one rank holds"
    try:
        alone = _steps_in_parts(optimizer)
    except Exception as error:
        return (
            "may look at more than single elements, which could not be tried on a small copy "
            f"({type(error).__name__}: {error})"
        )
    return "" if alone else "looks at more than single elements"


def _steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether steps on two parts of a matrix equal those on the whole of it.

    It is large enough for optimizers that treat small ones in another way, and its gradients are
    drawn, since some look at norms and angles only now and then.
    """
    draws = torch.Generator().manual_seed(0)
    whole = torch.randn(1 + _STEPS, 136, 144, generator=draws, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), called_by_this_package():
        stepped = _stepped(optimizer, whole)
        for dim, sizes in ((0, (60, 76)), (1, (50, 94))):
            parts = [_stepped(optimizer, part) for part in whole.split(sizes, 1 + dim)]
            if not torch.equal(stepped, torch.cat(parts, dim)):
                return False
    return True


def _stepped(optimizer: torch.optim.Optimizer, drawn: torch.Tensor) -> torch.Tensor:
    """Return a parameter after steps of a new optimizer with the class and options of another.

    ``drawn`` are the parameter and its gradients.
    """
    first, *gradients = (each.clone(memory_format=torch.contiguous_format) for each in drawn)
    parameter = nn.Parameter(first.clone())
    takes = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in takes}
    group = {k: v for k, v in optimizer.param_groups[0].items() if k in options}
    if not group.get("lr", 1):  # at the begin of a warm-up
        group["lr"] = optimizer.param_groups[0].get("initial_lr") or options["lr"]
    copy = type(optimizer)([{"params": [parameter], **group}], **options)
    _verdicts[copy] = ""  # whose steps are not tried in turn
    for gradient in gradients:
        parameter.grad = gradient
        copy.step()
    if torch.equal(parameter.detach(), first):
        raise ValueError(f"{_STEPS} steps change nothing")
    return parameter.detach()


def _sharded(
    optimizer: torch.optim.Optimizer, owners: dict[int, Owned], state_dict: dict[str, Any]
) -> Iterator[tuple[Any, Owned]]:
    """Yield (key in a state dict, owner) for the sharded parameters of which it holds a state."""
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for number, parameter in zip(saved["params"], own["params"], strict=False):
            owned = owners.get(id(parameter))
            if owned is not None and owned.is_sharded and number in state_dict["state"]:
                yield number, owned


def state_dict(plain: Callable[..., dict[str, Any]], self: torch.optim.Optimizer) -> dict[str, Any]:
    """Extend ``Optimizer.state_dict`` so that shards know their place; it adds a marker of them."""
    result, owners, rank = plain(self), owners_in(self), world()[0]
    if not any(owned.is_sharded for owned in owners.values()):
        return result
    state = dict(result["state"])
    for number, owned in _sharded(self, owners, result):
        state[number] = {
            key: _placed(value, layout_of_state(self, key, owned.layout), rank)
            for key, value in state[number].items()
        }
    model = next(iter(owners.values())).model
    return {**result, "state": state, STATE_NAME: state_of(model).get_extra_state()}


def _placed(value: Any, place: TensorLayout, rank: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    local = local_part(value)
    if local.shape == place.local_shape(rank):
        return LocalShard.of(local, place, rank)
    return local.detach().as_subclass(Unplaced)


def load_state_dict(
    plain: Callable[..., None], self: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    """Extend ``Optimizer.load_state_dict`` to slice full tensors and refuse other ranks' shards.

    Every rank calls it, and it raises on all or none.
    """
    owners, op_name = owners_in(self), f"{type(self).__name__}.load_state_dict"
    sharded = [owned for owned in owners.values() if owned.is_sharded]
    if not sharded:
        if STATE_NAME in state_dict:
            raise RuntimeError(
                f"{op_name}: this state holds the shards of one rank of a parallel model, but the "
                "optimizer has whole parameters; load a checkpoint of px.save_checkpoint"
            )
        plain(self, state_dict)
        return
    model = sharded[0].model

    def convert() -> dict[str, Any]:
        if (marker := state_dict.get(STATE_NAME)) is not None:
            state_of(model).check_marker(marker, "state of an optimizer")
        state = dict(state_dict["state"])
        for number, owned in _sharded(self, owners, state_dict):
            if isinstance(state[number], dict):
                state[number] = {
                    key: _local(value, self, key, owned, marker is not None)
                    for key, value in state[number].items()
                }
        return {**state_dict, "state": state}

    plain(self, state_of(model).mesh.control.run_on_all(op_name, convert))


def _local(
    value: Any, optimizer: torch.optim.Optimizer, key: str, owned: Owned, marked: bool
) -> Any:
    """Return this rank's part of a value in an optimizer's state, or raise for another rank's."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or hasattr(value, "device_mesh"):
        return value
    place, rank = layout_of_state(optimizer, key, owned.layout), world()[0]
    if isinstance(value, LocalShard):
        fits = (value.place, value.rank) == (place, rank)
        local = value.plain()
    elif tuple(value.shape) == place.shape:
        fits, local = True, take(value, place, rank)
    else:
        fits, local = marked, value
    if not fits:
        raise RuntimeError(
            f"{key} of {owned.name} has the shape {tuple(value.shape)}, and nothing says whose "
            f"shard it is; give the full {place.shape}, or what the optimizer's own state_dict() "
            f"has returned on this rank, which holds {place.describe(rank)}"
        )
    is_whole_shard = local.shape == local_part(owned.parameter).shape
    return like(local, owned.parameter) if is_whole_shard else local
