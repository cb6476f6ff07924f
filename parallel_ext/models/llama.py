"""Llama, and what shares its architecture under ``model_type: llama`` (SmolLM2, TinyLlama, ...)."""

from parallel_ext.models.table import MLPNames, ModelTable

LLAMA = ModelTable(
    model_type="llama",
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    attention="self_attn",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    attention_output="o_proj",
    mlp=MLPNames(name="mlp", inputs=("gate_proj", "up_proj"), output="down_proj"),
)
