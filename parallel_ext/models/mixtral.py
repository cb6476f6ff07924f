"""Mixtral, as transformers 5 holds it in memory: the experts of a layer in two fused tensors.

Files keep the names of the hub, one tensor for each matrix of each expert.
"""

import torch
from torch import nn

from parallel_ext.models.llama import ATTENTION
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.spec import ModelSpec
from parallel_ext.nn.routing import Choose, Product, in_fp32


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``MixtralTopKRouter`` does; a token's weights are in fp32 and have the sum 1."""
    logits = product(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    return logits, *choose.by_softmax(in_fp32(logits), router.top_k, True)


MIXTRAL = ModelSpec(
    model_type="mixtral",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention=ATTENTION,
    mixture=MixtureNames(
        name="mlp",
        router="gate",
        router_class="MixtralTopKRouter",
        route=_route,
        experts="experts",
        experts_class="MixtralExperts",
        gate_up="gate_up_proj",
        down="down_proj",
        num_experts="num_local_experts",
        in_files="block_sparse_moe",
        gate_up_in_files=("w1", "w3"),
        down_in_files="w2",
        jitter="router_jitter_noise",
        block_jitter="jitter_noise",
    ),
)
