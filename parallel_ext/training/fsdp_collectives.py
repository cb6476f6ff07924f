"""The collectives that FSDP calls on a parallel model, in the place of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel_ext import _C
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.leaf_sums import LeafSums
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.nn.trained_parts import SUMS
from parallel_ext.ops import Group


def exchange_by(model: nn.Module, mesh: Mesh, sums: LeafSums | None) -> dict[str, int]:
    """Let FSDP's collectives name the ranks that are missing, and ``sums`` sum gradients.

    Returns:
        How often each has run, by what it does; it changes as they run.
    """
    from torch.distributed.fsdp import FSDPModule

    runs: dict[str, int] = {}
    for path, module in model.named_modules():
        name = path or type(module).__name__
        if isinstance(module, FSDPModule):
            of_experts = isinstance(module, ExpertParallelExperts)
            group = mesh.group_of_columns(mesh.ep_size if of_experts else mesh.tp_size)
            gathers = runs, f"gathers of the weights of {name}"
            gather = Collective(dist.all_gather_into_tensor, "all_gather", mesh, group, *gathers)
            module.set_custom_all_gather(gather)
            if sums is None:
                kind, counted = "reduce_scatter", (runs, f"{SUMS} {name}")
                reduce = Collective(dist.reduce_scatter_tensor, kind, mesh, group, *counted)
            else:
                module.set_gradient_divide_factor(1.0)
                reduce = (
                    _OwnRows()  # of experts, whose gradients are sums over the leaves before
                    if of_experts
                    else _SumOverLeaves(sums, dist.all_to_all_single, "all_to_all", mesh, group)
                )
            module.set_custom_reduce_scatter(reduce)
    return runs


class _Allocation:
    """Memory for what FSDP communicates."""

    def allocate(self, size: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)


class _OwnRows(_Allocation):
    """What stands for a reduce-scatter where each rank has the sums of its own rows before."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class Collective(_Allocation):
    """A collective as FSDP calls it, whose error names the ranks that are missing.

    Profilers see it like those of the ops.

    Args:
        runs: where it counts under ``name`` how often it runs, if anywhere.
    """

    def __init__(
        self,
        plain: Callable[..., dist.Work | None],
        kind: str,
        mesh: Mesh,
        group: Group,
        runs: dict[str, int] | None = None,
        name: str = "",
    ) -> None:
        self._plain, self._kind, self._mesh, self._group = plain, kind, mesh, group
        self._runs, self._name = runs, name
        if runs is not None:
            runs[name] = 0

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any
    ) -> dist.Work | None:
        group = self._group
        if self._runs is not None:
            self._runs[self._name] += 1
        with _C.ExchangeRange(self._kind, input_tensor.nbytes, group.size, group.name):
            return self._mesh.control.run_collective(
                group,
                "training with data_parallel",
                lambda: self._plain(output_tensor, input_tensor, **options),
            )


class _SumOverLeaves(Collective):
    """The exchange that stands for a reduce-scatter under ``px.Invariant``.

    Each rank gets its rows of the gradients of all dp ranks, unsummed.
    """

    def __init__(self, sums: LeafSums, *of_the_collective: Any) -> None:
        super().__init__(*of_the_collective)
        self._sums = sums

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        **options: Any,
    ) -> None:
        self._sums.check_running()
        received = torch.empty_like(input_tensor)
        super().__call__(received, input_tensor, group=group)
        self._sums.add(self, received.view(group.size(), -1), output_tensor)
