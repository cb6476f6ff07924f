"""What the planner says that a step sends is what the ranks count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from planned_steps import adapter, config_as_planned, counted, planned
from ranks import pool

from parallel_ext.parallel.estimate import Step

ROWS, TOKENS, LAYERS = 2, 7, 5
SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 13,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _config(kind: str) -> transformers.PreTrainedConfig:
    if kind == "mixtral":
        return transformers.MixtralConfig(num_local_experts=5, **SIZES)
    if kind == "qwen2_moe":  # a dense layer before those of experts
        return transformers.Qwen2MoeConfig(
            num_experts=5,
            moe_intermediate_size=7,
            shared_expert_intermediate_size=17,
            mlp_only_layers=[0],
            **SIZES,
        )
    if kind == "balanced mixtral":
        return transformers.MixtralConfig(
            num_local_experts=5, output_router_logits=True, router_aux_loss_coef=0.1, **SIZES
        )
    return transformers.LlamaConfig(tie_word_embeddings=kind == "tied llama", **SIZES)


def _counted(kind: str, tp: int, ep: int, step: Step) -> dict[str, int]:
    """What this rank counts in a step."""
    model, _ = config_as_planned(_config(kind), tp, ep, step)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    return counted(model, {"input_ids": ids, "labels": ids})


def _assert_sends_what_was_planned(
    kind: str, tp: int, ep: int, dp: int, r: int | None = None, **options: Any
) -> None:
    options = {"dtype": torch.float32, "adapt": adapter(r), **options}
    step = Step(rows=ROWS, tokens=TOKENS, **options)
    found = pool(tp * dp).run(_counted, kind, tp, ep, step)
    assert [found[0], found[-1]] == planned(_config(kind), tp * dp, tp, ep, step)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "tp", "ep", "dp", "zero", "r"),
    [
        ("llama", 1, 1, 1, 2, None),
        ("llama", 4, 1, 1, 2, None),  # more ranks than key-value heads
        ("llama", 4, 1, 1, 2, 3),
        ("llama", 1, 1, 3, 2, None),
        ("llama", 2, 1, 2, 3, None),
        ("llama", 2, 1, 2, 2, 3),
        ("tied llama", 3, 1, 1, 2, None),  # ranks with unequal shards
        ("tied llama", 2, 1, 2, 3, None),
        ("mixtral", 2, 1, 1, 2, None),
        ("mixtral", 2, 2, 1, 2, 3),
        ("mixtral", 4, 2, 1, 2, None),
        ("mixtral", 1, 2, 2, 2, None),
        ("mixtral", 2, 4, 2, 3, None),
        ("mixtral", 1, 2, 4, 3, 3),
        ("balanced mixtral", 1, 2, 2, 2, None),
        ("qwen2_moe", 2, 1, 1, 2, None),
        ("qwen2_moe", 3, 3, 1, 2, 3),
        ("qwen2_moe", 2, 4, 2, 3, None),
    ],
)
def test_a_step_sends_what_was_planned(
    kind: str, tp: int, ep: int, dp: int, zero: int, r: int | None
) -> None:
    _assert_sends_what_was_planned(kind, tp, ep, dp, r, zero=zero)


@pytest.mark.parametrize(
    ("kind", "tp", "ep", "dp"), [("llama", 2, 1, 2), ("mixtral", 2, 2, 2), ("mixtral", 2, 2, 1)]
)
def test_a_checkpointed_step_in_bf16_sends_what_was_planned(
    kind: str, tp: int, ep: int, dp: int
) -> None:
    options = {"dtype": torch.bfloat16, "zero": 3, "checkpointing": True}
    _assert_sends_what_was_planned(kind, tp, ep, dp, **options)


@pytest.mark.parametrize(
    ("kind", "tp", "ep", "dp", "checkpointing", "r"),
    [
        ("llama", 2, 1, 1, False, None),
        ("llama", 2, 1, 1, False, 3),
        ("llama", 4, 1, 1, True, None),
        ("mixtral", 2, 2, 1, False, None),
        ("mixtral", 2, 4, 2, True, None),
    ],
)
def test_a_step_under_autocast_sends_what_was_planned(
    kind: str, tp: int, ep: int, dp: int, checkpointing: bool, r: int | None
) -> None:
    options = {"checkpointing": checkpointing, "autocast": torch.bfloat16}
    _assert_sends_what_was_planned(kind, tp, ep, dp, r, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "tp", "ep", "dp", "checkpointing", "r"),
    [
        ("llama", 2, 1, 1, False, None),
        ("llama", 3, 1, 1, True, None),
        ("llama", 4, 1, 1, False, 3),
        ("llama", 2, 1, 2, True, None),
        ("mixtral", 2, 1, 1, False, None),
        ("mixtral", 3, 3, 1, True, None),
        ("mixtral", 4, 2, 1, False, 3),
        ("mixtral", 2, 4, 2, True, None),
        ("balanced mixtral", 2, 2, 1, True, None),
        ("qwen2_moe", 2, 1, 1, False, None),
        ("qwen2_moe", 3, 3, 1, False, 3),
        ("qwen2_moe", 2, 2, 2, True, None),
    ],
)
def test_a_sequence_parallel_step_sends_what_was_planned(
    kind: str, tp: int, ep: int, dp: int, checkpointing: bool, r: int | None
) -> None:
    options = {"checkpointing": checkpointing, "sequence_parallel": True}
    _assert_sends_what_was_planned(kind, tp, ep, dp, r, **options)
