"""The embedding and the head of a model that FSDP has sharded, called by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from parallel_ext import _C
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.grad_sync import has_hooks
from parallel_ext.sharding._torch_private import (
    at_end_of_backward,
    gradient_hooks,
    own_parameters,
    running_backward,
)

T = TypeVar("T")


class CalledAlone:
    """Gathers the weights of the embedding and the head where they are called outside of the model.

    ``model(inputs_embeds=...)`` needs the embedding before the model, and a loss of a user's own
    may need the head after it. FSDP gathers their weights for the forward of the model, and reduces
    the gradients once it has that of ``inputs_embeds``, before the embedding's is there. So such a
    call gathers from the shards, and when the backward ends the mean of the dp ranks' gradients is
    added to those of the shards. All dp ranks make such calls, or none does.

    Args:
        model: after ``fully_shard``, whose root it is.
        ends: paths of the embedding and the head, perhaps of PEFT's modules around them.
        layers: path of the decoder layers, which FSDP serves inside of the model only.
        leaves: whether gradients are summed over leaves, in which these calls have no place.
    """

    def __init__(
        self, model: nn.Module, ends: Iterable[str], layers: str, mesh: Mesh, leaves: bool
    ) -> None:
        self._mesh, self._group = mesh, mesh.group_of_columns(mesh.tp_size)
        self._leaves, self._in_model = leaves, False
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)
        self._shards: dict[nn.Module, dict[str, nn.Parameter]] = {}
        modules = [each for path in ends for each in model.get_submodule(path).modules()]
        for module in modules:
            shards = {n: p for n, p in own_parameters(module).items() if hasattr(p, "to_local")}
            for each in (module, *getattr(module, "tied_heads", ())) if shards else ():
                self._shards[each] = shards
        self._read = {module: [module] for module in self._shards}
        for module in modules:
            if getattr(module, "reads_weights_inside", False):
                self._read[module] = [each for each in module.modules() if each in self._shards]
        for module in self._read:
            module.register_forward_pre_hook(self._gather)
            module.register_forward_hook(self._drop, always_call=True)
        for layer in list(model.get_submodule(layers))[:1]:
            layer.register_forward_pre_hook(self._check_in_model, prepend=True)

    def _enter(self, *_: Any) -> None:
        self._in_model = True

    def _leave(self, *_: Any) -> None:
        self._in_model = False

    def _check_in_model(self, *_: Any) -> None:
        # A layer that is recomputed has run in the model before.
        if not self._in_model and running_backward() == -1:
            raise RuntimeError(
                "the weights of the layers are sharded over the dp ranks until model(...) is "
                "called; after px.data_parallel call the model itself, not model.forward(...) or a "
                "part of it such as model.model(...)"
            )

    def _gather(self, module: nn.Module, args: Any) -> None:
        if self._in_model:
            return
        if self._leaves:
            raise NotImplementedError(
                "px.Invariant with several dp ranks does not serve a call of the embedding or the "
                "head outside of the model; give the model input_ids"
            )
        for each in self._read[module]:
            self._gather_own(each)

    def _gather_own(self, module: nn.Module) -> None:
        for attribute, shard in self._shards[module].items():
            if attribute in vars(module):  # gathered for the module around it
                continue
            if shard.requires_grad and any(gradient_hooks(shard)):
                raise has_hooks(f"a {attribute}, of a module called outside of the model,")
            own = shard.detach()
            whole = self._together("all_gather", own.to_local().nbytes, own.full_tensor)
            if shard.requires_grad and torch.is_grad_enabled():
                whole.requires_grad_(True)
                whole.register_post_accumulate_grad_hook(partial(self._arrived, shard))
            vars(module)[attribute] = whole  # what stands in the instance is found first

    def _drop(self, module: nn.Module, *_: Any) -> None:
        for each in self._read[module]:
            for attribute in self._shards[each]:
                vars(each).pop(attribute, None)

    def _arrived(self, shard: nn.Parameter, whole: torch.Tensor) -> None:
        # FSDP may still be adding to the gradient of the shard.
        at_end_of_backward(lambda: self._add(shard, whole))

    @torch.no_grad()
    def _add(self, shard: nn.Parameter, whole: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor, Partial

        if whole.grad is None:  # taken before, where one backward has arrived here twice
            return
        wide = torch.promote_types(whole.dtype, torch.float32)
        own, whole.grad = whole.grad.to(wide), None  # a graph that is retained brings another
        parts = DTensor.from_local(own, shard.device_mesh, [Partial()])
        total = self._together(
            "reduce_scatter", own.nbytes, lambda: parts.redistribute(placements=shard.placements)
        )
        total = (total / self._group.size).to(shard.dtype)
        if shard.grad is None:
            shard.grad = total
        else:
            shard.grad += total

    def _together(self, kind: str, nbytes: int, collective: Callable[[], T]) -> T:
        op_name = "a call of the embedding or the head outside of the model"
        with _C.ExchangeRange(kind, nbytes, self._group.size, self._group.name):
            return self._mesh.control.run_collective(self._group, op_name, collective)
