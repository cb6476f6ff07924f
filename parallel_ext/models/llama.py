"""Llama, and the architectures whose modules have the names of Llama's.

Under ``model_type: llama`` there are SmolLM2, TinyLlama and more.
"""

from dataclasses import replace

from parallel_ext.models.spec import ModelSpec
from parallel_ext.models.sublayers import AttentionNames, RegionNames

ATTENTION = AttentionNames("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLP = RegionNames("mlp", inputs={"gate_proj": 1, "up_proj": 1}, outputs=("down_proj",))

LLAMA = ModelSpec(
    model_type="llama",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention=ATTENTION,
    mlp=MLP,
)

MISTRAL = replace(LLAMA, model_type="mistral")
QWEN2 = replace(LLAMA, model_type="qwen2")
QWEN3 = replace(
    LLAMA, model_type="qwen3", attention=replace(ATTENTION, head_norms=("q_norm", "k_norm"))
)
SMOLLM3 = replace(LLAMA, model_type="smollm3")
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    attention=replace(ATTENTION, query_norm="q_norm", key_norm="k_norm", norm_class="Olmo2RMSNorm"),
)
OLMO3 = replace(
    OLMO2, model_type="olmo3", attention=replace(OLMO2.attention, norm_class="Olmo3RMSNorm")
)
PHI3 = replace(
    LLAMA,
    model_type="phi3",
    attention=AttentionNames("self_attn", "qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
    mlp=RegionNames("mlp", inputs={"gate_up_proj": 2}, outputs=("down_proj",)),
)
GRANITE = replace(LLAMA, model_type="granite", logits_divisor="logits_scaling")
