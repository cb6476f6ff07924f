"""Qwen3-MoE: heads that are normalised one by one, and layers that are dense or a mixture.

Files keep the names of the hub, one tensor for each matrix of each expert.
"""

from parallel_ext.models.blocks import AttentionNames, MixtureNames, RegionNames
from parallel_ext.models.table import ModelTable

QWEN3_MOE = ModelTable(
    model_type="qwen3_moe",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention=AttentionNames(
        name="self_attn",
        query="q_proj",
        key="k_proj",
        value="v_proj",
        output="o_proj",
        head_norms=("q_norm", "k_norm"),
    ),
    mlp=RegionNames("mlp", inputs={"gate_proj": 1, "up_proj": 1}, outputs=("down_proj",)),
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
