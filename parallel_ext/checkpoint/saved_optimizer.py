"""Check what a saved optimizer says of its options and states."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint.training_state import decode, differs_in_kind, encode
from parallel_ext.distributed.errors import CheckpointError
from parallel_ext.io.safe_open import shown

# Options of a group that say how a step is computed, not what: the running optimizer's count.
OF_THE_RUN = {"params", "foreach", "fused", "capturable", "differentiable", "param_names"}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer's group, as JSON.

    Raises:
        CheckpointError: one is of a type that a checkpoint does not hold.
    """
    return {
        key: encode(value, f"the option {key!r} of a group")
        for key, value in group.items()
        if key not in OF_THE_RUN
    }


def read_options(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the hyperparameters of a group from what :func:`options_of` returned.

    Raises:
        CheckpointError: it was not made by :func:`options_of`.
    """
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
) -> None:
    """Raise unless the saved groups are those of the optimizer, with options of the same kinds.

    Args:
        optimizer: the running one.
        files_of: for each of its groups the names of its parameters in files.
        saved_files: the same of the saved optimizer.
        options: those of its groups.

    Raises:
        CheckpointError: they are not; names the group and the parameter or option.
    """
    if len(files_of) != len(saved_files):
        raise CheckpointError(
            f"{len(saved_files)} groups of parameters were saved, but the optimizer has "
            f"{len(files_of)}"
        )
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
            problem = "is no option that is saved" if key in OF_THE_RUN else ""
            if not problem and key in group:
                problem = differs_in_kind(value, group[key])
                if (
                    not problem
                    and isinstance(value, (list, tuple))
                    and len(value) != len(group[key])
                ):
                    problem = f"had {len(group[key])} elements and is {shown(value)}"
            if problem:
                raise CheckpointError(
                    f"group {number} of the saved optimizer: the option {shown(key)} {problem}"
                )
        _check_values(optimizer, number, options[number])


def _check_values(
    optimizer: torch.optim.Optimizer, number: int, options: Mapping[str, Any]
) -> None:
    """Raise unless torch takes the options, by making another such optimizer.

    The rate is not checked: a schedule may have brought it where no optimizer begins, such as
    below 0.
    """
    # A class that inherits from torch's may take other arguments.
    of_torch = next(c for c in type(optimizer).__mro__ if c.__module__.startswith("torch."))
    names = inspect.signature(of_torch.__init__).parameters
    given = {name: value for name, value in options.items() if name in names and name != "lr"}
    try:
        of_torch([torch.zeros(1, device="cpu")], **given)
    except ValueError as error:
        raise CheckpointError(f"group {number} of the saved optimizer: {error}") from error


def check_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    name: str,
    state: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
) -> None:
    """Raise unless a parameter's saved state is empty, or all that the optimizer will look for.

    Args:
        optimizer: the running one.
        parameter: one of its parameters.
        name: of the parameter.
        state: what it shall get.
        options: of its group, as saved.

    Raises:
        CheckpointError: something is missing, or not of a kind that the optimizer can use.
    """
    needed: set[str] = set()
    if isinstance(optimizer, torch.optim.Adam):
        needed = {"step", "exp_avg", "exp_avg_sq"}
        needed |= {"max_exp_avg_sq"} if options.get("amsgrad") else set()
    elif isinstance(optimizer, torch.optim.Adafactor):
        needed = {"step", *(("row_var", "col_var") if parameter.dim() > 1 else ("variance",))}
    if state and (missing := needed - state.keys()):
        raise CheckpointError(f"the state {', '.join(sorted(missing))} of {name} was not saved")
    for key, value in state.items():
        if key in {*needed, "momentum_buffer"} and (
            value.dim() != (0 if key == "step" else parameter.dim())
            or not value.is_floating_point()
            or (key == "step" and value.item() < 0)
        ):
            what = value.item() if value.dim() == 0 else f"of shape {tuple(value.shape)}"
            raise CheckpointError(
                f"the state {key!r} of {name} was saved as {value.dtype} {what}, which no "
                f"{type(optimizer).__name__} has"
            )
