"""Granite's mixtures of experts, with an expert that all tokens share or without one.

The experts of a layer lie in files as in memory, under other names.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import GRANITE
from parallel_ext.models.qwen_moe import QWEN3_MOE
from parallel_ext.models.sublayers import RegionNames
from parallel_ext.nn.routing import Choose, Product


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``GraniteMoeTopKRouter`` does: the weights are a softmax of the chosen logits."""
    logits = product(hidden_states, router.weight).float()
    weights, expert_ids = choose.by_softmax(logits, router.top_k, True)
    return logits, weights.type_as(hidden_states), expert_ids


GRANITE_MOE = replace(
    GRANITE,
    model_type="granitemoe",
    mlp=None,
    mixture=replace(
        QWEN3_MOE.mixture,
        name="block_sparse_moe",
        router="router",
        router_class="GraniteMoeTopKRouter",
        route=_route,
        experts_class="GraniteMoeExperts",
        num_experts="num_local_experts",
        in_files="block_sparse_moe",
        gate_up_in_files=None,
        down_in_files=None,
        others_in_files={
            "router.weight": "router.layer.weight",
            "experts.gate_up_proj": "input_linear.weight",
            "experts.down_proj": "output_linear.weight",
        },
    ),
    since="5.21",  # before it the router returned the same in another order
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    regions=(
        RegionNames(
            "model.layers.*.shared_mlp", inputs={"input_linear": 2}, outputs=("output_linear",)
        ),
    ),
    mixture=replace(
        GRANITE_MOE.mixture,
        router_class="GraniteMoeSharedTopKRouter",
        experts_class="GraniteMoeSharedExperts",
    ),
)
