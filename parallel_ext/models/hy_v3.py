"""Hunyuan 3 (HY-V3): experts chosen by sigmoids, and norms of single heads."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import MLP, QWEN3
from parallel_ext.models.mixtral import MIXTRAL
from parallel_ext.nn.routing import Choose, Product

_SHARED = [f"{name}.weight" for name in (*MLP.inputs, *MLP.outputs)]


def _route(
    router: nn.Module,
    hidden_states: torch.Tensor,
    choose: Choose,
    product: Product,
    correction: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``HYV3TopKRouter`` does: the weights are scaled sigmoids, in fp32.

    A correction [E], which is not trained by gradients, is added where experts are chosen.
    """
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = product(hidden.float(), router.weight.float())
    scores = choose.sigmoid(logits)
    expert_ids = choose.best(scores + correction, router.top_k)
    weights = scores.gather(1, expert_ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, weights * router.router_scaling_factor, expert_ids


HY_V3 = replace(
    QWEN3,
    model_type="hy_v3",
    mixture=replace(
        MIXTRAL.mixture,
        router_class="HYV3TopKRouter",
        route=_route,
        experts_class="HYV3Experts",
        in_files="mlp",
        gate_up_in_files=("gate_proj", "up_proj"),
        down_in_files="down_proj",
        others_in_files={
            "gate.weight": "router.gate.weight",
            "e_score_correction_bias": "expert_bias",
            **{f"shared_experts.{name}": f"shared_mlp.{name}" for name in _SHARED},
        },
        shared=replace(MLP, name="shared_experts"),
        jitter=None,
        block_jitter=None,
        balances=False,
    ),
)
