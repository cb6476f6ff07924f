"""DeepSeek-V2: the attention of DeepSeek-V3, and experts chosen by a softmax within groups."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.deepseek_v3 import DEEPSEEK_V3, within_groups
from parallel_ext.nn.routing import Choose, Product


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``DeepseekV2TopkRouter`` does, in fp32; a group has the score of its best expert."""
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = product(hidden.float(), router.weight.float())
    scores = choose.softmax(logits)
    if router.topk_method == "group_limited_greedy":
        of_groups = scores.detach().unflatten(1, (router.num_group, -1)).amax(-1)
        allowed = within_groups(scores, of_groups, router.topk_group)
        scores = scores.masked_fill(~allowed, 0.0)
    expert_ids = choose.best(scores, router.top_k)
    return logits, scores.gather(1, expert_ids) * router.routed_scaling_factor, expert_ids


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    mixture=replace(
        DEEPSEEK_V3.mixture,
        router_class="DeepseekV2TopkRouter",
        route=_route,
        experts_class="DeepseekV2Experts",
        num_experts="num_experts",
    ),
)
