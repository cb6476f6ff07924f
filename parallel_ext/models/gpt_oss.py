"""GPT-OSS: attention sinks, which belong to heads, and experts with biases."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import ATTENTION
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.models.qwen_moe import QWEN3_MOE
from parallel_ext.nn.routing import Choose, Product


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``GptOssTopKRouter`` does: the weights are a softmax of the chosen logits."""
    logits = product(hidden_states, router.weight, router.bias)
    expert_ids = choose.best(logits, router.top_k)
    weights = logits.gather(1, expert_ids).softmax(dim=1, dtype=logits.dtype)
    return logits, weights, expert_ids


GPT_OSS = replace(
    MIXTRAL,
    model_type="gpt_oss",
    attention=replace(ATTENTION, of_heads=("sinks",)),
    mixture=replace(
        QWEN3_MOE.mixture,
        router="router",
        router_class="GptOssTopKRouter",
        route=_route,
        experts_class="GptOssExperts",
        biases=("gate_up_proj_bias", "down_proj_bias"),
        num_experts="num_local_experts",
        gate_up_in_files=None,
        down_in_files=None,
        fixed_bits=False,
    ),
)
