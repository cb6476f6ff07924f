"""Notice dp ranks that train different parts of a model, whose gradients FSDP would mix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import nn

from parallel_ext import ops
from parallel_ext.distributed.errors import DisagreementError
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.sharding._torch_private import disable_compiler
from parallel_ext.sharding.slices import from_each_rank

SUMS = "sums of the gradients of"
"""How the names of collectives begin that sum gradients."""


class TrainedParts:
    """What a dp rank trains of a model, to be compared with the others where a loss is counted.

    FSDP matches the collectives of the dp ranks by their order, whatever modules they are of. What
    requires a gradient is compared before a backward; which modules have been summed, after it.

    Args:
        model: after ``fully_shard``.
        collectives: how often FSDP has run each since they were compared before, by what it does;
            the same keys on all ranks.
    """

    def __init__(self, model: nn.Module, collectives: dict[str, int]) -> None:
        self._model, self._collectives = model, collectives
        self._values: list[bool | int] = []

    @disable_compiler
    def number(self) -> int:
        """Return a number of 48 bits, which fp64 holds; collectives count from 0 afterwards."""
        self._values = [parameter.requires_grad for parameter in self._model.parameters()]
        self._values += self._collectives.values()
        self._collectives.update(dict.fromkeys(self._collectives, 0))
        return xxhash.xxh3_64_intdigest(repr(self._values).encode()) >> 16

    @disable_compiler
    def check(self, numbers: Sequence[float], mesh: Mesh) -> None:
        """Raise a DisagreementError on all dp ranks if their numbers differ; names the first."""
        if len(set(numbers)) == 1:
            return
        own = torch.tensor(self._values, dtype=torch.float64)
        sizes = [int(size) for size in from_each_rank(own.new_tensor(len(own)), mesh.dp)]
        of_ranks = ops.gather_from_region(own, sizes, mesh.dp).split(sizes)
        names = [f"requires_grad of {name}" for name, _ in self._model.named_parameters()]
        names += self._collectives
        differing = ["the number of parameters"]
        if len(set(sizes)) == 1:
            places = (torch.stack(of_ranks) != own).any(0).nonzero().flatten().tolist()
            differing = [f"{names[place]} ({self._of_each(place, of_ranks)})" for place in places]
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        done = "would be averaged with each other"
        if any(each.startswith(SUMS) for each in differing):
            done = "were averaged with each other: load the last checkpoint"
        raise DisagreementError(
            f"the loss: the dp ranks train different parts of the model: {differing[0]}{more}. "
            f"Gradients of different parts {done}; freeze, skip and leave out the same on all dp "
            "ranks, as by random numbers of one seed"
        )

    def _of_each(self, place: int, of_ranks: Sequence[torch.Tensor]) -> str:
        kind = type(self._values[place])
        values = (kind(values[place].item()) for values in of_ranks)
        return ", ".join(f"dp rank {rank}: {value}" for rank, value in enumerate(values))
