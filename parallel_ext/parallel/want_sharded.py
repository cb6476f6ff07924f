"""Refuse a forward in which something else stands for a layer that px.parallelize has replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel_ext.nn.sharded_module import Mark, ShardedModule


class WantSharded:
    """Hooks of a module: refuse it where another layer, or forward, stands for one of its layers.

    Of a plain layer every rank computes all, and what is summed over the ranks is a multiple. Where
    the own forward of one that communicates did not run, ranks keep their parts of a sum.

    Args:
        path: of the module.
        layers: names in the module of those that ``px.parallelize`` has replaced.
        marks: by names of those of them that communicate.
    """

    def __init__(self, path: str, layers: Sequence[str], marks: Mapping[str, Mark]) -> None:
        self.path, self.layers, self.marks = path, layers, marks

    def attach(self, module: nn.Module) -> None:
        """Let every forward of ``module`` be watched."""
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple) -> None:
        """With gradients, raise if a layer was replaced; forget which have run."""
        for mark in self.marks.values():
            mark.is_set = False
        for name in self.layers if torch.is_grad_enabled() else ():
            if isinstance(getattr(module, name, None), ShardedModule):  # in a quarter of the time
                continue
            try:
                layer = module.get_submodule(name)
            except AttributeError:  # a forward of the user's own does without it
                continue
            if not any(isinstance(each, ShardedModule) for each in layer.modules()):
                raise RuntimeError(
                    f"{self.path}.{name} was replaced by a {type(layer).__name__}, but must be, or "
                    "hold, what px.parallelize has put there; model.load_state_dict changes its "
                    "values"
                )

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Raise unless the layers that communicate have run."""
        for name, mark in self.marks.items():
            if not mark.is_set:
                self._refuse(module, name)

    def _refuse(self, module: nn.Module, name: str) -> None:
        try:
            module.get_submodule(name)
        except AttributeError:  # a forward of the user's own does without it
            return
        raise RuntimeError(
            f"the forward that px.parallelize has given {self.path}.{name} did not run, without "
            "which each rank keeps its part of a sum; what stands in its place, or uses the "
            "weight, must call it; forward hooks change what a layer is given and returns"
        )
