"""Hunyuan's mixtures of experts: A13B, and Hunyuan 3 (HY-V3), whose experts sigmoids choose."""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import HUNYUAN, MLP, QWEN3
from parallel_ext.models.qwen_moe import QWEN3_MOE
from parallel_ext.nn.routing import Choose, Product, in_fp32

_SHARED = [f"{name}.weight" for name in (*MLP.inputs, *MLP.outputs)]


def by_corrected_sigmoids(
    logits: torch.Tensor, correction: torch.Tensor, top_k: int, choose: Choose
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids [T, top_k]: sigmoids of logits [T, E], to the sum 1.

    A correction [E], which is not trained by gradients, is added where experts are chosen.
    """
    scores = choose.sigmoid(logits)
    expert_ids = choose.best(scores + correction, top_k)
    weights = scores.gather(1, expert_ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20), expert_ids


def _route(
    router: nn.Module,
    hidden_states: torch.Tensor,
    choose: Choose,
    product: Product,
    correction: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``HYV3TopKRouter`` does: the weights are scaled sigmoids, in fp32."""
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = product(hidden.float(), router.weight.float())
    weights, expert_ids = by_corrected_sigmoids(logits, correction, router.top_k, choose)
    return logits, weights * router.router_scaling_factor, expert_ids


def _route_v1(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``HunYuanMoEV1Gate`` does; a token's weights have the dtype of its logits."""
    weight = router.wg.weight
    hidden = hidden_states.reshape(-1, hidden_states.size(-1))
    logits = product(hidden.float() if weight.dtype == torch.float32 else hidden, weight)
    weights, expert_ids = choose.by_softmax(in_fp32(logits), router.top_k, True)
    return logits, weights.to(logits.dtype), expert_ids


HUNYUAN_MOE = replace(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    mlp=None,
    mixture=replace(
        QWEN3_MOE.mixture,
        router_class="HunYuanMoEV1Gate",
        route=_route_v1,
        experts_class="HunYuanMoEV1Experts",
        num_experts="num_local_experts",
        shared=replace(MLP, name="shared_mlp"),
        balances=False,
    ),
)
HY_V3 = replace(
    QWEN3,
    model_type="hy_v3",
    mixture=replace(
        QWEN3_MOE.mixture,
        router_class="HYV3TopKRouter",
        route=_route,
        experts_class="HYV3Experts",
        num_experts="num_local_experts",
        others_in_files={
            "gate.weight": "router.gate.weight",
            "e_score_correction_bias": "expert_bias",
            **{f"shared_experts.{name}": f"shared_mlp.{name}" for name in _SHARED},
        },
        shared=replace(MLP, name="shared_experts"),
        balances=False,
    ),
)
