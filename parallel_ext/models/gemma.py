"""Gemma: Llama with a scaled embedding, from Gemma 2 on with capped logits, and Gemma 4's experts.

Gemma 4's layers have heads of two sizes. Some have no linear for values, or none for keys and
values, and may read a further embedding; those of one size have experts beside their MLP.
"""

from dataclasses import replace

import torch
from torch import nn

from parallel_ext.models.llama import LLAMA, MLP, QWEN3
from parallel_ext.models.mixture_names import MixtureNames
from parallel_ext.nn.routing import Choose, Product

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


def _route(
    router: nn.Module, hidden_states: torch.Tensor, choose: Choose, product: Product
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what ``Gemma4TextRouter`` does, whose weights have the sum 1 before experts scale them.

    In place of logits it returns their softmax.
    """
    hidden = router.norm(hidden_states) * router.scale * router.scalar_root_size
    probabilities = choose.softmax(product(hidden, router.proj.weight))
    expert_ids = choose.best(probabilities, router.config.top_k_experts)
    weights = probabilities.gather(1, expert_ids)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return probabilities, weights * router.per_expert_scale[expert_ids], expert_ids


GEMMA4_TEXT = replace(
    GEMMA3_TEXT,
    model_type="gemma4_text",
    scaled_embedding="Gemma4TextScaledWordEmbedding",
    layer_embedding="model.embed_tokens_per_layer",
    mixture=MixtureNames(
        name="",
        router="router",
        router_class="Gemma4TextRouter",
        route=_route,
        experts="experts",
        experts_class="Gemma4TextExperts",
        gate_up="gate_up_proj",
        down="down_proj",
        num_experts="num_experts",
        in_files="",
        gate_up_in_files=None,
        down_in_files=None,
        shared=MLP,
        balances=False,
        fixed_bits=False,
    ),
)
GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    scaled_embedding="Gemma4UnifiedTextScaledWordEmbedding",
    layer_embedding=None,
    mixture=None,
    mlp=MLP,
)

GEMMAS = (GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT, VAULTGEMMA)
