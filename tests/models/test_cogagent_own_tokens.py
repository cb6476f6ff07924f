"""A CogAgent under sequence parallelism trains, and generates, as the single process does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import pool
from reference import (
    assert_within,
    difference,
    gradient_differences,
    gradients_of,
    parallel,
    shard_differences,
    worst,
)
from reference_cogagent import TWO_IMAGES, Row, batches_of, exact, picture, text, tiny_model
from reference_mixtral import Layout, differences_of_adapter, differences_of_steps
from reference_ops import counted_both_ways
from test_cogagent_lora import DECODER, EVERYWHERE, TOWER
from test_cogagent_parallel import OF_RANKS, ROWS
from torch import nn

import parallel_ext as px
from parallel_ext import ops

OWN: dict[str, Any] = {"sequence_parallel": True}
BESIDE_TEXT = ROWS["an image next to text"]


def _pair(layout: Layout, zero: int = 2) -> tuple[nn.Module, nn.Module, px.Mesh]:
    reference = exact(tiny_model().train())
    mesh = layout.mesh()
    model = parallel(reference, mesh, **OWN)
    return reference, px.data_parallel(model, mesh, zero), mesh


def _parity(ranks: list[list[Row]], layout: Layout, zero: int) -> dict[str, float]:
    return differences_of_steps(*_pair(layout, zero), [batches_of(ranks)] * 2)


@pytest.mark.parametrize(
    ("rows", "tp"),
    [
        *((rows, 2) for rows in ROWS.values()),
        (BESIDE_TEXT, 1),
        ([[Row(TWO_IMAGES, 2, cross=True), text(5)]], 4),
        ([[text(3), text(2, cross=True)]], 4),  # a rank without tokens
    ],
    ids=str,
)
def test_training_equals_the_single_process(rows: list[list[Row]], tp: int) -> None:
    assert_within(pool(tp).run(_parity, rows, Layout(1, tp, 1), 2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks", OF_RANKS)
def test_data_parallel_training_equals_the_single_process(ranks: str, zero: int) -> None:
    assert_within(pool(4).run(_parity, OF_RANKS[ranks], Layout(2, 2, 1), zero))


def _checkpointed(reentrant: bool) -> dict[str, float]:
    reference, model, _ = _pair(Layout(1, 2, 1))
    model = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return gradient_differences(reference, model, batches_of(BESIDE_TEXT)[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_activations_keeps_every_gradient(reentrant: bool) -> None:
    assert_within(pool(2).run(_checkpointed, reentrant))


def _with_adapter(
    layout: Layout, ranks: list[list[Row]], options: dict[str, Any]
) -> dict[str, float]:
    def make() -> Any:
        return exact(tiny_model().train())

    return differences_of_adapter(make, layout, batches_of(ranks), OWN, **options)


@pytest.mark.parametrize(
    ("layout", "ranks", "changes"),
    [
        (Layout(1, 2, 1), BESIDE_TEXT, {}),
        (Layout(1, 4, 1), BESIDE_TEXT, {"lora_bias": True}),
        (Layout(2, 2, 1), [[picture(6)], [text(9)]], {}),
        (Layout(1, 2, 1), BESIDE_TEXT, {"modules_to_save": ["input_layernorm", "cross_vision"]}),
    ],
    ids=str,
)
def test_gradients_of_adapters_are_those_of_peft(
    layout: Layout, ranks: list[list[Row]], changes: dict[str, Any]
) -> None:
    options = {**EVERYWHERE, **changes}
    if "modules_to_save" in changes:
        options["target_modules"] = DECODER
    found = pool(layout.world).run(_with_adapter, layout, ranks, options)
    assert_within(found, 1e-5)  # factors are fp32
    assert all(any(f"{name}.lora_A" in each for each in found[0]) for name in DECODER)
    assert any(TOWER[0] in each for each in found[0]) == ("modules_to_save" not in changes)


def _evaluated() -> dict[str, float]:
    """Logits with gradients, and tokens."""
    reference, model, _ = _pair(Layout(1, 2, 1))
    inputs = {name: value for name, value in batches_of(BESIDE_TEXT)[0].items() if name != "labels"}
    found = {}
    for each in (reference, model):
        each.eval().zero_grad()
    ours, theirs = (each(**inputs).logits for each in (model, reference))
    found["logits"] = difference(ours, theirs)
    for logits in (ours, theirs):
        logits.square().sum().backward()
    found |= shard_differences(model, gradients_of(reference), True)
    wanted = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    tokens = [each.generate(**inputs, **wanted) for each in (model, reference)]
    return {**found, "tokens": float(not torch.equal(*tokens))}


def test_evaluation_and_generation_are_those_of_one_process() -> None:
    assert_within(pool(2).run(_evaluated))


def _collectives(rows: list[list[Row]], layers: int) -> tuple[dict[str, int], dict[str, int]]:
    mesh = Layout(1, 2, 1).mesh()
    model = parallel(tiny_model(num_hidden_layers=layers).train(), mesh, **OWN)
    return counted_both_ways(lambda: model(**batches_of(rows)[0]).loss)


@pytest.mark.parametrize(("rows", "of_layer"), [("an image next to text", 3), ("text only", 2)])
def test_a_layer_gathers_and_sums_tokens_where_it_summed_them_all(rows: str, of_layer: int) -> None:
    few, more = (pool(2).run(_collectives, ROWS[rows], layers)[0] for layers in (2, 3))
    for fewer, further in zip(few, more, strict=True):
        assert further["swap"] - fewer["swap"] == 2 * of_layer
        assert further.get("all_reduce") == fewer.get("all_reduce")


def _broken(what: str) -> float:
    reference, model, _ = _pair(Layout(1, 2, 1))
    layer, vision = model.model.layers[0], model.model.vision
    if what == "a norm is not summed":
        layer.post_cross_attention_layernorm.used_in_parts.group = ops.ALONE
    elif what == "the tower is not summed":
        vision.transformer.layers[0].mlp.fc2.summed_over = ops.ALONE
    elif what == "the image is not copied":
        model.model.looked_at._forward_hooks.clear()
    elif what == "the embedding returns own rows":
        (own,) = (
            hook.__self__
            for hook in layer._forward_pre_hooks.values()
            if getattr(hook, "__name__", "") == "begin_layer"
        )
        model.model.embed_tokens.keeps = own.of_embedding
    return worst(gradient_differences(reference, model, batches_of(BESIDE_TEXT)[0]))[0]


@pytest.mark.parametrize(
    "what",
    [
        "a norm is not summed",
        "the tower is not summed",
        "the image is not copied",
        "the embedding returns own rows",
    ],
)
def test_the_comparison_notices_a_broken_part(what: str) -> None:
    assert max(pool(2).run(_broken, what)) > 1e-4
