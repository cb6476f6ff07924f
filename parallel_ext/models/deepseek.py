"""DeepSeek-V2 and V3: experts chosen within groups, and attention through low ranks.

GLM-4.5 and dots.llm1 have the mixture of V3, GLM-4.7-Flash all of it. Kimi K2 and Moonlight are
such models too.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import LLAMA, MLP, QWEN3
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.models.qwen_moe import QWEN3_MOE
from parallel_ext.models.sublayers import RegionNames
from parallel_ext.nn.routing import Choose, Product, highest


def _within_groups(scores: torch.Tensor, of_groups: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return which experts [T, E] are in the ``top_k`` best groups, of which scores are [T, G]."""
    best = torch.zeros_like(of_groups, dtype=torch.bool)
    best.scatter_(1, highest(of_groups, top_k), True)
    return best.repeat_interleave(scores.size(1) // of_groups.size(1), dim=1)


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``DeepseekV3TopkRouter`` does: the weights are the sigmoids of the logits, in fp32.

    A correction, which is not trained by gradients, is added where experts are chosen. A group has
    the score of its two best.
    """
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = product(hidden.float(), router.weight.float())
    scores = choose.sigmoid(logits)
    corrected = (scores + router.e_score_correction_bias).detach()
    grouped = corrected.unflatten(1, (router.num_group, -1))
    of_groups = grouped.topk(2, dim=-1)[0].sum(-1)
    allowed = _within_groups(corrected, of_groups, router.topk_group)
    expert_ids = choose.best(corrected.masked_fill(~allowed, -torch.inf), router.top_k)
    weights = scores.gather(1, expert_ids)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return logits, weights * router.routed_scaling_factor, expert_ids


def _route_v2(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``DeepseekV2TopkRouter`` does, in fp32; a group has the score of its best expert."""
    hidden = hidden_states.reshape(-1, router.hidden_dim)
    logits = product(hidden.float(), router.weight.float())
    scores = choose.softmax(logits)
    if router.topk_method == "group_limited_greedy":
        of_groups = scores.detach().unflatten(1, (router.num_group, -1)).amax(-1)
        allowed = _within_groups(scores, of_groups, router.topk_group)
        scores = scores.masked_fill(~allowed, 0.0)
    expert_ids = choose.best(scores, router.top_k)
    return logits, scores.gather(1, expert_ids) * router.routed_scaling_factor, expert_ids


_MIXTURE = replace(
    QWEN3_MOE.mixture,
    route=_route,
    num_experts="num_local_experts",
    shared=replace(MLP, name="shared_experts"),
    balances=False,
)


def _mixture(prefix: str) -> MixtureNames:
    return replace(_MIXTURE, router_class=f"{prefix}TopkRouter", experts_class=f"{prefix}Experts")


_LOW_RANK_KEYS = RegionNames(
    "model.layers.*.self_attn",
    inputs={"q_proj": 1, "kv_b_proj": 1},
    outputs=("o_proj",),
    heads="num_heads",
    in_parts=("kv_a_proj_with_mqa", "kv_a_layernorm"),
)
LATENT_ATTENTION = (
    _LOW_RANK_KEYS,
    replace(
        _LOW_RANK_KEYS,
        inputs={"q_b_proj": 1, "kv_b_proj": 1},
        in_parts=("q_a_proj", "q_a_layernorm", *_LOW_RANK_KEYS.in_parts),
    ),
)
"""Attention whose keys and values, and in the second whose queries too, come from a low rank."""

GLM4_MOE = replace(QWEN3, model_type="glm4_moe", mixture=_mixture("Glm4Moe"))
GLM4V_MOE_TEXT = replace(
    LLAMA,
    model_type="glm4v_moe_text",
    mixture=replace(_mixture("Glm4vMoeText"), balances=True),
)
DOTS1 = replace(QWEN3, model_type="dots1", mixture=_mixture("Dots1"))
SOLAR_OPEN = replace(LLAMA, model_type="solar_open", mixture=_mixture("SolarOpen"))
EXAONE_MOE = replace(
    QWEN3,
    model_type="exaone_moe",
    mixture=replace(
        _mixture("ExaoneMoe"),
        num_experts="num_experts",
        others_in_files={"gate.e_score_correction_bias": "e_score_correction_bias"},
    ),
)
YOUTU = replace(LLAMA, model_type="youtu", attention=None, regions=LATENT_ATTENTION)
MINICPM3 = replace(YOUTU, model_type="minicpm3", scaled_embedding="MiniCPM3ScaledWordEmbedding")
DEEPSEEK_V3 = replace(YOUTU, model_type="deepseek_v3", mixture=_mixture("DeepseekV3"))
GLM4_MOE_LITE = replace(DEEPSEEK_V3, model_type="glm4_moe_lite", mixture=_mixture("Glm4MoeLite"))
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    mixture=replace(_mixture("DeepseekV2"), route=_route_v2, num_experts="num_experts"),
)
DEEPSEEK = (
    *(DEEPSEEK_V2, DEEPSEEK_V3, DOTS1, GLM4_MOE, GLM4_MOE_LITE, GLM4V_MOE_TEXT),
    *(EXAONE_MOE, MINICPM3, SOLAR_OPEN, YOUTU),
)
