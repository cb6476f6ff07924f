"""Mixtral, as transformers 5 holds it in memory: the experts of a layer in two fused tensors.

Files keep the names of the hub, one tensor for each matrix of each expert.
"""

from parallel_ext.models.blocks import MixtureNames
from parallel_ext.models.llama import ATTENTION
from parallel_ext.models.spec import ModelSpec

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
        experts="experts",
        experts_class="MixtralExperts",
        gate_up="gate_up_proj",
        down="down_proj",
        num_experts="num_local_experts",
        in_files="block_sparse_moe",
        gate_up_in_files=("w1", "w3"),
        down_in_files="w2",
        jitter="router_jitter_noise",
    ),
)
