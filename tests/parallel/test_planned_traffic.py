"""What the planner says that a step sends is what the ranks count."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from ranks import pool
from reference_ops import aten_path

import parallel_ext as px
from parallel_ext.lora import adapt_all_linears
from parallel_ext.parallel.estimate import Planner, Step
from parallel_ext.training import fsdp_collectives

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


def _counted(
    kind: str,
    tp: int,
    ep: int,
    zero: int,
    r: int | None,
    checkpointing: bool,
    sequence_parallel: bool,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
) -> dict[str, int]:
    """What this rank counts in a step."""
    torch.manual_seed(0)
    mesh = px.init_mesh(tp=tp, ep=ep)
    model: Any = transformers.AutoModelForCausalLM.from_config(_config(kind)).to(dtype)
    model = px.parallelize(model, mesh, sequence_parallel=sequence_parallel).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if r:
        model = adapt_all_linears(model, r)
    px.data_parallel(model, mesh, zero)
    if "llama" not in kind:
        px.force_routing(model, "balanced")
    if autocast is not None:
        model.forward = torch.autocast("cpu", autocast)(model.forward)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    return counted(model, {"input_ids": ids, "labels": ids})


def counted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, int]:
    """What this rank counts in a second step, on the kernels of other devices than the CPU."""
    plain, counts = fsdp_collectives.Collective.__call__, Counter[str]()

    def counting(self: Any, **options: Any) -> Any:
        if self._group.size > 1:
            counts[f"zero_{self._kind}"] += 1
            counts[f"zero_{self._kind}_bytes"] += options["input_tensor"].nbytes
        return plain(self, **options)

    with aten_path(True), mock.patch.object(fsdp_collectives.Collective, "__call__", counting):
        model(**batch).loss.backward()
        counts.clear()
        px._C.reset_collective_counts()
        model(**batch).loss.backward()
        own = px._C.collective_counts()
    counts.update({n: value for n, value in own.items() if "/" not in n and value})
    counts.pop("in_shared_memory", None)
    return dict(counts)


def planned(config: transformers.PreTrainedConfig, world: int, tp: int, ep: int, step: Step) -> Any:
    """The numbers of the planner under the names of those that are counted."""
    sent = Planner(config).estimate(world, tp, ep, step).sent
    counts = Counter[str]()
    for kinds in sent.values():
        for name, numbers in kinds.items():
            counts[name] += numbers["collectives"]
            counts[f"{name}_bytes"] += numbers["bytes"]
    if tp > 1:  # on the CPU the statistics of the loss have the range of a rank's ids beside them
        counts["all_gather_bytes"] += 2 * 4
    return {name: number for name, number in counts.items() if number}


@pytest.mark.parametrize(
    ("kind", "tp", "ep", "dp", "zero", "r"),
    [
        ("llama", 1, 1, 1, 2, None),
        ("llama", 4, 1, 1, 2, None),  # more ranks than key-value heads
        ("llama", 4, 1, 1, 2, 3),
        ("llama", 1, 1, 3, 2, None),
        ("llama", 2, 1, 2, 3, None),
        ("llama", 2, 1, 2, 2, 3),
        ("tied llama", 3, 1, 1, 2, None),
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
    dtype, adapt = torch.float32, r and partial(adapt_all_linears, r=r)
    step = Step(rows=ROWS, tokens=TOKENS, dtype=dtype, zero=zero, adapt=adapt)
    found = pool(tp * dp).run(_counted, kind, tp, ep, zero, r, False, False, dtype)
    assert found[0] == planned(_config(kind), tp * dp, tp, ep, step)


@pytest.mark.parametrize(
    ("kind", "tp", "ep", "dp"), [("llama", 2, 1, 2), ("mixtral", 2, 2, 2), ("mixtral", 2, 2, 1)]
)
def test_a_checkpointed_step_in_bf16_sends_what_was_planned(
    kind: str, tp: int, ep: int, dp: int
) -> None:
    dtype = torch.bfloat16
    step = Step(rows=ROWS, tokens=TOKENS, dtype=dtype, zero=3, checkpointing=True)
    found = pool(tp * dp).run(_counted, kind, tp, ep, 3, None, True, False, dtype)
    assert found[0] == planned(_config(kind), tp * dp, tp, ep, step)


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
    dtype, autocast = torch.float32, torch.bfloat16
    adapt = r and partial(adapt_all_linears, r=r)
    options = {"checkpointing": checkpointing, "autocast": autocast, "adapt": adapt}
    step = Step(rows=ROWS, tokens=TOKENS, dtype=dtype, **options)
    more = (checkpointing, False, dtype, autocast)
    found = pool(tp * dp).run(_counted, kind, tp, ep, 2, r, *more)
    assert found[0] == planned(_config(kind), tp * dp, tp, ep, step)


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
    dtype, adapt = torch.float32, r and partial(adapt_all_linears, r=r)
    step = Step(
        rows=ROWS,
        tokens=TOKENS,
        dtype=dtype,
        checkpointing=checkpointing,
        adapt=adapt,
        sequence_parallel=True,
    )
    found = pool(tp * dp).run(_counted, kind, tp, ep, 2, r, checkpointing, True, dtype)
    assert found[0] == planned(_config(kind), tp * dp, tp, ep, step)
