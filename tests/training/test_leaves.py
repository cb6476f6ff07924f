"""The same bits on any tp and dp: losses, norms, weights and moments of steps of leaves."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import pool
from reference import (
    FLOOR,
    Tiny,
    difference,
    gradients_of,
    mesh_of,
    parallel,
    refusal,
    shard_differences,
    worst,
)
from reference_leaves import (
    INVARIANT,
    KINDS,
    ROWS,
    Bits,
    Layout,
    as_a_chain,
    assert_bits,
    check_layouts,
    check_resume,
    has_experts,
    leaf_batch,
    leaf_mesh,
    of_one_process,
    part_of,
    sweep,
    train,
)
from reference_mixtral import TinyMixtral, TinyQwen2Moe

import parallel_ext as px
from parallel_ext.models import SPECS
from parallel_ext.nn.blocks import BlockExperts, replicated_linear
from parallel_ext.parallel.invariant import check_invariant
from parallel_ext.sharding.layout import split
from parallel_ext.sharding.tree import push
from parallel_ext.training import leaf_loop, leaf_runs

TOGETHER = [(2, 1, 0), (3, 1, 0), (4, 1, 0), (4, 2, 0), (3, 3, 0)]
APART = [
    *((2, (1, 2), 0), (4, (1, 2), 0), (4, (1, 4), 0), (3, (1, 3), 0)),
    *((4, (2, 4), 0), (2, (2, 1), 0), (4, (2, 1), 0), (4, (4, 2), 0)),
]
"""Experts over dp ranks, over all tp ranks of these, or over some of the tp ranks."""


LAYOUTS = {
    "odd": [(3, 1, 0), (4, 2, 0)],
    **dict.fromkeys(["tied", "bf16", "qwen3", "phi3"], [(4, 2, 0)]),
    "mixtral": [(3, 1, 0), (4, 2, 0), (4, (1, 2), 0), (4, (2, 4), 0)],
    **dict.fromkeys(["bf16 qwen2_moe", "qwen3_moe"], [(4, (1, 2), 0)]),
    **dict.fromkeys(["balanced mixtral", "mixtral, an idle rank"], [(4, (1, 2), 0)]),
    **dict.fromkeys(["qwen2_moe", "mixtral, one expert", "bf16 dots1"], [(4, (2, 4), 0)]),
    "llama4": [(4, (2, 4), 0)],
    "glm4_moe": [(3, 1, 0), (4, (1, 2), 0), (4, (2, 4), 0)],
    "balanced qwen3_moe": [(4, 2, 0), (4, (2, 4), 0)],
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts_have_the_bits_of_one_process(kind: str) -> None:
    check_layouts(kind, "", LAYOUTS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_layouts_have_the_bits_of_one_process(kind: str) -> None:
    check_layouts(kind, "", TOGETHER + APART * has_experts(kind))


ON_EIGHT = {
    "bf16": [(8, 8, 0), (8, 2, 0), (8, 2, 2)],
    "odd": [(8, 2, 3)],
    "bf16 mixtral": [
        *((8, (8, 8), 0), (8, (2, 4), 0), (8, (4, 4), 0), (8, (2, 8), 2), (8, (8, 4), 0))
    ],
    "bf16 qwen2_moe": [(8, (8, 4), 0), (8, (2, 4), 3)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_EIGHT)
def test_eight_ranks_have_the_bits_of_one_process(kind: str) -> None:
    check_layouts(kind, "", ON_EIGHT[kind])


WAYS = [
    *("reentrant checkpointing", "autocast, checkpointing"),
    *("accumulation", "ranks without rows"),
]


@sweep(WAYS, [(3, 1, 0), (4, 2, 0)], often=[(4, 2, 0)])
def test_ways_to_train_have_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    check_layouts("odd", case, layouts)


@sweep(WAYS, [(3, 1, 0), (4, 2, 0), *APART], often=[(4, (1, 2), 0)])
def test_ways_to_train_a_mixture_have_the_bits_of_one_process(
    case: str, layouts: Sequence[Layout]
) -> None:
    check_layouts("mixtral", case, layouts)


@pytest.mark.parametrize("how", ["own logits", "own logits, adapter on the head"])
def test_a_loss_of_logits_has_the_bits_of_one_process(how: str) -> None:
    check_layouts("odd", how, [(3, 3, 0), (4, 2, 0)])


@pytest.mark.parametrize("how", ["reentrant checkpointing", "ranks without rows"])
def test_a_balance_loss_has_the_bits_of_one_process_so(how: str) -> None:
    check_layouts("balanced mixtral", how, [(4, (2, 4), 0)])


def test_an_adapter_beside_experts_has_the_bits_of_one_process() -> None:
    check_layouts("mixtral", "adapter", [(4, (1, 2), 0), (4, (2, 4), 0)])


@sweep(
    [
        *(("mixtral, an idle rank", ""), ("bf16 mixtral", "")),
        *(("mixtral", ", reentrant checkpointing"), ("balanced mixtral", ", autocast")),
    ],
    [(4, (1, 2), 0), (4, (1, 4), 0), (3, (1, 3), 0), (4, (2, 4), 0)],
    often=[(4, (2, 4), 0)],
)
def test_an_adapter_on_experts_over_dp_ranks_has_the_bits_of_one_process(
    case: tuple[str, str], layouts: Sequence[Layout]
) -> None:
    kind, how = case
    check_layouts(kind, f"adapter on experts{how}", layouts)


def test_an_adapter_on_a_shared_expert_has_the_bits_of_one_process() -> None:
    check_layouts("qwen2_moe", "adapter on all linears", [(4, (1, 4), 0), (4, (2, 4), 2)])


def _loss_with_dropout(leaves: int) -> float:
    tiny = TinyQwen2Moe()
    model = parallel(tiny.model(), mesh_of(), invariant=px.Invariant(4, leaves=leaves))
    torch.manual_seed(3)
    config = px.LoraConfig(
        r=3, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False
    )
    model = peft.get_peft_model(model, config).train()
    return px.train_leaves(model, leaf_batch(tiny.vocab_size, 0)).item()


def test_dropout_before_a_shared_expert_knows_places_in_the_batch() -> None:
    ((whole,), (of_leaves,)) = (pool(1).run(_loss_with_dropout, leaves) for leaves in (1, 4))
    assert abs(of_leaves / whole - 1) < FLOOR[torch.float64]


def test_an_adapter_on_experts_resumes_on_other_layouts(tmp_path: Path) -> None:
    moves = [((4, (2, 4), 0), (3, (1, 3), 0)), ((2, (2, 1), 0), (4, (1, 2), 2))]
    check_resume("mixtral", tmp_path, moves, "adapter on experts")


def _choices(sides: tuple[int, int]) -> list[list[int]]:
    tiny = KINDS["balanced mixtral"]
    mesh = leaf_mesh("balanced mixtral", sides)
    model = px.parallelize(tiny.model(), mesh, invariant=INVARIANT)
    with px.RoutingMetrics(model) as metrics:
        px.train_leaves(model, leaf_batch(tiny.vocab_size, 0))
        metrics.step(0)
    return metrics.choices


def test_routing_metrics_count_each_leaf_once() -> None:
    (whole,) = pool(1).run(_choices, (1, 1))
    assert [sum(of_layer) for of_layer in whole] == [ROWS * 11] * 2
    for choices in pool(4).run(_choices, (1, 2)):
        assert choices == whole


@pytest.mark.parametrize("rule", ["balanced", "skewed"])
def test_forced_routing_has_the_bits_of_one_process(rule: str) -> None:
    check_layouts("mixtral", f"forced {rule}", [(4, (2, 4), 0)])


@pytest.mark.parametrize(("kind", "layout"), [("tied", (3, 3, 0)), ("qwen3", (4, 2, 0))])
def test_bf16_autocast_has_the_bits_of_one_process(kind: str, layout: Layout) -> None:
    check_layouts(kind, "autocast", [layout])
    assert of_one_process(kind, "autocast")[0] != of_one_process(kind)[0]


@pytest.mark.parametrize(("kind", "sides"), [("odd", 2), ("balanced mixtral", (1, 2))])
def test_a_loop_of_ones_own_has_the_bits_of_train_leaves(kind: str, sides: Any) -> None:
    assert_bits(pool(4).run(train, kind, sides, 0, "own loop"), of_one_process(kind))


MOVES = {
    "odd": [((4, 2, 0), (3, 1, 0)), ((2, 1, 0), (3, 3, 0))],
    "phi3": [((4, 2, 0), (3, 3, 0))],
    "mixtral": [((4, (2, 4), 0), (3, (1, 3), 0)), ((2, (1, 2), 0), (4, (2, 1), 0))],
}


@pytest.mark.parametrize("kind", MOVES)
def test_a_run_resumes_on_other_layouts_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    check_resume(kind, tmp_path, MOVES[kind])


def _warnings_of_a_load(root: Path) -> list[list[str]]:
    """What a load says to models of the same and of other bits."""
    tiny, mesh = KINDS["odd"], mesh_of(tp=1)
    found = []
    for invariant in (INVARIANT, px.Invariant(8, leaves=4), None):
        model = px.parallelize(tiny.model(), mesh, invariant=invariant)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            px.load_checkpoint(root, model)
        found.append([str(each.message) for each in told if "not in bits" in str(each.message)])
    return found


def test_a_load_warns_of_other_bits(tmp_path: Path) -> None:
    pool(2).run(train, "odd", 2, 0, "", (0,), tmp_path)
    for same, other, ordinary in pool(2).run(_warnings_of_a_load, tmp_path):
        assert same == []
        assert "px.Invariant(blocks=8, leaves=5), torch" in other[0]
        assert "resumes with px.Invariant(blocks=8, leaves=4)" in other[0]
        assert "resumes with ordinary sums" in ordinary[0]


def _chained(*args: Any) -> Bits:
    """With each leaf added to the sum of those before."""
    with (
        mock.patch.object(leaf_loop, "push", as_a_chain),
        mock.patch.object(leaf_runs, "push", as_a_chain),
    ):
        return train(*args)


def test_the_tests_above_notice_a_chain_of_leaves() -> None:
    (whole,) = pool(1).run(_chained, "odd", 1)
    with pytest.raises(AssertionError):
        assert_bits(pool(2).run(_chained, "odd", 1), whole)


def _joined(*args: Any) -> Bits:
    """With the choices of a token summed on each rank, and then over the ranks."""
    with mock.patch.object(BlockExperts, "joins_choices", True):
        return train(*args)


def test_the_tests_above_notice_choices_summed_by_rank() -> None:
    (whole,) = pool(1).run(_joined, "mixtral", 1)
    with pytest.raises(AssertionError):
        assert_bits(pool(2).run(_joined, "mixtral", 2), whole)


def _one_product(
    self: BlockExperts, rows: torch.Tensor, attribute: str, route: Any, plan: Any, adapters: Any
) -> torch.Tensor:
    """An expert's rows of all leaves at once, the gradient halved between the two."""
    copies = self.copies(attribute)
    weights = (sum(copies) / len(copies)).unbind()
    of_experts = rows.split(plan.rows_per_expert(self.group.rank))
    return torch.cat([*map(replicated_linear, of_experts, weights)])


def _leaves_at_once(*args: Any) -> Bits:
    with mock.patch.object(BlockExperts, "_linear", _one_product):
        return train(*args)


def test_the_tests_above_notice_a_product_of_several_leaves() -> None:
    (whole,) = pool(1).run(_leaves_at_once, "mixtral", 1)
    assert_bits(pool(2).run(_leaves_at_once, "mixtral", (1, 1)), whole)
    with pytest.raises(AssertionError):
        assert_bits(pool(2).run(_leaves_at_once, "mixtral", (1, 2)), whole)


def _recursive(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return f"({_recursive(values[:half])}{_recursive(values[half:])})"


@settings(max_examples=300)
@given(count=st.integers(1, 70), ranks=st.integers(1, 12))
def test_nodes_of_any_ranks_make_the_tree(count: int, ranks: int) -> None:
    def add(left: str, right: str) -> str:
        return f"({left}{right})"

    merged: list = []
    for first, last in split(count, ranks):
        own: list = []
        for number in range(first, last):
            push(own, (number, 1, f"{number},"), count, add)
        assert len(own) <= 2 * max(1, (count - 1).bit_length())
        for node in own:
            push(merged, node, count, add)
    ((_, _, value),) = merged
    assert value == _recursive([f"{number}," for number in range(count)])


MIXTURE = TinyMixtral(num_experts=5, top_k=3)
BALANCED = TinyMixtral(num_experts=5, top_k=3, balance=True)
SHARED = TinyQwen2Moe(balance=True)


def _differences(tiny: Tiny | TinyMixtral, tp: int, ep: int) -> tuple[float, dict[str, float]]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(tp=tp, ep=ep), invariant=px.Invariant(4, leaves=4))
    of_batch = leaf_batch(tiny.vocab_size, 0)
    loss = px.train_leaves(model, of_batch)
    expected = reference(**of_batch).loss
    expected.backward()
    differences = shard_differences(model, gradients_of(reference), True)
    ids = of_batch["input_ids"]
    with torch.no_grad():
        logits, of_reference = (each.eval()(input_ids=ids).logits for each in (model, reference))
    differences["logits in eval mode"] = difference(logits, of_reference)
    return (loss / expected - 1).abs().item(), differences


@pytest.mark.parametrize(
    ("tiny", "ranks", "tp", "ep"),
    [
        *((Tiny(), 1, 1, 1), (Tiny(), 4, 2, 1)),
        *((MIXTURE, 4, 2, 2), (MIXTURE, 4, 1, 2), (MIXTURE, 4, 2, 1)),
        *((BALANCED, 3, 1, 1), (BALANCED, 4, 1, 4), (SHARED, 4, 2, 1), (SHARED, 4, 2, 4)),
    ],
)
def test_gradients_are_those_of_the_plain_model(
    tiny: Tiny | TinyMixtral, ranks: int, tp: int, ep: int
) -> None:
    for loss, gradients in pool(ranks).run(_differences, tiny, tp, ep):
        assert loss < FLOOR[torch.float64]
        assert worst(gradients) < (FLOOR[torch.float64], "")


def _balance_without_labels(tp: int, ep: int) -> tuple[float, dict[str, float]]:
    reference = BALANCED.model()
    model = parallel(reference, mesh_of(tp=tp, ep=ep), invariant=px.Invariant(4, leaves=4))
    inputs = leaf_batch(BALANCED.vocab_size, 0)
    del inputs["labels"]
    with px.leaves(model, ROWS, inputs) as own:
        for leaf in own:
            output = model(**part_of(inputs, leaf))
            own.backward(output.aux_loss + 0.0 * output.logits.sum())
    expected = reference(**inputs)
    (expected.aux_loss + 0.0 * expected.logits.sum()).backward()
    differences = shard_differences(model, gradients_of(reference), True)
    return (own.loss / expected.aux_loss - 1).abs().item(), differences


def test_a_leaf_without_labels_has_its_share_of_the_balance_loss() -> None:
    for loss, gradients in pool(4).run(_balance_without_labels, 1, 4):
        assert loss < FLOOR[torch.float64]
        assert worst(gradients) < (FLOOR[torch.float64], "")


def _refusals() -> list[str]:
    mesh = mesh_of(tp=1)
    tiny = KINDS["odd"]
    whole = leaf_batch(tiny.vocab_size, 0)

    def made(**options: Any) -> Any:
        return px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, **options))

    def in_fp16() -> None:
        model = made(leaves=2).half()
        with px.leaves(model, ROWS):
            model(whole["input_ids"])

    model = made(leaves=2)
    own = {name: value + mesh.rank for name, value in whole.items()}
    short = whole | {"labels": whole["labels"][:3]}
    found = [
        refusal(made),
        refusal(lambda: px.Invariant(8, leaves=0)),
        refusal(lambda: px.train_leaves(px.parallelize(tiny.model(), mesh), whole)),
        refusal(lambda: px.train_leaves(made(leaves=2).eval(), whole)),
        refusal(lambda: px.train_leaves(model, {"input_ids": whole["input_ids"]})),
        refusal(lambda: px.train_leaves(model, short)),
        refusal(lambda: px.train_leaves(model, whole if mesh.rank else short)),
        refusal(lambda: px.train_leaves(model, own)),
        refusal(lambda: model(**whole).loss.backward()),
        refusal(in_fp16),
    ]
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def _mistakes_in_own_loops() -> list[str]:
    mesh = mesh_of(tp=1)
    tiny = KINDS["odd"]
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=4))
    whole = leaf_batch(tiny.vocab_size, 0)
    px.train_leaves(model, whole)
    before = [parameter.grad.clone() for parameter in model.parameters()]

    def part(leaf: slice, **options: Any) -> dict[str, Any]:
        return part_of(whole, leaf) | options

    def loop(body: Any, rows: int = ROWS) -> None:
        with px.leaves(model, rows) as own:
            for leaf in own:
                if body(own, leaf):
                    break

    def again(own: Any, leaf: slice) -> None:
        right(own, leaf)
        next(iter(own))

    def right(own: Any, leaf: slice) -> None:
        own.backward(model(**part(leaf, num_items_in_batch=20)).loss)

    def nested(own: Any, leaf: slice) -> None:
        px.train_leaves(model, whole)

    def late() -> None:
        with px.leaves(model, ROWS) as own:
            for leaf in own:
                right(own, leaf)
            own.backward(model(**part(slice(None), num_items_in_batch=20)).loss)

    teacher = px.parallelize(tiny.model(), mesh).eval().requires_grad_(False)

    def of_another(own: Any, leaf: slice) -> None:
        right(own, leaf)
        teacher(**part(leaf, num_items_in_batch=20))

    mistakes = (
        (lambda own, leaf: own.backward(model(**part(leaf)).loss), ROWS),
        (lambda own, leaf: None, ROWS),
        (lambda own, leaf: True, ROWS),
        (again, ROWS),
        (nested, ROWS),
        (of_another, ROWS),
        (right, 0),
        (right, ROWS + mesh.rank),
    )
    found = [refusal(partial(loop, body, rows)) for body, rows in mistakes]
    found.append(refusal(late))
    # Gradients are as they were, and a loop that is right runs.
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    loop(right)
    assert not any(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    return found


def test_mistakes_in_own_loops_are_said_and_leave_the_gradients() -> None:
    words = [
        "needs num_items_in_batch=",
        "without a backward(loss)",
        "before the last leaf",
        "this loop has run already",
        "those of another batch are running",
        "labels inside of px.leaves of another model",
        "at least 1, got 0",
        "every rank passes those of the whole batch",
        "outside of the loop",
    ]
    pool(2).assert_says(_mistakes_in_own_loops, words=words)


def test_experts_on_parts_of_tp_groups_are_refused() -> None:
    sides = {"dp_size": 3, "tp_size": 2, "ep_size": 3}
    model, mesh = TinyMixtral().model(), SimpleNamespace(**sides, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="divides the other, but the mesh has ep=3 and tp=2"):
        check_invariant(model, SPECS["mixtral"], mesh, leaves=3)


def _long_leaf() -> None:
    model = px.parallelize(KINDS["qwen2_moe"].model(), mesh_of(), invariant=INVARIANT)
    gate = model.model.layers[1].mlp.shared_expert_gate
    assert gate(torch.zeros(32768, 32)).shape == (32768, 1)
    gate(torch.zeros(32769, 32))


def test_leaves_too_long_for_the_gate_of_a_shared_expert_are_refused() -> None:
    pool(1).assert_raises(_long_leaf, words="at most 32768 tokens, but this one has 32769")


def _refusals_of_mixtures() -> list[str]:
    def train(tiny: TinyMixtral) -> None:
        whole = leaf_batch(tiny.vocab_size, 0)
        invariant = px.Invariant(8, leaves=2)
        model = px.parallelize(tiny.model(), mesh_of(tp=2, ep=2), invariant=invariant)
        with px.leaves(model, ROWS) as own:
            for leaf in own:
                own.backward(model(**part_of(whole, leaf), num_items_in_batch=20).loss)

    mixtures = (
        TinyMixtral(num_experts=1, top_k=1, dtype=torch.float32),
        TinyMixtral(dtype=torch.float32, options=(("router_jitter_noise", 0.1),)),
        TinyMixtral(dtype=torch.float32, options=(("hidden_act", "gelu"),)),
        TinyMixtral(dtype=torch.float32, balance=True),
    )
    return [refusal(partial(train, tiny)) for tiny in mixtures]


def test_mixtures_that_are_not_served_are_refused_by_name() -> None:
    words = [
        "ep=2 is more than the 1 experts",
        "router_jitter_noise",
        "the activation SiLU",
        "enter px.leaves(model, rows, batch)",
    ]
    pool(2).assert_says(_refusals_of_mixtures, words=words)


def test_what_is_not_served_is_refused_by_name() -> None:
    words = [
        "fewer parts than dp=2",
        "leaves must be an integer of at least 1, not 0",
        "px.parallelize(..., invariant=)",
        "model.train()",
        "has no labels",
        "must have its 3 rows",
        "must have its 3 rows",
        "every rank passes those of the whole batch",
        "needs px.train_leaves",
        "does not serve training in fp16",
    ]
    pool(2).assert_says(_refusals, words=words)
