"""ERNIE 4.5 with experts, chosen by a softmax and a correction of it."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import MLP
from parallel_ext.models.qwen_moe import QWEN2_MOE
from parallel_ext.nn.routing import Choose, Product


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Ernie4_5_MoeTopKRouter`` does, in fp32 under autocast too."""
    hidden = hidden_states.reshape(-1, hidden_states.size(-1))
    device = "cpu" if hidden.is_meta else hidden.device.type  # which has no autocast
    with torch.autocast(device, enabled=False):
        logits = product(hidden.float(), router.weight.float())
        scores = choose.softmax(logits)
        expert_ids = choose.best(router.moe_statics(scores), router.top_k)
        weights = scores.gather(1, expert_ids)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)
    return logits, weights.to(hidden.dtype), expert_ids


ERNIE4_5_MOE = replace(
    QWEN2_MOE,
    model_type="ernie4_5_moe",
    mixture=replace(
        QWEN2_MOE.mixture,
        router_class="Ernie4_5_MoeTopKRouter",
        route=_route,
        experts_class="Ernie4_5_MoeExperts",
        shared=replace(MLP, name="shared_experts"),
        shared_gate=None,
        others_in_files={
            "gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction_bias"
        },
    ),
)
