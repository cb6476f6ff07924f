"""Whether the saved state of an optimizer is one that the running optimizer can take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint.loop import differs_in_kind
from parallel_ext.checkpoint.open_file import CheckpointError, shown
from parallel_ext.checkpoint.optimizer_options import OF_THE_RUN


def check_groups(
    optimizer: torch.optim.Optimizer,
    files_of: Sequence[set[str]],
    saved_files: Sequence[Sequence[str]],
    options: Sequence[Mapping[str, Any]],
) -> None:
    """See that the saved groups are those of the optimizer, with options of the same kinds.

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
    """See that torch takes the options, by making another such optimizer.

    Not the rate: a schedule may have brought it where no optimizer begins, such as below 0.
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
    """See that a parameter's saved state is nothing, or all that the optimizer will look for.

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
