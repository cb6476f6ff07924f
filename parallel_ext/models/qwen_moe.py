"""Qwen3-MoE: heads that are normalised one by one, and layers that are dense or a mixture.

OLMoE has the same mixture, in all layers; Qwen2-MoE beside an expert that all tokens share.

Files keep the names of the hub, one tensor for each matrix of each expert.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import ATTENTION, MLP, OLMO2, QWEN3
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.nn.routing import Choose, Product, in_fp32


def _weighed(
    router: nn.Module,
    hidden_states: torch.Tensor,
    choose: Choose,
    product: Product,
    normalized: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose by a softmax; a token's weights have the dtype of its logits."""
    logits = product(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    weights, expert_ids = choose.by_softmax(in_fp32(logits), router.top_k, normalized)
    return logits, weights.to(logits.dtype), expert_ids


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Qwen3MoeTopKRouter`` does, which says whether the weights have the sum 1."""
    return _weighed(router, hidden_states, choose, product, router.norm_topk_prob)


def route_with_sum_1(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Qwen3_5MoeTopKRouter`` does; a token's weights have the sum 1."""
    return _weighed(router, hidden_states, choose, product, True)


def of_classes(mixture: MixtureNames, prefix: str) -> MixtureNames:
    """Return a mixture whose router and experts have classes with names that begin so."""
    return replace(mixture, router_class=f"{prefix}TopKRouter", experts_class=f"{prefix}Experts")


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
    mixture=of_classes(QWEN3_MOE.mixture, "Olmoe"),
)
FLEX_OLMO = replace(
    OLMOE,
    model_type="flex_olmo",
    attention=replace(OLMO2.attention, norm_class="FlexOlmoRMSNorm"),
    mixture=of_classes(QWEN3_MOE.mixture, "FlexOlmo"),
)
MELLUM = replace(QWEN3_MOE, model_type="mellum", mixture=of_classes(QWEN3_MOE.mixture, "Mellum"))
QWEN2_MOE = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    attention=ATTENTION,
    mixture=replace(
        of_classes(QWEN3_MOE.mixture, "Qwen2Moe"),
        shared=replace(MLP, name="shared_expert"),
        shared_gate="shared_expert_gate",
    ),
)

QWEN_MOE = (QWEN2_MOE, QWEN3_MOE, OLMOE, FLEX_OLMO, MELLUM)
