"""Qwen3.5 and Qwen3-Next: gated delta rules in most layers, gated attentions in the others.

Qwen3-VL has the mixture of Qwen3.5 in the layers of Qwen3.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import QWEN3
from parallel_ext.models.qwen2_moe import QWEN2_MOE
from parallel_ext.models.qwen3_moe import QWEN3_MOE
from parallel_ext.models.sublayers import DeltaNetNames
from parallel_ext.nn.routing import Choose, Product, in_fp32


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Qwen3_5MoeTopKRouter`` does; a token's weights have the sum 1."""
    logits = product(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    weights, expert_ids = choose.by_softmax(in_fp32(logits), router.top_k, True)
    return logits, weights.to(logits.dtype), expert_ids


QWEN3_5_TEXT = replace(
    QWEN3,
    model_type="qwen3_5_text",
    attention=replace(QWEN3.attention, gated=True),
    delta_net=DeltaNetNames(
        name="linear_attn",
        joined="in_proj_qkv",
        inputs=("in_proj_z", "in_proj_b", "in_proj_a"),
        output="out_proj",
        convolution="conv1d",
        norm="norm",
        of_heads=("A_log", "dt_bias"),
        heads="num_k_heads",
        widths=("num_v_heads", "key_dim", "value_dim"),
    ),
    in_image_files="model.language_model",
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    mixture=replace(
        QWEN2_MOE.mixture,
        router_class="Qwen3_5MoeTopKRouter",
        route=_route,
        experts_class="Qwen3_5MoeExperts",
    ),
)
QWEN3_VL_MOE_TEXT = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    mixture=replace(
        QWEN3_MOE.mixture,
        router_class="Qwen3VLMoeTextTopKRouter",
        route=_route,
        experts_class="Qwen3VLMoeTextExperts",
        gate_up_in_files=None,
        down_in_files=None,
        transposed_in_files=True,
    ),
)
QWEN3_NEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_next",
    in_image_files=None,
    delta_net=replace(QWEN3_5_TEXT.delta_net, joined=None, inputs=("in_proj_qkvz", "in_proj_ba")),
    mixture=replace(
        QWEN2_MOE.mixture, router_class="Qwen3NextTopKRouter", experts_class="Qwen3NextExperts"
    ),
)
