"""A CogAgent spread over ranks trains, generates and is cut as the single process has it."""

from __future__ import annotations

import copy
import re
from itertools import product
from typing import Any

import pytest
import torch
from ranks import pool
from reference import (
    FLOOR,
    assert_at_most_twice,
    assert_within,
    difference,
    gradient_differences,
    gradients_of,
    parallel,
    shard_differences,
    worst,
)
from reference_cogagent import (
    TWO_IMAGES,
    Row,
    batch_of,
    batches_of,
    exact,
    picture,
    text,
    tiny_model,
)
from reference_mixtral import Layout, assert_refused, differences_of_steps
from reference_ops import counted_both_ways
from torch import nn

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.models.cogagent import CogAgentConfig, CogAgentForCausalLM, build_position_ids
from parallel_ext.models.cogagent.spec import COGAGENT
from parallel_ext.models.spec import ModelSizes, plan
from parallel_ext.sharding.layout import ModelLayout

EIGHT_HEADS = {
    "num_attention_heads": 8,
    "vision_config": {
        **CogAgentConfig().vision_config,
        **{"hidden_size": 48, "image_size": 42, "intermediate_size": 72, "num_positions": 10},
        **{"num_heads": 8, "num_hidden_layers": 2},
    },
}
# Rows of each dp rank.
ROWS = {
    "language tokens that look at an image": [[text(7, cross=True)]],
    "one image": [[picture(6)]],
    "two images in a batch, padded": [[picture(6), picture(3)]],
    "an image next to text": [[picture(4), text(9)]],
    "two images in a row": [[Row(TWO_IMAGES, 2, cross=True), text(5)]],
    "text only": [[text(5), text(9)]],
}
OF_RANKS = {
    "images on both": [[picture(6)], [picture(3)]],
    "one without an image": [[picture(6), text(4)], [text(9), text(3)]],
    "one without an image of low resolution": [[picture(4)], [text(6, cross=True)]],
    "text only": [[text(5)], [text(9)]],
}


def _parity(
    ranks: list[list[Row]], layout: Layout, zero: int, options: dict[str, Any], steps: int = 3
) -> dict[str, float]:
    reference = exact(tiny_model(**options).train())
    mesh = layout.mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh, zero)
    return differences_of_steps(reference, model, mesh, [batches_of(ranks)] * steps)


@pytest.mark.parametrize(
    ("rows", "tp"),
    [*((rows, 2) for rows in ROWS), ("an image next to text", 1), ("two images in a row", 4)],
)
def test_training_equals_the_single_process(rows: str, tp: int) -> None:
    assert_within(pool(tp).run(_parity, ROWS[rows], Layout(1, tp, 1), 2, {}))


def _decoder_alone(ranks: list[list[Row]], layout: Layout) -> dict[str, float]:
    reference, mesh = exact(tiny_model().train()).model, layout.mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh)
    batches = [batch_of(rows) for rows in ranks]
    for each in batches:
        del each["labels"]
        (reference(**each).last_hidden_state.square().mean() / len(ranks)).backward()
    model(**batches[mesh.dp_rank]).last_hidden_state.square().mean().backward()
    return shard_differences(model, gradients_of(reference), gradients=True)


@pytest.mark.parametrize("rows", ["images on both", "one without an image"])
def test_its_decoder_alone_trains_as_in_one_process(rows: str) -> None:
    assert_within(pool(4).run(_decoder_alone, OF_RANKS[rows], Layout(2, 2, 1)))


def _on_eight_ranks() -> dict[str, float]:
    found = {}
    for name, rows in ROWS.items():
        differences = _parity(rows, Layout(1, 8, 1), 2, EIGHT_HEADS, steps=1)
        found |= {f"{name}: {of}": error for of, error in differences.items()}
    for name in ("images on both", "one without an image"):
        differences = _parity(OF_RANKS[name], Layout(2, 4, 1), 2, EIGHT_HEADS, steps=1)
        found |= {f"dp ranks, {name}: {of}": error for of, error in differences.items()}
    return found


@pytest.mark.slow
def test_training_equals_the_single_process_on_eight_ranks() -> None:
    assert_within(pool(8).run(_on_eight_ranks))  # all in one call: their start takes long


OFTEN = [
    *(("images on both", 2, 2), ("images on both", 3, 1), ("one without an image", 2, 1)),
    *(("one without an image", 3, 2), ("one without an image of low resolution", 2, 2)),
    *(("one without an image of low resolution", 3, 1), ("text only", 3, 2)),
]
EVERY = [
    pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.slow])
    for case in product(OF_RANKS, (2, 3), (1, 2))
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ranks", "zero", "tp"), EVERY)
def test_data_parallel_training_equals_the_single_process(ranks: str, zero: int, tp: int) -> None:
    layout = Layout(2, tp, 1)
    assert_within(pool(layout.world).run(_parity, OF_RANKS[ranks], layout, zero, {}))


def test_fp32_errs_at_most_twice_as_much_as_one_process() -> None:
    assert_at_most_twice(pool(2).run(_errors_in, torch.float32), FLOOR[torch.float32])


def test_bf16_errs_as_much_as_one_process() -> None:
    for ours, theirs in pool(2).run(_errors_in, torch.bfloat16):
        # Single tensors of a model as tiny as this one scatter by more than twice.
        assert sum(ours.values()) <= 1.2 * sum(theirs.values())
        assert max(ours.values()) <= 2 * max(theirs.values())


def _errors_in(dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    truth, single = exact(tiny_model().train()), exact(tiny_model().train()).to(dtype)
    truth.load_state_dict(single.state_dict())
    model = parallel(single, Layout(1, 2, 1).mesh())
    whole, _ = batches_of(ROWS["an image next to text"])
    for each in (truth, single, model):
        each(**whole).loss.backward()
    full = gradients_of(truth)
    theirs = {n: difference(g, full[n]) for n, g in gradients_of(single).items() if g is not None}
    return shard_differences(model, full, True), theirs


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_activations_keeps_every_gradient(reentrant: bool) -> None:
    assert_within(pool(2).run(_checkpointed, reentrant))


def _checkpointed(reentrant: bool) -> dict[str, float]:
    reference = exact(tiny_model().train())
    model = copy.deepcopy(parallel(reference, Layout(1, 2, 1).mesh()))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return gradient_differences(reference, model, batches_of(ROWS["an image next to text"])[0])


def _of_the_image_alone(beside_text: bool) -> dict[str, float]:
    """Gradients of a loss on what the high tower returns, alone or added to that of the tokens."""
    reference = exact(tiny_model().train())
    model = parallel(reference, Layout(1, 2, 1).mesh())
    whole, _ = batches_of(ROWS["one image"])
    for each in (reference, model):
        tower, returned = each.model.cross_vision, []
        tower.register_forward_hook(lambda *args, kept=returned: kept.append(args[-1]))
        loss = each(**whole).loss if beside_text else tower(whole["cross_images"][0][0][None]).sum()
        (loss + returned[0].square().mean()).backward()
    return shard_differences(model, gradients_of(reference), True)


@pytest.mark.parametrize("beside_text", [True, False])
def test_a_loss_on_what_the_high_tower_returns_counts_once(beside_text: bool) -> None:
    assert_within(pool(2).run(_of_the_image_alone, beside_text))


def _seen_by_a_hook() -> list[int]:
    reference, shape = tiny_model(), []
    tower = reference.model.cross_vision.vit.model
    tower.register_forward_hook(lambda *args: shape.extend(args[-1].shape))
    parallel(reference, Layout(1, 2, 1).mesh())(**batches_of(ROWS["one image"])[0])
    return shape


def test_a_hook_from_before_on_the_high_tower_sees_all_positions() -> None:
    assert pool(2).run(_seen_by_a_hook) == [[1, 17, 32]] * 2


def test_compiled_layers_have_every_gradient() -> None:
    assert_within(pool(2).run(_compiled))


def _compiled() -> dict[str, float]:
    reference = exact(tiny_model().train())
    model = parallel(reference, Layout(1, 2, 1).mesh())
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    differences = gradient_differences(reference, model, batches_of([[picture(6)]])[0])
    torch._dynamo.reset()
    return differences


# What is broken on purpose.


def _broken(what: str) -> dict[str, float]:
    reference = exact(tiny_model().train())
    model = parallel(reference, Layout(1, 2, 1).mesh())
    layer, cross = model.model.layers[0], model.model.cross_vision
    if what == "the image is not copied":
        model.model.looked_at._forward_hooks.clear()
    elif what == "a region is not entered":
        layer.cross_attn._forward_pre_hooks.clear()
    elif what == "one block in place of three":
        weight = reference.model.layers[0].self_attn.language_expert_query_key_value.weight
        own = layer.self_attn.language_expert_query_key_value.weight
        own.data = weight.data.chunk(2)[model.parallel_ext_local_shards.mesh.tp_rank].clone()
    elif what == "an output is not summed":
        layer.mlp._forward_hooks.clear()
    elif what == "a part of the high tower is not summed":
        cross.vit.model.blocks[0].mlp.w1.used_in_parts.group = ops.ALONE
    elif what == "keys of the high tower have the gradient of one rank":
        positions = cross.vit.model.blocks[1].attn.positions
        positions.gather_seen = positions.gather
    elif what == "an output is summed twice":
        layer.self_attn.language_expert_dense.summed_over = (
            layer.self_attn.vision_expert_dense.group
        )
    return gradient_differences(reference, model, batches_of(ROWS["an image next to text"])[0])


@pytest.mark.parametrize(
    "what",
    [
        "the image is not copied",
        "a region is not entered",
        "one block in place of three",
        "an output is not summed",
        "a part of the high tower is not summed",
        "keys of the high tower have the gradient of one rank",
        "an output is summed twice",
    ],
)
def test_the_comparison_notices_a_broken_part(what: str) -> None:
    assert max(worst(differences)[0] for differences in pool(2).run(_broken, what)) > 1e-3


def _checked(broken: bool) -> px.GradientReport:
    mesh = Layout(2, 2, 1).mesh()
    model = px.data_parallel(parallel(tiny_model().float().train(), mesh), mesh)
    if broken:
        model.model.looked_at._forward_hooks.clear()
    _, own = batches_of(OF_RANKS["one without an image"])
    return px.check_gradients(model, own[mesh.dp_rank])


def _checked_without(name: str) -> px.GradientReport:
    mesh = Layout(2, 1, 1).mesh()
    model = px.data_parallel(parallel(tiny_model().float().train(), mesh), mesh)
    batch = batches_of(OF_RANKS["one without an image"])[1][mesh.dp_rank]
    batch["position_ids"] = build_position_ids(batch["token_type_ids"], batch["attention_mask"])
    if mesh.dp_rank == 1:
        del batch[name]
    return px.check_gradients(model, batch)


def test_check_gradients_takes_batches_of_text_without_token_types() -> None:
    for report in pool(2).run(_checked_without, "token_type_ids"):
        assert report.worst[1] < 1e-4, report
    words = "position_ids is given on some dp ranks only"
    pool(2).assert_raises(_checked_without, "position_ids", words=words)


def test_check_gradients_agrees_and_finds_a_missing_sum() -> None:
    for report in pool(4).run(_checked, False):
        assert report.worst[1] < 1e-4, report
        assert "model.cross_vision.pos_embed" in report.differences
    for report in pool(4).run(_checked, True):
        assert "cross_vision" in report.worst[0]
        assert report.worst[1] > 0.1


# Collectives.

OTHERS = ("all_gather", "all_to_all", "broadcast", "swap")


def _collectives(rows: list[list[Row]], layers: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of a forward and its backward."""
    model = parallel(tiny_model(num_hidden_layers=layers).train(), Layout(1, 2, 1).mesh())
    return counted_both_ways(lambda: model(**batches_of(rows)[0]).loss)


@pytest.mark.parametrize(("rows", "of_layer"), [("an image next to text", 3), ("text only", 2)])
def test_a_layer_takes_three_all_reduces_and_two_without_an_image(rows: str, of_layer: int) -> None:
    few, more = (pool(2).run(_collectives, ROWS[rows], layers)[0] for layers in (2, 3))
    for fewer, further in zip(few, more, strict=True):
        assert further["all_reduce"] - fewer["all_reduce"] == of_layer
        assert {n: c for n, c in further.items() if n in OTHERS} == {
            n: c for n, c in fewer.items() if n in OTHERS
        }
    # forward: 2 of each of the low tower's 2 layers, 1 of its adapter;
    # backward: the head, the same of the tower, the image that all layers look at, and the sum of
    # the high tower's gradients
    sees = rows != "text only"
    tower = 2 * 2 + 1 if sees else 0
    assert few[0]["all_reduce"] == tower + 2 * of_layer
    # rows of the embedding; keys and values of the high tower's 2 blocks that run; its border
    assert few[0]["swap"] == 1 + (2 + 1) * sees
    assert few[1]["all_reduce"] == 1 + tower + 2 * sees + 2 * of_layer
    assert few[1].get("swap", 0) == (2 + 1) * sees


# The shapes of the published model.

CUT = {
    "model.layers.*.self_attn.vision_expert_query_key_value.weight": (0, 12288, 4096),
    "model.layers.*.self_attn.vision_expert_dense.weight": (1, 4096, 4096),
    "model.layers.*.cross_attn.query.weight": (0, 1024, 4096),
    "model.layers.*.cross_attn.key_value.weight": (0, 2048, 1024),
    "model.layers.*.cross_attn.dense.weight": (1, 4096, 1024),
    "model.layers.*.mlp.vision_mlp.gate_proj.weight": (0, 11008, 4096),
    "model.layers.*.mlp.vision_mlp.up_proj.weight": (0, 11008, 4096),
    "model.layers.*.mlp.vision_mlp.down_proj.weight": (1, 4096, 11008),
    "model.embed_tokens.weight": (0, 32000, 4096),
    "lm_head.weight": (0, 32000, 4096),
    "model.vision.transformer.layers.*.attention.query_key_value.weight": (0, 5376, 1792),
    "model.vision.transformer.layers.*.attention.query_key_value.bias": (0, 5376),
    "model.vision.transformer.layers.*.attention.dense.weight": (1, 1792, 1792),
    "model.vision.transformer.layers.*.mlp.fc1.weight": (0, 15360, 1792),
    "model.vision.transformer.layers.*.mlp.fc1.bias": (0, 15360),
    "model.vision.transformer.layers.*.mlp.fc2.weight": (1, 1792, 15360),
    "model.vision.linear_proj.gate_proj.weight": (0, 11008, 4096),
    "model.vision.linear_proj.dense_h_to_4h.weight": (0, 11008, 4096),
    "model.vision.linear_proj.dense_4h_to_h.weight": (1, 4096, 11008),
}


def _published_layout(tp: int) -> ModelLayout:
    with torch.device("meta"):
        model = CogAgentForCausalLM(CogAgentConfig())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    heads = {f"model.layers.{i}.{kind}_attn": 32 for i in range(32) for kind in ("self", "cross")}
    heads |= {f"model.vision.transformer.layers.{i}.attention": 16 for i in range(63)}
    return plan(COGAGENT, shapes, {}, ModelSizes(32000, heads_of=heads), tp)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_every_shard_of_the_published_model_has_its_shape(tp: int) -> None:
    found = set()
    for name, tensor in _published_layout(tp).items():
        kind = re.sub(r"\.\d+\.", ".*.", name).replace("language_", "vision_")
        dim, *shape = CUT.get(kind, (None, *tensor.shape))
        assert list(tensor.shape) == shape, name
        found |= {kind} & CUT.keys()
        if dim is not None:
            shape[dim] //= tp
            joined = 3 if "query_key_value" in kind else 2 if "key_value" in kind else 1
            block = tensor.shape[dim] // joined
            for rank in range(tp):
                first, last = rank * block // tp, (rank + 1) * block // tp
                starts = [number * block for number in range(joined)]
                assert tensor.ranges(rank) == tuple((s + first, s + last) for s in starts), name
        assert all(tensor.local_shape(rank) == tuple(shape) for rank in range(tp)), name
    assert found == CUT.keys()


@pytest.mark.parametrize(("tp", "columns"), [(2, 512), (4, 256), (8, 128)])
def test_the_dense_of_the_cross_attention_is_not_cut_twice(tp: int, columns: int) -> None:
    dense = _published_layout(tp)["model.layers.0.cross_attn.dense.weight"]
    assert dense.local_shape(tp - 1) == (4096, columns)


# What does not fit.


def _heads_not_divided() -> None:
    parallel(tiny_model(), Layout(1, 3, 1).mesh())


def _called_with(**changes: Any) -> None:
    mesh = Layout(1, 2, 1).mesh()
    whole, _ = batches_of(ROWS["an image next to text"])
    for name, values in changes.items():
        whole[name] = values[mesh.tp_rank]
    parallel(tiny_model(), mesh)(**whole)


def _other_images() -> None:
    high = [[torch.full((3, 56, 56), float(rank))] for rank in range(2)]
    _called_with(cross_images=[[image, []] for image in high])


def _fewer_rows() -> None:
    images = batches_of(ROWS["an image next to text"])[0]["images"]
    _called_with(images=[images, images[:1]])


def _wrong_types() -> None:
    types = batches_of(ROWS["an image next to text"])[0]["token_type_ids"]
    _called_with(token_type_ids=[types + 1, types + 1])


def _no_images() -> None:
    _called_with(images=[None, None])


def _without_hook_point() -> None:
    model = tiny_model()
    del model.model.vision.linear_proj.act1
    del model.model.layers[1].cross_attn.num_heads
    del model.model.cross_vision.vit.model.blocks[0].attn
    parallel(model, Layout(1, 2, 1).mesh())


def _with_bias() -> None:
    model = tiny_model()
    mlp = model.model.layers[0].mlp.vision_mlp
    mlp.down_proj = nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features)
    parallel(model, Layout(1, 2, 1).mesh())


def _late_module() -> None:
    model = parallel(tiny_model(), Layout(1, 2, 1).mesh())
    mlp = model.model.cross_vision.vit.model.blocks[0].mlp
    mlp.w3 = nn.Sequential(mlp.w3, nn.LayerNorm(mlp.w3.out_features))
    model(**batches_of(ROWS["one image"])[0])


def _experts() -> None:
    parallel(tiny_model(), Layout(1, 2, 2).mesh())


REFUSALS = {
    "heads that are not divided": (
        _heads_not_divided,
        3,
        "model.layers.0.self_attn has 4 heads, which tp=3 does not divide",
    ),
    "other images on a rank": (_other_images, 2, "they differ in cross_images[0][0] (other values"),
    "images for other rows on a rank": (_fewer_rows, 2, "images (tp rank 0: list of 2 with digest"),
    "wrong token types": (_wrong_types, 2, "token type 2 at row 0, position"),
    "images and tokens that disagree": (_no_images, 2, "row 0 has 11 image tokens"),
    "names that are missing": (
        _without_hook_point,
        2,
        "names: model.vision.linear_proj.act1, model.cross_vision.vit.model.blocks.0.attn, "
        "model.layers.1.cross_attn.num_heads",
    ),
    "a bias that ranks would add": (_with_bias, 2, "vision_mlp.down_proj has a bias"),
    "a module that came into the high tower": (
        _late_module,
        2,
        "model.cross_vision.vit.model.blocks.0.mlp.w3.1.weight came into",
    ),
    "no experts to deal": (_experts, 2, "ep=2, but no layer of this 'cogagent' has experts"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(case: str) -> None:
    assert_refused(__name__, case)
