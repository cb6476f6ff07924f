"""An optimizer goes on with parameters whose rows are dealt to the ranks anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext.mesh import Mesh
from parallel_ext.ranks import DisagreementError


class _Entry(NamedTuple):
    """A state of a parameter, as it is on all ranks.

    Attributes:
        dtype: of a tensor; None for anything else.
        value: None where it has an element for each of the parameter's; else what it is.
    """

    dtype: torch.dtype | None
    value: Any


class CarriedOptimizer:
    """What an optimizer holds of some parameters, on its way to those that replace them.

    Every rank makes it and calls its methods, in one order.

    Args:
        optimizer: of these parameters, of some of them, or of none.
        parameters: those to be replaced, by logical name; this rank's shards.
        mesh: the ranks.
        what: what the ranks are doing, for errors.

    Raises:
        RuntimeError: a state has neither an element for each of its parameter's nor one for all, as
            Adafactor's means over rows and columns; on all ranks.
        DisagreementError: the ranks' optimizers differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        what: str,
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._shards: dict[str, dict[str, torch.Tensor]] = {}
        held, own = mesh.together(what, lambda: self._look(what))
        self._entries: dict[str, dict[str, _Entry]] = {}
        everyone = mesh.gather_objects((held, own), _Entry)
        first = everyone[0][0]
        for rank, (holds, found) in enumerate(everyone):
            known = {name: self._entries.setdefault(name, found[name]) for name in found}
            if holds != first or found != known:
                raise DisagreementError(
                    f"{what}: the optimizers differ: that of rank 0 holds {first}, that of rank "
                    f"{rank} {holds}; its states are {found}, those of lower ranks {known}"
                )

    def _look(self, what: str) -> tuple[list[str], dict[str, dict[str, _Entry]]]:
        """The parameters that are held, and the states of those that have elements here.

        Of the others torch's optimizers need none.
        """
        ids = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        held = [name for name, parameter in self._parameters.items() if id(parameter) in ids]
        found: dict[str, dict[str, _Entry]] = {}
        for name in held:
            if (parameter := self._parameters[name]).numel() == 0:
                continue
            found[name] = {}
            for key, state in sorted(self._optimizer.state.get(parameter, {}).items()):
                if not isinstance(state, torch.Tensor):
                    found[name][key] = _Entry(None, state)
                elif state.dim() == 0:
                    found[name][key] = _Entry(state.dtype, state.item())
                elif state.shape == parameter.shape:
                    found[name][key] = _Entry(state.dtype, None)
                else:
                    raise RuntimeError(
                        f"{what}: {type(self._optimizer).__name__} holds {key} of {name} in the "
                        f"shape {tuple(state.shape)}, of which no row belongs to a token; build "
                        "another optimizer afterwards"
                    )
        return held, found

    def deal(self, name: str, dealt: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take the states of a parameter to the ranks that will have its rows.

        Args:
            name: of the parameter.
            dealt: makes the new shard of the old one; called alike on all ranks.
        """
        parameter = self._parameters[name]
        states = self._optimizer.state.get(parameter, {})
        for key, entry in self._entries.get(name, {}).items():
            if entry.dtype is not None and entry.value is None:
                old = states.get(key)
                if old is None:
                    old = torch.empty_like(parameter, dtype=entry.dtype)
                self._shards.setdefault(name, {})[key] = dealt(old)

    def give(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the optimizer hold other parameters by the same names, and what was dealt."""
        for name, new in parameters.items():
            old = self._parameters[name]
            for group in self._optimizer.param_groups:
                group["params"] = [new if each is old else each for each in group["params"]]
            states = self._optimizer.state.pop(old, {})
            for key, entry in self._entries.get(name, {}).items():
                if key in self._shards.get(name, {}):
                    states[key] = self._shards[name][key]
                elif key not in states:  # on a rank that had no rows
                    dtype, value = entry
                    states[key] = value if dtype is None else torch.tensor(value, dtype=dtype)
            if states:
                self._optimizer.state[new] = states
