"""The state of torch's optimizers by logical names: out of one, and into one of any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from parallel_ext.checkpoint.saved_optimizer import (
    check_groups,
    check_state,
    give_options,
    options_of,
    read_options,
    states_after_a_step,
)
from parallel_ext.checkpoint.source import Contents
from parallel_ext.distributed.errors import CheckpointError, first_few
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal
from parallel_ext.io.reading import Wanted
from parallel_ext.io.safe_open import shown
from parallel_ext.io.safetensors_reader import DTYPES
from parallel_ext.io.safetensors_writer import DTYPE_NAMES, TensorSpec
from parallel_ext.io.schema import to_json
from parallel_ext.sharding.layout import ModelLayout, Part, TensorLayout
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.optimizer_layouts import is_reduced, knows_whole, layout_of_state
from parallel_ext.sharding.reshard import part_value
from parallel_ext.sharding.slices import local_part


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, by the names of the model's files.

    Attributes:
        tensors: ``exp_avg/<name>`` and so on -> this rank's shard, and where the whole lives.
        description: the rest, as JSON: the class, the groups with their options, and numbers such
            as ``step``; the same on every rank.
    """

    tensors: Mapping[str, tuple[torch.Tensor, TensorLayout]]
    description: dict[str, Any]


def _names_of(optimizer: torch.optim.Optimizer, contents: Contents) -> dict[nn.Parameter, str]:
    """Return the logical name of every parameter of the optimizer that is saved, in its order."""
    refuse_state_elsewhere(optimizer)
    to_shards(contents.model)
    known = {id(parameter): name for name, parameter in contents.parameters()}
    others = {id(parameter): name for name, parameter in contents.model.named_parameters()}
    names: dict[nn.Parameter, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in known:
                names[parameter] = known[id(parameter)]
            elif id(parameter) not in others:
                raise CheckpointError(
                    f"{type(optimizer).__name__}: a parameter of shape {tuple(parameter.shape)} in "
                    f"group {number} does not belong to the model; build the optimizer after "
                    "px.parallelize and px.data_parallel, from the parameters of the model"
                )
            elif optimizer.state.get(parameter):
                raise CheckpointError(
                    f"{type(optimizer).__name__} holds state of {others[id(parameter)]}, which is "
                    "frozen and not saved; build the optimizer from what is trained"
                )
    return names


def refuse_state_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer keeps state that is not of single parameters, which would be lost.

    Raises:
        CheckpointError: it does, or is no optimizer of torch.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError(f"{kind.__name__} is no torch.optim.Optimizer, and cannot be saved")
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        raise CheckpointError(
            f"{kind.__name__} has a state_dict of its own; what it keeps elsewhere would be lost, "
            "so give save_checkpoint and load_checkpoint the optimizer inside of it"
        )
    if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise CheckpointError(
            f"{kind.__name__} keeps the state {shown(others[0])}, which is of no parameter; it "
            "cannot be saved"
        )


def _files_of(name: str, layout: ModelLayout) -> list[str]:
    return [part.name for part in layout.parts_of(name)]


def _files_of_group(
    group: Mapping[str, Any], names: Mapping[nn.Parameter, str], layout: ModelLayout
) -> list[str]:
    saved = (names[parameter] for parameter in group["params"] if parameter in names)
    return [file for name in saved for file in _files_of(name, layout)]


def _is_number(key: str, value: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Return whether an entry is one number for the whole parameter, such as ``step``."""
    return value.dim() == 0 and (key == "step" or parameter.dim() > 0)


def _entries(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str
) -> dict[str, torch.Tensor]:
    """Return the optimizer's state of one parameter, without what is None."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        plain = local_part(value) if isinstance(value, torch.Tensor) else value
        is_plain = type(plain) is torch.Tensor and plain.dtype in DTYPE_NAMES
        if not isinstance(key, str) or "/" in key or not (value is None or is_plain):
            raise CheckpointError(
                f"{type(optimizer).__name__}: the state {key!r} of {name} is {shown(value)}, which "
                "is no plain tensor of a dtype that files know; it cannot be saved"
            )
    return {key: value for key, value in state.items() if value is not None}


def _summary(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, dict[str, Any]]:
    """Describe the state of each parameter with elements here: dtypes, and values of numbers."""
    found: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        if local_part(parameter).numel() == 0:  # torch's optimizers may leave it out
            continue
        entries = _entries(optimizer, parameter, name)
        found[name] = {
            key: [DTYPE_NAMES[value.dtype], value.item()]
            if _is_number(key, value, parameter)
            else [DTYPE_NAMES[value.dtype]]
            for key, value in sorted(entries.items())
        }
    return found


def collect(
    optimizer: torch.optim.Optimizer, contents: Contents, mesh: Mesh, op_name: str
) -> OptimizerState:
    """Return what an optimizer holds, without a copy; every rank calls it.

    Raises:
        CheckpointError: there is state that is no part of a logical tensor, on all ranks.
        DisagreementError: the ranks' optimizers differ.
    """
    names, own = mesh.control.run_on_all(op_name, lambda: _look(optimizer, contents))
    # A rank without elements of a parameter says nothing of it.
    noun, layout = "the optimizer's state of ", contents.layout
    summary = require_equal(mesh.control, op_name, own, partial=True, noun=noun)

    def take() -> OptimizerState:
        tensors: dict[str, tuple[torch.Tensor, TensorLayout]] = {}
        for parameter, name in names.items():
            entries = _entries(optimizer, parameter, name)
            for key, (dtype, *number) in summary.get(name, {}).items():
                if not number:
                    at = _layout_of(optimizer, key, layout[name])
                    value = _value(optimizer, at, key, entries, dtype, mesh.rank)
                    tensors.update(_by_file(key, value, layout, name, at, mesh.rank))
        return OptimizerState(tensors, _description(optimizer, names, layout, summary))

    return mesh.control.run_on_all(op_name, take)


def _look(
    optimizer: torch.optim.Optimizer, contents: Contents
) -> tuple[dict[nn.Parameter, str], dict[str, dict[str, Any]]]:
    names = _names_of(optimizer, contents)
    for number, group in enumerate(optimizer.param_groups):
        dims = {parameter.dim() for parameter in group["params"] if parameter in names}
        options = read_options(options_of(group))
        states_after_a_step(optimizer, number, options, dims)  # raises for what no load would take
    return names, _summary(optimizer, names)


def _layout_of(optimizer: torch.optim.Optimizer, key: str, whole: TensorLayout) -> TensorLayout:
    """Return the layout of a state: that of the parameter, or of its rows or its columns."""
    if not is_reduced(optimizer, key):
        return whole
    if len(whole.shape) < 2:  # which has none, as ``check_state`` says
        raise CheckpointError(f"{whole.name} of shape {whole.shape} has no state {key!r}")
    if not knows_whole(optimizer, whole):
        raise CheckpointError(
            f"{type(optimizer).__name__}: the state {key!r} of {whole.name}, of which rank 0 holds "
            f"{whole.describe(0)}, is torch's: the mean over rows or columns of a shard is no part "
            "of a state of the whole parameter, so it cannot be saved or loaded (and training is "
            "not that of one process); use px.Adafactor"
        )
    return layout_of_state(optimizer, key, whole)


def _value(
    optimizer: torch.optim.Optimizer,
    at: TensorLayout,
    key: str,
    entries: Mapping[str, torch.Tensor],
    dtype: str,
    rank: int,
) -> torch.Tensor:
    """Return this rank's shard of a state; zeros where the optimizer has none of it."""
    shape = at.local_shape(rank)
    if key not in entries:
        return torch.zeros(shape, dtype=DTYPES[dtype], device="cpu")
    value = local_part(entries[key])
    if value.shape == shape:
        return value
    if value.numel() == math.prod(shape) == 0:  # FSDP leaves alone what is empty here
        return value.reshape(shape)
    raise CheckpointError(
        f"{type(optimizer).__name__}: the state {key!r} of {at.name} has the shape "
        f"{tuple(value.shape)}, but {shape} is this rank's part, {at.describe(rank)}"
    )


def _by_file(
    key: str,
    value: torch.Tensor,
    layout: ModelLayout,
    name: str,
    at: TensorLayout,
    rank: int,
) -> Iterator[tuple[str, tuple[torch.Tensor, TensorLayout]]]:
    """Yield a state under its names in the files, each with this rank's shard and its layout."""
    for part in _parts(layout, name, at):
        own = f"{key}/{part.name}"
        yield own, (part_value(value, at, part, rank), replace(part.layout(at), name=own))


def _parts(layout: ModelLayout, name: str, at: TensorLayout) -> tuple[Part, ...]:
    """Return the tensors of files that a state with the layout ``at`` lies in.

    A state that is of no part of the parameter has its name in the model: a mean over rows is one
    of all rows of a parameter that files hold as several tensors.
    """
    return layout.parts_of(name) if at is layout[name] else (Part(name, name, at.whole, False),)


def _description(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    layout: ModelLayout,
    summary: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    groups = [
        {
            "parameters": _files_of_group(group, names, layout),
            "options": options_of(group),
        }
        for group in optimizer.param_groups
    ]
    trained = {file: name for name in names.values() for file in _files_of(name, layout)}
    numbers = {}
    for key in sorted({k for entries in summary.values() for k, at in entries.items() if at[1:]}):
        values = {
            file: (summary.get(name, {}).get(key) or [None, None])[1]
            for file, name in trained.items()
        }
        dtypes = {entries[key][0] for entries in summary.values() if key in entries}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{type(optimizer).__name__}: the state {key!r} of some parameters is a number of "
                f"{' and of others of '.join(sorted(dtypes))}; it cannot be saved"
            )
        (dtype,) = dtypes
        counts = list(values.values())
        most = max(dict.fromkeys(counts), key=counts.count)
        others = {file: value for file, value in values.items() if value != most}
        numbers[key] = {"dtype": dtype, "most": most, "others": others}
    description = {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}
    to_json(description, f"{type(optimizer).__name__}'s state")  # refuses what JSON cannot hold
    return description


def restore(
    optimizer: torch.optim.Optimizer,
    contents: Contents,
    description: Mapping[str, Any],
    saved: Mapping[str, TensorSpec],
    rank: int,
) -> tuple[list[tuple[Wanted, torch.Tensor]], Callable[[], None]]:
    """Make room for a saved state in the layout of this model; the optimizer does not change yet.

    Args:
        description: of :class:`OptimizerState`.
        saved: all tensors of the saved state, by name.

    Returns:
        What is to be read to where, and what gives it to the optimizer afterwards.

    Raises:
        CheckpointError: the saved state is not that of such an optimizer.
    """
    if description["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the state of {description['class']} was saved, but the optimizer is "
            f"{type(optimizer).__name__}"
        )
    names, layout, groups = _names_of(optimizer, contents), contents.layout, optimizer.param_groups
    files_of = [set(_files_of_group(group, names, layout)) for group in groups]
    options = [read_options(at["options"]) for at in description["groups"]]
    saved_files = [at["parameters"] for at in description["groups"]]
    expected = check_groups(optimizer, files_of, saved_files, options)
    keys_of: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in saved.items():
        key, _, file = name.partition("/")
        keys_of.setdefault(file, {})[key] = spec
    wanted: list[tuple[Wanted, torch.Tensor]] = []
    states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
    for parameter, name in names.items():
        files = _files_of(name, layout)
        of_parts = [keys_of.pop(file, {}) for file in files]
        of_whole = keys_of.pop(name, {})  # what is not by file; see ``_by_file``
        number = group_of[parameter]
        numbers = _numbers(parameter, groups[number], files, description)
        states[parameter] = dict(numbers)
        for key, spec in {**of_parts[0], **of_whole}.items():
            of_each = [of_whole] if key in of_whole else of_parts
            if any(p.keys() != of_each[0].keys() or p[key].dtype != spec.dtype for p in of_each):
                raise CheckpointError(
                    f"the state {key!r} of {name} was not saved for all its parts"
                )
            if key in states[parameter]:
                raise CheckpointError(f"{key} of {name} was saved as a number and as a tensor")
            at = _layout_of(optimizer, key, layout[name])
            tensor, places = _room(key, spec, parameter, layout, name, at, saved, rank)
            states[parameter][key] = tensor
            wanted += places
        check_state(optimizer, name, states[parameter], expected[number][parameter.dim()])
    if keys_of:
        raise CheckpointError(
            f"state of {first_few([*map(shown, sorted(keys_of))])} was saved, but the optimizer "
            "does not have these parameters"
        )

    def apply() -> None:
        for parameter, state in states.items():
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        for group, at in zip(optimizer.param_groups, options, strict=True):
            give_options(group, at)

    return wanted, apply


def _numbers(
    parameter: nn.Parameter,
    group: Mapping[str, Any],
    files: list[str],
    description: Mapping[str, Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the numbers of one parameter, such as ``step``, where torch's optimizers keep them."""
    on_device = group.get("capturable") or group.get("fused")
    for key, at in description["numbers"].items():
        values = {at["others"].get(file, at["most"]) for file in files}
        if len(values) > 1:
            raise CheckpointError(
                f"{key} of {files[0]} and {files[-1]}, which are one parameter here, are "
                f"{shown(sorted(map(str, values)))}"
            )
        value = values.pop()
        if value is not None:
            on_host = key in ("step", "mu_product") and not on_device
            device = "cpu" if on_host else parameter.device
            yield key, torch.tensor(value, dtype=DTYPES[at["dtype"]], device=device)


def _room(
    key: str,
    spec: TensorSpec,
    parameter: nn.Parameter,
    layout: ModelLayout,
    name: str,
    at: TensorLayout,
    saved: Mapping[str, TensorSpec],
    rank: int,
) -> tuple[torch.Tensor, list[tuple[Wanted, torch.Tensor]]]:
    """Return a tensor for a state of one parameter, and what is to be read, which fills it."""
    if at is layout[name]:
        tensor = torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
    else:
        shape, device = at.local_shape(rank), local_part(parameter).device
        tensor = torch.empty(shape, dtype=spec.dtype, device=device)
    wanted = [Wanted(f"{key}/{part.name}", at, part) for part in _parts(layout, name, at)]
    for each in wanted:
        shape = each.part.layout(at).shape
        found = saved.get(each.name)
        if found is None or found.shape != shape:
            raise CheckpointError(
                f"the state {key!r} of {each.part.name} must have the shape {shape}, but was saved "
                f"{'not at all' if found is None else f'in {found.shape}'}"
            )
    return tensor, [(each, local_part(tensor)) for each in wanted]
