"""Qwen3-MoE: heads that are normalised one by one, and layers that are dense or a mixture.

OLMoE has the same mixture, in all layers; Qwen2-MoE beside an expert that all tokens share.

Files keep the names of the hub, one tensor for each matrix of each expert.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import ATTENTION, MLP, OLMO2, QWEN3
from parallel_ext.models.sublayers import MixtureNames
from parallel_ext.nn.routing import Choose, Product, in_fp32


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Qwen3MoeTopKRouter`` does; a token's weights have the dtype of its logits.

    Where a router does not say whether they have the sum 1, as that of Qwen3.5, they have.
    """
    logits = product(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    normalized = getattr(router, "norm_topk_prob", True)
    weights, expert_ids = choose.by_softmax(in_fp32(logits), router.top_k, normalized)
    return logits, weights.to(logits.dtype), expert_ids


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    mixture=MixtureNames(
        name="mlp",
        router="gate",
        router_class="Qwen3MoeTopKRouter",
        route=_route,
        experts="experts",
        experts_class="Qwen3MoeExperts",
        gate_up="gate_up_proj",
        down="down_proj",
        num_experts="num_experts",
        in_files="mlp",
        gate_up_in_files=("gate_proj", "up_proj"),
        down_in_files="down_proj",
    ),
)
OLMOE = replace(
    QWEN3_MOE,
    model_type="olmoe",
    attention=replace(OLMO2.attention, norm_class="OlmoeRMSNorm"),
    mixture=replace(
        QWEN3_MOE.mixture, router_class="OlmoeTopKRouter", experts_class="OlmoeExperts"
    ),
)
FLEX_OLMO = replace(
    OLMOE,
    model_type="flex_olmo",
    attention=replace(OLMO2.attention, norm_class="FlexOlmoRMSNorm"),
    mixture=replace(
        QWEN3_MOE.mixture, router_class="FlexOlmoTopKRouter", experts_class="FlexOlmoExperts"
    ),
)
MELLUM = replace(
    QWEN3_MOE,
    model_type="mellum",
    mixture=replace(
        QWEN3_MOE.mixture, router_class="MellumTopKRouter", experts_class="MellumExperts"
    ),
)
QWEN2_MOE = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    attention=ATTENTION,
    mixture=replace(
        QWEN3_MOE.mixture,
        router_class="Qwen2MoeTopKRouter",
        experts_class="Qwen2MoeExperts",
        shared=replace(MLP, name="shared_expert"),
        shared_gate="shared_expert_gate",
    ),
)

QWEN_MOE = (QWEN2_MOE, QWEN3_MOE, OLMOE, FLEX_OLMO, MELLUM)
