"""Gemma: Llama with a scaled embedding, and from Gemma 2 on with capped logits."""

from dataclasses import replace

from parallel_ext.models.llama import LLAMA, QWEN3

GEMMA = replace(LLAMA, model_type="gemma", scaled_embedding="GemmaTextScaledWordEmbedding")
GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    scaled_embedding="Gemma2TextScaledWordEmbedding",
    logits_softcap="final_logit_softcapping",
)
VAULTGEMMA = replace(
    GEMMA2, model_type="vaultgemma", scaled_embedding="VaultGemmaTextScaledWordEmbedding"
)
GEMMA3_TEXT = replace(
    GEMMA2,
    model_type="gemma3_text",
    attention=QWEN3.attention,
    scaled_embedding="Gemma3TextScaledWordEmbedding",
)
