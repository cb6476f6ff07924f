"""AFMoE, as Arcee's Trinity: experts chosen by sigmoids, and attention whose output has a gate."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.hy_v3 import by_corrected_sigmoids
from parallel_ext.models.llama import MLP, QWEN3
from parallel_ext.models.qwen_moe import QWEN3_MOE
from parallel_ext.nn.routing import Choose, Product


def _route(
    router: nn.Module,
    hidden_states: torch.Tensor,
    choose: Choose,
    product: Product,
    correction: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``AfmoeTokenChoiceRouter`` does: the weights are scaled sigmoids, in fp32."""
    hidden = hidden_states.reshape(-1, hidden_states.size(-1))
    logits = product(hidden, router.gate.weight).float()
    weights, expert_ids = by_corrected_sigmoids(logits, correction, router.top_k, choose)
    return logits, weights * router.route_scale, expert_ids


AFMOE = replace(
    QWEN3,
    model_type="afmoe",
    attention=replace(QWEN3.attention, gate="gate_proj"),
    mixture=replace(
        QWEN3_MOE.mixture,
        router="router",
        router_class="AfmoeTokenChoiceRouter",
        route=_route,
        experts_class="AfmoeExperts",
        shared=replace(MLP, name="shared_experts"),
        balances=False,
    ),
)
