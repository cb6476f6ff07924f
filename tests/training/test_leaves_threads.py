"""Steps of leaves have the same bits with any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import pytest
import torch
import transformers
from ranks import pool
from reference import mesh_of
from reference_ops import data_bytes, threads

import parallel_ext as px
from parallel_ext.models import SPECS
from parallel_ext.parallel.validate import is_too_old_for

SIZES = {
    **{"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4, "vocab_size": 1009},
    **{"num_hidden_layers": 1, "num_key_value_heads": 2},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Weights that BLAS multiplies by other kernels as its threads and rows vary, of 1000 tokens."""

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "cohere2": {},
    "qwen2_moe": {  # with all modules of those before
        **{"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 300},
        "shared_expert_intermediate_size": 300,
    },
    "glm4_moe": {  # with so many scores that threads share them, unevenly
        **{"n_routed_experts": 97, "num_experts_per_tok": 3, "n_shared_experts": 1},
        **{"n_group": 1, "topk_group": 1, "moe_intermediate_size": 20},
        **{"first_k_dense_replace": 0, "use_qk_norm": True},
    },
    "deepseek_v2": {  # with as many, of a softmax
        **{"n_routed_experts": 97, "num_experts_per_tok": 3, "n_shared_experts": 1},
        **{"topk_method": "greedy", "moe_intermediate_size": 20, "first_k_dense_replace": 0},
        **{"q_lora_rank": 60, "kv_lora_rank": 50},
        **{"num_attention_heads": 32, "num_key_value_heads": 32},  # so many that threads share them
        **{"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 40},
    },
    "gemma4_unified_text": {  # norms without weights, capped logits
        **{"final_logit_softcapping": 30.0, "head_dim": 64, "global_head_dim": 96},
        **{"num_global_key_value_heads": 1, "vocab_size_per_layer_input": 1009},
        "layer_types": ["full_attention"],
    },
    "llama4_text": {  # rotations by complex numbers, norms of heads without weights
        **{"num_local_experts": 3, "num_experts_per_tok": 2, "moe_layers": [0], "head_dim": 64},
        **{"attention_chunk_size": 100, "no_rope_layers": [1], "intermediate_size_mlp": 300},
    },
    "granitemoeshared": {
        **{"num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 300},
    },
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},  # torch's LayerNorm
}
KINDS = {  # not all are in 5.15
    kind: KINDS[kind]
    for kind in KINDS
    if kind in transformers.CONFIG_MAPPING and not is_too_old_for(SPECS[kind])
}
ALWAYS = ("qwen2_moe", "glm4_moe", "deepseek_v2", "starcoder2")


def _bits(count: int, dtype: torch.dtype, kind: str) -> list[Any]:
    """Losses, norms and gradients of two steps, and the digest."""
    torch.manual_seed(1)
    made = transformers.CONFIG_MAPPING[kind](**SIZES | KINDS[kind])
    reference = transformers.AutoModelForCausalLM.from_config(made).to(dtype).train()
    model = px.parallelize(reference, mesh_of(), invariant=px.Invariant(4, leaves=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[Any] = []
    with threads(count):
        for step in range(2):
            optimizer.zero_grad()
            ids = torch.randint(1009, (2, 1024), generator=torch.Generator().manual_seed(step))
            loss = px.train_leaves(model, {"input_ids": ids, "labels": ids})
            found += [loss.item().hex(), px.clip_grad_norm_(model, 1.0).item().hex()]
            found += [sha256(data_bytes(p.grad)).hexdigest() for p in model.parameters()]
            optimizer.step()
    return [*found, px.digest(model)]


def _check(ranks: int, counts: Sequence[int], dtype: torch.dtype, kind: str) -> None:
    whole = pool(ranks).run(_bits, 1, dtype, kind)
    for count in counts:
        assert pool(ranks).run(_bits, count, dtype, kind) == whole


OFTEN = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ALWAYS)) for kind in KINDS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OFTEN)
def test_the_bits_do_not_depend_on_the_number_of_threads(kind: str, dtype: torch.dtype) -> None:
    _check(2, (3,), dtype, kind)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_do_not_depend_on_other_numbers_of_threads(kind: str, dtype: torch.dtype) -> None:
    _check(1, (2, 3, 4), dtype, kind)
    _check(2, (2, 4), dtype, kind)
