"""Qwen2-MoE: experts beside one that all tokens share, which is sharded as an MLP."""

from dataclasses import replace

from parallel_ext.models.llama import ATTENTION, MLP
from parallel_ext.models.qwen3_moe import QWEN3_MOE

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
