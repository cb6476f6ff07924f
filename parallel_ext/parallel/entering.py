"""Where hidden states enter the parallel parts of a model, and where they leave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.sublayers import DeltaNetNames, RegionNames
from parallel_ext.nn.fused_loss import is_of_others
from parallel_ext.nn.linear import ComputingHook, can_be_computed_together
from parallel_ext.nn.region import ChangeOutput, entered
from parallel_ext.ops import Group
from parallel_ext.parallel.plan import Plan
from parallel_ext.sharding._torch_private import input_hooks, output_hooks


class CopyInput(ComputingHook):
    """A forward pre-hook: the hidden states enter a tensor-parallel region here.

    Where one op can stand for the calls of the layers that read them, it computes these here: its
    backward sums the gradient of the hidden states while it computes those of the weights. What
    else reads the hidden states, or reads others, is as without it.

    Where hooks of others are given what the module is called with, as an adapter beside it that is
    a forward hook, or see its gradient, the hidden states enter at the layers: what is read in
    front of these has the same gradient on all ranks.

    Args:
        layers: names in the module of those that read its input, in the order of their calls.
    """

    together = True  # unless something forbids it that cannot be seen here

    def __init__(self, group: Group, layers: Sequence[str] = ()) -> None:
        super().__init__(layers)
        self.group = group
        self._known: Callable[..., Any] | None = None
        self._at_layers: list[Any] = []  # handles of hooks, in one forward

    def attach(self, module: nn.Module) -> None:
        super().attach(module)
        forward: Any = type(module).forward
        if getattr(forward, "__globals__", {}).get("__name__", "").startswith("transformers."):
            self._known = forward  # it calls each layer once, on what it is given

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not (hidden.requires_grad and torch.is_grad_enabled()):
            return args, kwargs
        alone = len(self.layers) > 0 and self._is_followed_by_its_forward(module)
        if alone and any(map(is_of_others, output_hooks(module))):
            enter = partial(_enter_layer, [], self.group)
            layers = (module.get_submodule(name) for name in self.layers)
            self._at_layers = [each.register_forward_pre_hook(enter) for each in layers]
            return args, kwargs
        readers = self._readers(module) if alone else []
        inside = entered(hidden, self.group, unchanged=len(readers) > 0)
        if self.together and can_be_computed_together(readers, hidden):
            weights, biases = zip(*(layer.for_use() for layer in readers), strict=True)
            products = ops.column_linears(hidden, weights, biases, group=self.group)
            self.serve(readers, inside, products)
        if args:
            return (inside, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": inside}

    def _drop(self, *args: Any) -> None:
        super()._drop(*args)
        while self._at_layers:
            self._at_layers.pop().remove()

    def _readers(self, module: nn.Module) -> list[nn.Module]:
        """Return the layers, if no hook can change what they read."""
        layers = [module.get_submodule(name) for name in self.layers]
        return [] if any(input_hooks(each) or output_hooks(each) for each in layers) else layers

    def _is_followed_by_its_forward(self, module: nn.Module) -> bool:
        """Return whether nothing changes what the layers read, nor the way in which they do.

        Such as a hook behind this one, or a forward put in the place of the model's own, which may
        recompute layers, detach what they return, or call only some.
        """
        own = "forward" not in vars(module) and type(module).forward is self._known
        return own and input_hooks(module)[-1] is self


def _enter_layer(
    entered_before: list[torch.Tensor], group: Group, layer: nn.Module, args: tuple
) -> tuple:
    """A forward pre-hook of one of several layers: their input enters a region, once for all."""
    if not entered_before or entered_before[0] is not args[0]:
        entered_before[:] = args[0], entered(args[0], group)  # the input, and what it became
    return (entered_before[1], *args[1:])


def enter_and_leave(model: nn.Module, plan: Plan) -> None:
    """Let hidden states enter the parallel parts, and leave them where these do not sum.

    Beside the decoder layers alone, where these keep own tokens between their parts.
    """
    spec, tp = plan.spec, plan.mesh.tp
    if tp.size == 1:
        return
    sum_output = ChangeOutput(partial(ops.reduce_from_region, group=tp))
    copy_output = ChangeOutput(partial(entered, group=tp))
    for path in spec.shared:
        model.get_submodule(path).register_forward_hook(copy_output)
    for path, sublayer in spec.sublayers(plan.layout).items():
        # A mixture takes its slice of the tokens itself; its router sees all on every rank.
        own = plan.sequence_parallel and path.startswith(f"{spec.layers}.")
        if own or isinstance(sublayer, MixtureNames):
            continue
        module = model.get_submodule(path)
        if isinstance(sublayer, RegionNames) and sublayer.entry is not None:
            module.get_submodule(sublayer.entry).register_forward_hook(copy_output)
        else:
            # The layers of a region may read other inputs.
            has_others = sublayer in spec.regions or isinstance(sublayer, DeltaNetNames)
            readers = () if has_others else sublayer.inputs
            CopyInput(tp, tuple(readers)).attach(module)
        if isinstance(sublayer, RegionNames) and sublayer.merges:
            module.register_forward_hook(sum_output)
