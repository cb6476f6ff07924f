"""Steps of leaves on any layout, and all bits of what they trained."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, batch, mesh_of
from reference_mixtral import TinyMixtral, TinyQwen2Moe, TinyQwen3Moe
from test_specs import OfSpec
from torch.nn import functional

import parallel_ext as px
from parallel_ext.models import SPECS
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.reshard import gather_tensor
from parallel_ext.sharding.slices import local_part

KINDS = {
    "odd": Tiny(dtype=torch.float32),
    "tied": Tiny(dtype=torch.float32, tied=True),
    "bf16": Tiny(dtype=torch.bfloat16, heads=8, key_value_heads=4, bias=True),
    "qwen3": OfSpec("qwen3", dtype=torch.float32),
    "phi3": OfSpec("phi3", dtype=torch.float32),
    "mixtral": TinyMixtral(num_experts=5, top_k=3, dtype=torch.float32),
    "bf16 mixtral": TinyMixtral(dtype=torch.bfloat16, heads=8, key_value_heads=4, inner=64),
    "mixtral, an idle rank": TinyMixtral(dtype=torch.float32, skew="an idle rank"),
    "mixtral, one expert": TinyMixtral(dtype=torch.float32, skew="one expert takes all"),
    "balanced mixtral": TinyMixtral(num_experts=5, top_k=1, dtype=torch.float32, balance=True),
    "balanced qwen3_moe": TinyQwen3Moe(
        dtype=torch.bfloat16, balance=True, options=(("head_dim", 8),)
    ),
    "qwen2_moe": TinyQwen2Moe(dtype=torch.float32, inner=17, balance=True),
    "bf16 qwen2_moe": TinyQwen2Moe(dtype=torch.bfloat16, heads=8, key_value_heads=4, inner=64),
    "qwen3_moe": TinyQwen3Moe(dtype=torch.float32, tied=True, options=(("head_dim", 8),)),
    "glm4_moe": OfSpec("glm4_moe", dtype=torch.float32, heads=8, key_value_heads=4),
    "bf16 dots1": OfSpec("dots1", dtype=torch.bfloat16, heads=8, key_value_heads=4),
    "deepseek_v3": OfSpec("deepseek_v3", dtype=torch.float32),
    "bf16 deepseek_v2": OfSpec("deepseek_v2", dtype=torch.bfloat16),
    "llama4": OfSpec("llama4_text", dtype=torch.float32, heads=8, key_value_heads=4),
    "bf16 gemma4": OfSpec("gemma4_unified_text", dtype=torch.bfloat16, heads=8, key_value_heads=4),
}
INVARIANT = px.Invariant(8, leaves=5)
ROWS, STEPS = 7, 2

Sides = int | tuple[int, int]
"""Sizes of tp and ep; of one number both, where there are experts."""

Layout = tuple[int, Sides, int]
"""Ranks, sizes of tp and ep, and the stage of ZeRO."""

Bits = tuple[list[tuple[str, str]], str, dict[str, str]]
"""Losses and norms of steps, ``px.digest``, and digests of each tensor; equal on every rank."""


def has_experts(kind: str) -> bool:
    tiny = KINDS[kind]
    return isinstance(tiny, TinyMixtral) or (
        isinstance(tiny, OfSpec) and SPECS[tiny.kind].mixture is not None
    )


def leaf_mesh(kind: str, sides: Sides) -> px.Mesh:
    tp, ep = sides if isinstance(sides, tuple) else (sides, sides)
    return mesh_of(tp=tp, ep=ep if has_experts(kind) else 1)


def leaf_batch(vocab_size: int, step: int) -> dict[str, torch.Tensor]:
    found = batch(vocab_size, ROWS, 11, seed=step)
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["attention_mask"][0, 8:] = 0  # padding in one leaf
    found["labels"] = found["labels"].masked_fill(found["attention_mask"] == 0, -100)
    return found


def label_count(whole: dict[str, torch.Tensor]) -> torch.Tensor:
    return (whole["labels"][:, 1:] != -100).sum()


def part_of(whole: dict[str, torch.Tensor], leaf: slice) -> dict[str, torch.Tensor]:
    return {name: value[leaf] for name, value in whole.items()}


def bits_of(model: Any, optimizer: torch.optim.Optimizer, mesh: px.Mesh) -> dict[str, str]:
    """Of each trained parameter, its gradient and second moment."""
    found = {}
    for name, parameter, layout in named_shards(model):
        if not parameter.requires_grad:
            continue
        tensors = {
            "weight": parameter,
            "gradient": parameter.grad,
            "moment": optimizer.state[parameter]["exp_avg_sq"],
        }
        for kind, tensor in tensors.items():
            full = gather_tensor(local_part(tensor), layout, mesh, range(mesh.world_size))
            data = full.flatten().view(torch.uint8).numpy()
            found[f"{kind} of {layout.name or name}"] = hashlib.sha256(data).hexdigest()
    return found


def _loss(model: Any, whole: dict[str, torch.Tensor], how: str) -> torch.Tensor:
    """Of a batch, whose gradients the model has then."""
    if how == "ranks without rows":
        return px.train_leaves(model, part_of(whole, slice(2)))
    if how == "accumulation":
        parts = [part_of(whole, slice(3)), part_of(whole, slice(3, None))]
        count = {"num_items_in_batch": label_count(whole)}
        return sum(px.train_leaves(model, part | count) for part in parts)
    if how == "own loop":
        with px.leaves(model, ROWS, whole) as own:
            for leaf in own:
                part = part_of(whole, leaf)
                own.backward(model(**part, num_items_in_batch=label_count(whole)).loss)
        return own.loss
    if how.startswith("own logits"):
        with px.leaves(model, ROWS) as own:
            for leaf in own:
                part = part_of(whole, leaf)
                targets = part.pop("labels")[:, 1:].flatten()
                logits = model(**part).logits[:, :-1].flatten(0, 1).float()
                total = functional.cross_entropy(logits, targets, reduction="sum")
                own.backward(total / label_count(whole))
        return own.loss
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
        return px.train_leaves(model, whole)


def train(
    kind: str,
    sides: Sides,
    zero: int = 0,
    how: str = "",
    steps: Sequence[int] = range(STEPS),
    root: Path | None = None,
) -> Bits:
    """Train on this pool's ranks; resumed from ``root`` and saved there if not all steps run."""
    tiny, mesh = KINDS[kind], leaf_mesh(kind, sides)
    model = px.parallelize(tiny.model(), mesh, invariant=INVARIANT)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
    if "adapter" in how:
        parts: dict[str, Any] = {"target_modules": "all-linear"}
        if isinstance(tiny, TinyMixtral) and "all linears" not in how:
            parts = {"target_modules": ["q_proj", "o_proj"]}
        if "adapter on experts" in how:
            parts["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
        if "adapter on the head" in how:
            parts = {"target_modules": ["q_proj", "lm_head"]}
        torch.manual_seed(3)
        config = px.LoraConfig(r=3, lora_dropout=0.0 if len(parts) > 1 else 0.2, **parts)
        model = peft.get_peft_model(model, config).train()
    if how.startswith("forced"):
        px.force_routing(model, how.removeprefix("forced "))
    if zero:
        px.data_parallel(model, mesh, zero)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if root is not None and steps[0] > 0:
        px.load_checkpoint(root, model, optimizer)
    log = []
    for step in steps:
        optimizer.zero_grad()
        loss = _loss(model, leaf_batch(tiny.vocab_size, step), how)
        clip = torch.nn.utils.clip_grad_norm_ if how == "own loop" else None
        norm = px.clip_grad_norm_(model, 0.5) if clip is None else clip(model.parameters(), 0.5)
        log.append((loss.item().hex(), norm.item().hex()))
        optimizer.step()
    if root is not None and steps[-1] < STEPS - 1:
        px.save_checkpoint(root, steps[-1] + 1, model, optimizer)
    return log, px.digest(model), bits_of(model, optimizer, mesh)


def assert_bits(found: Sequence[Bits], whole: Bits) -> None:
    """Raise unless every rank found the bits of another layout."""
    log, digest, of_tensors = whole
    for own_log, own_digest, own in found:
        assert (own_log, own_digest) == (log, digest)
        assert {name for name in of_tensors if own.get(name) != of_tensors[name]} == set()
        assert own.keys() == of_tensors.keys()


@lru_cache
def of_one_process(kind: str, how: str = "") -> Bits:
    (whole,) = pool(1).run(train, kind, 1, 0, how)
    return whole


def check_layouts(kind: str, how: str, layouts: Sequence[Layout], run: Any = train) -> None:
    """Raise unless ``layouts`` have the bits of one process."""
    whole = of_one_process(kind, how)
    for ranks, sides, zero in layouts:
        assert_bits(pool(ranks).run(run, kind, sides, zero, how), whole)


def sweep(cases: Collection[Any], layouts: Sequence[Layout], often: Sequence[Layout]) -> Any:
    """Parametrize a test by each case with the layouts ``often``; the other ones are slow tests."""
    rest = [each for each in layouts if each not in often]
    params = [pytest.param(case, often, id=str(case)) for case in cases]
    for case in cases if rest else ():
        slow = pytest.param(case, rest, id=f"{case}, other layouts", marks=pytest.mark.slow)
        params.append(slow)
    return pytest.mark.parametrize(("case", "layouts"), params)


def check_resume(kind: str, root: Path, moves: Sequence[Sequence[Layout]], how: str = "") -> None:
    """Raise unless runs that are resumed on another layout have the bits of one process."""
    log, digest, held = of_one_process(kind, how)
    for (saving, sides, zero), (loading, other, stage) in moves:
        folder = root / f"{saving} {sides} {zero} to {loading} {other} {stage}"
        pool(saving).run(train, kind, sides, zero, how, (0,), folder)
        resumed = pool(loading).run(train, kind, other, stage, how, (1,), folder)
        assert_bits(resumed, (log[1:], digest, held))


def as_a_chain(nodes: list, node: Any, count: int, add: Any) -> None:
    """Add each leaf to the sum of those before, instead of over the tree."""
    if nodes and node[0] == nodes[-1][0] + nodes[-1][1]:
        start, width, value = nodes.pop()
        node = start, width + node[1], add(value, node[2])
    nodes.append(node)
