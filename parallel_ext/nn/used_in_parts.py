"""Plain modules that every rank holds whole and uses for a part of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext.nn.grad_sync import PartialGradients, for_use
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import Range


class UsedInParts:
    """Forward hooks of a replicated plain module that each rank uses for a part of the input.

    For example of a norm of single heads, which are sharded over the ranks. While its own forward
    runs, the module finds its parameters as :func:`for_use` gives them.

    Args:
        path: of the module in the model, with which the logical names of its parameters begin.
        group: the ranks that have the parts of the input.
        in_parts: whether they have parts in the forward that runs; None for always.
        places: ranges of the first dimension of each parameter that this rank uses; all by default.

    Example:
        >>> from parallel_ext import ops
        >>> norm = nn.LayerNorm(3)
        >>> UsedInParts("model.norm", ops.ALONE).attach(norm, PartialGradients())
        >>> norm(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        path: str,
        group: Group,
        in_parts: Callable[[], bool] | None = None,
        places: Sequence[Range] = (),
    ) -> None:
        self.path, self.group, self.in_parts, self.places = path, group, in_parts, places
        self._module: nn.Module | None = None  # where another one's forward reads its parameters

    def attach(
        self, module: nn.Module, partials: PartialGradients, user: nn.Module | None = None
    ) -> None:
        """Let ``partials`` sum the gradients of ``module`` from now on.

        ``user`` is the module whose forward reads its parameters; ``module`` itself by default.
        """
        if user is not None:
            self._module = module
        (user or module).register_forward_pre_hook(self._before)
        (user or module).register_forward_hook(self._after, always_call=True)
        module.used_in_parts, module.partials = self, partials

    def names(self, module: nn.Module) -> list[str]:
        """Return the logical names of the parameters of ``module``."""
        return [f"{self.path}.{name}" for name, _ in module.named_parameters(recurse=False)]

    def _before(self, user: nn.Module, args: Any) -> None:
        if self.in_parts is not None and not self.in_parts():
            return
        module = self._module or user
        for attribute, own in module.named_parameters(recurse=False):
            name = f"{self.path}.{attribute}"  # what stands in the instance is found before it
            used = for_use(own, name, self.group, module.partials)
            if self.places:
                used = torch.cat([used[first:last] for first, last in self.places])
            vars(module)[attribute] = used

    def _after(self, user: nn.Module, *_: Any) -> None:
        module = self._module or user
        for attribute, _ in module.named_parameters(recurse=False):
            vars(module).pop(attribute, None)
