"""Llama, and what shares its architecture under ``model_type: llama`` (SmolLM2, TinyLlama, ...)."""

from parallel_ext.models.blocks import AttentionNames, RegionNames
from parallel_ext.models.table import ModelTable

LLAMA = ModelTable(
    model_type="llama",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention=AttentionNames(
        name="self_attn",
        query="q_proj",
        key="k_proj",
        value="v_proj",
        output="o_proj",
    ),
    mlp=RegionNames("mlp", inputs={"gate_proj": 1, "up_proj": 1}, outputs=("down_proj",)),
)
