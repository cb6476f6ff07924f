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

# All that such a model does besides, as windows, biases and layers without rotary embedding, its
# class does by its configuration.
AS_LLAMA = tuple(
    replace(LLAMA, model_type=name)
    for name in (
        *("mistral", "ministral", "ministral3", "qwen2", "smollm3", "olmo", "helium"),
        *("seed_oss", "ernie4_5", "qwen2_vl_text", "qwen2_5_vl_text"),
        *("internlm3", "iquestcoder", "cwm"),
    )
)
QWEN3 = replace(
    LLAMA, model_type="qwen3", attention=replace(ATTENTION, head_norms=("q_norm", "k_norm"))
)
QWEN3_VL_TEXT = replace(QWEN3, model_type="qwen3_vl_text")
EXAONE4 = replace(QWEN3, model_type="exaone4")
HUNYUAN = replace(
    LLAMA,
    model_type="hunyuan_v1_dense",
    attention=replace(ATTENTION, head_norms=("query_layernorm", "key_layernorm")),
)
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
GLM = replace(LLAMA, model_type="glm", mlp=PHI3.mlp)
GLM4 = replace(GLM, model_type="glm4")
GRANITE = replace(LLAMA, model_type="granite", logits_divisor="logits_scaling")
GRANITE_SWA = replace(
    GRANITE, model_type="granite_swa", attention=replace(ATTENTION, of_heads=("sinks",))
)
HYPERCLOVAX = replace(LLAMA, model_type="hyperclovax", logits_factor="logits_scaling")
COHERE2 = replace(LLAMA, model_type="cohere2", logits_factor="logit_scale")
COHERE = replace(COHERE2, model_type="cohere", attention=QWEN3.attention)
NEMOTRON = replace(
    LLAMA,
    model_type="nemotron",
    mlp=RegionNames("mlp", inputs={"up_proj": 1}, outputs=("down_proj",)),
)
ARCEE = replace(NEMOTRON, model_type="arcee")
JAIS2 = replace(NEMOTRON, model_type="jais2")
NANOCHAT = replace(
    LLAMA,
    model_type="nanochat",
    mlp=RegionNames("mlp", inputs={"fc1": 1}, outputs=("fc2",)),
    logits_softcap="final_logit_softcapping",
)
STARCODER2 = replace(
    LLAMA,
    model_type="starcoder2",
    mlp=RegionNames("mlp", inputs={"c_fc": 1}, outputs=("c_proj",)),
)

DENSE = (
    *(LLAMA, *AS_LLAMA, QWEN3, QWEN3_VL_TEXT, EXAONE4, HUNYUAN, OLMO2, OLMO3, PHI3, GLM, GLM4),
    *(GRANITE, GRANITE_SWA, HYPERCLOVAX, COHERE, COHERE2),
    *(NEMOTRON, ARCEE, JAIS2, NANOCHAT, STARCODER2),
)
