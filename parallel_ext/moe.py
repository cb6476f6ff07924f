"""The experts of a mixture, dealt to the ranks of an expert-parallel group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from parallel_ext import ops
from parallel_ext.layout import TensorLayout
from parallel_ext.ops import ExchangePlan, Group
from parallel_ext.sharded import ShardedModule


class ExpertParallelExperts(ShardedModule):
    """HuggingFace's fused experts (``MixtralExperts``) of which each rank holds some.

    Args:
        gate_up_proj: [e, 2 I, H], of this rank's e experts; gate before up.
        down_proj: [e, H, I].
        layouts: of ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I], cut along dimension 0
            into one range a rank, which may be empty.
        act_fn: between the two.
        group: the expert-parallel group; each of its ranks brings tokens of its own.

    Called with ``hidden_states`` [T, H], ``top_k_index`` [T, top_k] (int64) and ``top_k_weights``
    [T, top_k], all of this rank's own tokens, it returns [T, H] for them. T may differ between
    ranks and be 0. Every call takes one gather of counts and two exchanges of rows in forward, two
    exchanges in backward. A gradient of an expert is the sum over the tokens of all ranks of the
    group, zeros for an expert without tokens.
    """

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        layouts: dict[str, TensorLayout],
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        group: Group,
    ) -> None:
        super().__init__(layouts, group)
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up_proj, down_proj, act_fn
        layout = layouts["gate_up_proj"]
        self.num_experts = layout.shape[0]
        ranges = [layout.ranges(rank)[0] for rank in range(layout.period)]
        self.experts_per_rank = [stop - start for start, stop in ranges]
        self.expert_range = ranges[group.rank]

    def _exchange_plan(self, counts: torch.Tensor) -> ExchangePlan:
        """Every rank's counts, read by the host once."""
        size = self.group.size
        everyone = ops.gather_from_tp(counts.unsqueeze(0), [self.num_experts] * size, self.group)
        of_rank = everyone.view(size, self.num_experts).tolist()
        start, stop = self.expert_range
        received = [count for counts in of_rank for count in counts[start:stop]]
        return ExchangePlan(of_rank[self.group.rank], received, self.experts_per_rank)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        route = ops.moe_route_plan(top_k_index, self.num_experts)
        plan = self._exchange_plan(route.counts)
        rows = ops.moe_dispatch(hidden_states, route.slots)
        rows = ops.moe_exchange(rows, plan, group=self.group)
        counts = plan.rows_per_expert(self.group.rank)
        gate, up = ops.moe_linear(rows, self.gate_up_proj, counts).chunk(2, dim=-1)
        rows = ops.moe_linear(self.act_fn(gate) * up, self.down_proj, counts)
        rows = ops.moe_exchange(rows, plan, back=True, group=self.group)
        return ops.moe_combine(rows, route.slots, top_k_weights)
