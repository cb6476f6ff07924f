"""Check what a saved optimizer says of its options and states."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint.training_state import decode, differs_in_kind, encode
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safe_open import shown
from parallel_ext.parallel.extending import called_by_this_package

OF_THE_RUN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Options of a group, with their defaults, that say how a step is computed, not what."""

_NOT_SAVED = {"params", "param_names", *OF_THE_RUN}  # those of the running optimizer count


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer's group, as JSON.

    Raises:
        CheckpointError: one is of a type that a checkpoint does not hold.
    """
    return {
        key: encode(value, f"the option {key!r} of a group")
        for key, value in group.items()
        if key not in _NOT_SAVED
    }


def read_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the hyperparameters of a group from what :func:`options_of` returned."""
    return {key: decode(value, f"the option {key!r} of a group") for key, value in saved.items()}


def give_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group these options, in place for its tensors, which a CUDA graph may hold."""
    for key, value in options.items():
        group[key] = _in_kind_of(group.get(key), value)


def _in_kind_of(own: Any, saved: Any) -> Any:
    if isinstance(own, tuple) and isinstance(saved, tuple) and len(own) == len(saved):
        return tuple(map(_in_kind_of, own, saved))
    number = saved.item() if isinstance(saved, torch.Tensor) and saved.numel() == 1 else saved
    return own.fill_(number) if isinstance(own, torch.Tensor) else number


def check_groups(
    optimizer: torch.optim.Optimizer,
    files_of: Sequence[set[str]],
    saved_files: Sequence[Sequence[str]],
    options: Sequence[Mapping[str, Any]],
) -> list[dict[int, dict[str, torch.Tensor]]]:
    """Raise a CheckpointError unless saved groups are an optimizer's, with options of such kinds.

    Args:
        files_of: for each of its groups the names of its parameters in files.
        saved_files: the same of the saved optimizer.
        options: those of its groups.

    Returns:
        For each group :func:`states_after_a_step`.
    """
    if len(files_of) != len(saved_files):
        raise CheckpointError(
            f"{len(saved_files)} groups of parameters were saved, but the optimizer has "
            f"{len(files_of)}"
        )
    expected = []
    for number, (own, saved) in enumerate(zip(files_of, saved_files, strict=True)):
        if other := own ^ set(saved):
            name = sorted(other)[0]
            raise CheckpointError(
                f"group {number} of the optimizer {'has' if name in own else 'lacks'} "
                f"{shown(name)}, the saved one {'lacks' if name in own else 'has'} it; "
                f"{len(other)} differ"
            )
        group = optimizer.param_groups[number]
        for key, value in options[number].items():
            problem = "is no option that is saved" if key in _NOT_SAVED else ""
            if not problem and key in group:
                problem = differs_in_kind(value, group[key])
                both_lists = all(isinstance(each, (list, tuple)) for each in (value, group[key]))
                if not problem and both_lists and len(value) != len(group[key]):
                    problem = f"had {len(group[key])} elements and is {shown(value)}"
            if problem:
                raise CheckpointError(
                    f"group {number} of the saved optimizer: the option {shown(key)} {problem}"
                )
        dims = {each.dim() for each in group["params"]}
        expected.append(states_after_a_step(optimizer, number, options[number], dims))
    return expected


def states_after_a_step(
    optimizer: torch.optim.Optimizer, number: int, options: Mapping[str, Any], dims: Collection[int]
) -> dict[int, dict[str, torch.Tensor]]:
    """Return what one of torch's optimizers keeps of ``dims``-dimensional parameters after a step.

    The rate is not tried: a schedule may have brought it where no optimizer begins, such as below
    0.

    Returns:
        For each number the state; empty for a step that is not torch's, of which nothing is known.

    Raises:
        CheckpointError: torch does not take the options, such a parameter, or the step.
    """
    # A class that inherits from torch's may take other arguments.
    cls = next(c for c in type(optimizer).__mro__ if c.__module__.startswith("torch."))
    if cls is torch.optim.Optimizer:
        return dict.fromkeys(dims, {})
    names = inspect.signature(cls.__init__).parameters
    given = {name: value for name, value in options.items() if name in names and name != "lr"}
    step = inspect.unwrap(type(optimizer).step)  # torch wraps that of each class
    is_torchs = step is inspect.unwrap(cls.step) or getattr(optimizer, "of_whole_tensors", False)
    found: dict[int, dict[str, torch.Tensor]] = {}
    try:
        for dim in dims or (1,):
            parameter = nn.Parameter(torch.zeros((1,) * dim, device="cpu"))
            parameter.grad = torch.zeros_like(parameter)
            with called_by_this_package():
                small = cls([parameter], **given)
                if is_torchs:
                    small.step()
            state = small.state[parameter].items() if is_torchs else ()
            found[dim] = {key: value for key, value in state if value is not None}
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"group {number} of the saved optimizer, {type(optimizer).__name__}: {error}"
        ) from error
    return found


def check_state(
    optimizer: torch.optim.Optimizer,
    name: str,
    state: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Raise a CheckpointError unless a saved state is empty, or what the optimizer will look for.

    Args:
        expected: what it keeps of such a parameter after a step, as far as that is known.
    """
    if state and (missing := expected.keys() - state.keys()):
        raise CheckpointError(f"the state {', '.join(sorted(missing))} of {name} was not saved")
    for key, value in state.items():
        own = expected.get(key)
        if own is not None and (
            value.dim() != own.dim()
            or value.is_floating_point() != own.is_floating_point()
            or (key == "step" and value.item() < 0)
        ):
            what = value.item() if value.dim() == 0 else f"of shape {tuple(value.shape)}"
            raise CheckpointError(
                f"the state {key!r} of {name} was saved as {value.dtype} {what}, which no "
                f"{type(optimizer).__name__} has"
            )
