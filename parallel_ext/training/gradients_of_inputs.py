"""Inputs of a model that FSDP has sharded, whose backward every dp rank runs, or none does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.parallel.arguments import arguments_of
from parallel_ext.sharding._torch_private import disable_compiler, tree_leaves
from parallel_ext.sharding.slices import from_each_rank


def on_any_rank(mesh: Mesh, *flags: bool) -> tuple[bool, ...]:
    """Return for each flag whether a dp rank has set it, by one all-gather over dp."""
    own = torch.tensor(flags, dtype=torch.float32, device=mesh.device)
    return tuple((from_each_rank(own, mesh.dp).sum(0) > 0).tolist())


class GradientsOfInputs:
    """A forward pre-hook that lets the inputs of all dp ranks require a gradient where one's do.

    A projector in front of a frozen model is reached by the rows with an image alone. A dp rank
    without one would have no backward, or one that ends before layers which FSDP gathers on the
    others. So its rows of the embedding take a gradient, which nobody reads.

    Where the embedding is trained the inputs of all ranks require one anyway. With nothing trained
    beside the model those of none do. Both are equal on all ranks, and nothing is sent then.
    """

    def __init__(self, embedding: nn.Module, sums: PartialGradients, mesh: Mesh) -> None:
        self._embedding, self._sums, self._mesh = embedding, sums, mesh

    @disable_compiler
    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the inputs of the forward, or None where they stay as they are."""
        trained = any(parameter.requires_grad for parameter in self._embedding.parameters())
        if trained or not self._sums.train_beside() or not torch.is_grad_enabled():
            return None
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        (anywhere,) = on_any_rank(self._mesh, any(each.requires_grad for each in tensors))
        arguments = arguments_of(model, "forward", args, kwargs)
        embeds = arguments.get("inputs_embeds")
        if not anywhere or (embeds is not None and embeds.requires_grad):
            return None
        if embeds is not None:
            return (), {**arguments, "inputs_embeds": embeds.detach().requires_grad_()}

        def reach(embedding: nn.Module, inputs: Any, rows: torch.Tensor) -> None:
            rows.requires_grad_()
            once.remove()

        once = self._embedding.register_forward_hook(reach)
        return None
