"""Qwen3-MoE: heads that are normalised one by one, and layers that are dense or a mixture.

Files keep the names of the hub, one tensor for each matrix of each expert.
"""

from dataclasses import replace

from parallel_ext.models.blocks import MixtureNames
from parallel_ext.models.llama import ATTENTION, MLP
from parallel_ext.models.spec import ModelSpec

QWEN3_MOE = ModelSpec(
    model_type="qwen3_moe",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention=replace(ATTENTION, head_norms=("q_norm", "k_norm")),
    mlp=MLP,
    mixture=MixtureNames(
        name="mlp",
        router="gate",
        router_class="Qwen3MoeTopKRouter",
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
