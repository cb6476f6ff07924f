"""Llama, and what shares its architecture under ``model_type: llama`` (SmolLM2, TinyLlama, ...)."""

from parallel_ext.models.blocks import AttentionNames, RegionNames
from parallel_ext.models.spec import ModelTable

ATTENTION = AttentionNames("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLP = RegionNames("mlp", inputs={"gate_proj": 1, "up_proj": 1}, outputs=("down_proj",))

LLAMA = ModelTable(
    model_type="llama",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention=ATTENTION,
    mlp=MLP,
)
