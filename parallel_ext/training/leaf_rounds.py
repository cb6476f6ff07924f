"""Leaves in rounds: in each every dp rank runs one leaf, so that FSDP's collectives meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from parallel_ext.parallel.state import ParallelState
from parallel_ext.sharding.named_shards import to_shards
from parallel_ext.sharding.slices import from_each_rank
from parallel_ext.training.fsdp_collectives import Collective
from parallel_ext.training.leaf_loop import LeafLoop, push_sums, wide


def check_batches_of_step(name: str, state: ParallelState, accumulated: int) -> None:
    """Raise a ValueError unless the batches of each step are the leaves of the ``px.Invariant``.

    ``accumulated`` are the batches of a dp rank in a step; ``name`` says for errors what trains.
    """
    leaves, dp = state.invariant.leaves, state.mesh.dp_size
    if accumulated * dp != leaves:
        raise ValueError(
            f"{name}: under px.Invariant(leaves={leaves}) a step is {leaves} batches of dp ranks, "
            f"but gradient_accumulation_steps={accumulated} times dp={dp} is another number; "
            "choose leaves as their product, on all layouts that are compared"
        )


class LeafRounds(LeafLoop):
    """The leaves of one global batch, of which neighbours run at the same time.

    All dp ranks run equally many: one that has none in the last round is given the last leaf as
    well, of which nothing counts. What FSDP shards is summed by
    :class:`parallel_ext.nn.leaf_sums.LeafSums`, that of experts before FSDP gets it; loss and other
    gradients are exchanged after each round.
    """

    def __init__(self, model: nn.Module, state: ParallelState, rows: int) -> None:
        to_shards(model)
        super().__init__(model, state, rows)
        self._gathered = [*self._others, *self._whole_shared]
        self._totals: list[torch.Tensor] = []  # of what is sharded, after the last round

    def _leaves_of_rounds(self) -> Sequence[tuple[int, bool]]:
        mesh, count = self._state.mesh, len(self._ranges)
        leaves = range(mesh.dp_rank, count + mesh.dp_rank, mesh.dp_size)
        return [(min(leaf, count - 1), leaf < count) for leaf in leaves]

    def _begin_round(self, number: int) -> None:
        if self._state.leaf_sums is not None:
            first = number * self._state.mesh.dp_size
            self._state.leaf_sums.begin_round(first, len(self._ranges))

    def _end_round(self, number: int, loss: torch.Tensor) -> None:
        self._totals = self._take_gradients(self._sharded)
        mesh, count = self._state.mesh, len(self._ranges)
        of_ranks: list[list[torch.Tensor]] = [[] for _ in range(mesh.dp_size)]
        alone = [([value], mesh.dp) for value in (loss, *self._take_gradients(self._others))]
        for values, group in (*alone, *((values, mesh.edp) for values in self._take_apart())):
            mine = torch.cat([value.reshape(-1) for value in values])
            gathered = from_each_rank(mine.to(wide(mine.dtype)), group)
            for of_rank, each in zip(of_ranks, gathered.view(mesh.dp_size, -1), strict=True):
                of_rank.append(each.clone().view(values[0].shape))
        for leaf, values in enumerate(of_ranks, number * mesh.dp_size):
            if leaf < count:
                push_sums(self._nodes, (leaf, 1, values), count)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        of_fsdp, sums = self._state.fsdp_gradients, self._state.leaf_sums
        experts = [] if sums is None else self._all_experts
        for module in experts:
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    module.take_gradients[name] = partial(self._sum_experts, (module, name))
        try:
            # Gradients that FSDP holds back are put aside under px.no_sync, too.
            with super()._aside(), nullcontext() if of_fsdp is None else of_fsdp.aside():
                yield
        finally:
            for module in experts:
                module.take_gradients = {}
            if sums is not None:
                sums.reset()

    def _sum_experts(self, key: object, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum the gradients of experts over the leaves, in the last round.

        Args:
            gradients: of this rank's experts, for the leaf of each dp rank that meets here.

        Returns:
            The gradient to hand to FSDP, of which the rows count that it gives to this rank.
        """
        mesh, sums = self._state.mesh, self._state.leaf_sums
        sums.check_running()
        per_rank = -(-len(gradients[0]) // mesh.edp_size)  # FSDP's rule
        shape = (mesh.edp_size, len(gradients), per_rank, gradients[0][0].numel())
        sent = gradients[0].new_zeros(shape, dtype=wide(gradients[0].dtype))
        for place, gradient in enumerate(gradients):
            for rows, part in zip(sent, gradient.split(per_rank), strict=False):
                rows[place, : len(part)] = part.flatten(1)
        received = sent
        if mesh.edp_size > 1:
            received, group = torch.empty_like(sent), mesh.process_group(mesh.edp)
            exchange = Collective(dist.all_to_all_single, "all_to_all", mesh, mesh.edp)
            exchange(received, sent, group=group)
        # With fewer ep than tp ranks, several tp ranks have computed each leaf.
        copies = max(1, mesh.tp_size // mesh.ep_size)
        own = torch.empty_like(received[0, 0])
        sums.add(key, received.flatten(0, 1)[::copies], own)
        total = torch.zeros_like(gradients[0])
        rows = total.split(per_rank)[mesh.edp_rank : mesh.edp_rank + 1]
        for part in rows:  # none where there are fewer experts than ranks
            part.copy_(own[: len(part)].view(part.shape))
        return total

    def _sums(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        ((_, _, (self.loss, *others)),) = self._nodes
        yield from zip(self._sharded, self._totals, strict=True)
        yield from zip(self._gathered, others, strict=True)
