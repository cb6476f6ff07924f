"""An optimizer whose parameters a model replaces: its states move on to the new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.distributed.require_equal import require_equal


class _StateValue(NamedTuple):
    """A value in an optimizer's state of a parameter, as it is on all ranks."""

    dtype: torch.dtype | None  # None for anything but a tensor
    value: Any  # None where it has an element for each of the parameter's


class CarriedOptimizer:
    """An optimizer's states of some parameters, on their way to those that replace them.

    Every rank makes it and calls its methods, in one order.

    Args:
        optimizer: of these parameters, of some of them, or of none.
        parameters: those to be replaced, by logical name; this rank's shards.

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
        op_name: str,
    ) -> None:
        self._op_name = op_name
        self._optimizer, self._parameters = optimizer, parameters
        self._shards: dict[str, dict[str, torch.Tensor]] = {}
        held, own = mesh.control.run_on_all(self._op_name, self._look)
        require_equal(mesh.control, self._op_name, dict.fromkeys(held, "in the optimizer"))
        noun = "the optimizer's state of "
        self._entries: dict[str, dict[str, _StateValue]] = require_equal(
            mesh.control, self._op_name, own, _StateValue, partial=True, noun=noun
        )

    def _look(self) -> tuple[list[str], dict[str, dict[str, _StateValue]]]:
        """Return the names that the optimizer holds, and the states of those with elements here.

        Of the others torch's optimizers need none.
        """
        ids = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        held = [name for name, parameter in self._parameters.items() if id(parameter) in ids]
        found: dict[str, dict[str, _StateValue]] = {}
        for name in held:
            if (parameter := self._parameters[name]).numel() == 0:
                continue
            found[name] = {}
            for key, state in sorted(self._optimizer.state.get(parameter, {}).items()):
                if not isinstance(state, torch.Tensor):
                    found[name][key] = _StateValue(None, state)
                elif state.dim() == 0:
                    found[name][key] = _StateValue(state.dtype, state.item())
                elif state.shape == parameter.shape:
                    found[name][key] = _StateValue(state.dtype, None)
                else:
                    kind = type(self._optimizer).__name__
                    raise RuntimeError(
                        f"{self._op_name}: {kind} holds {key} of {name} in the shape "
                        f"{tuple(state.shape)}, of which no row belongs to a token; "
                        "build another optimizer afterwards"
                    )
        return held, found

    def reshard(self, name: str, resharded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move the states of a parameter to the ranks that will have its rows.

        ``resharded`` makes the new shard of the old one; it is called on all ranks.
        """
        parameter = self._parameters[name]
        states = self._optimizer.state.get(parameter, {})
        for key, entry in self._entries.get(name, {}).items():
            if entry.dtype is not None and entry.value is None:
                old = states.get(key)
                if old is None:
                    old = torch.empty_like(parameter, dtype=entry.dtype)
                self._shards.setdefault(name, {})[key] = resharded(old)

    def give(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the optimizer hold other parameters by the same names, with the moved states."""
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
