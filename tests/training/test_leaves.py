"""The same bits on any tp and dp: losses, norms, weights and moments of steps of leaves."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
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
    batch,
    difference,
    gradients_of,
    mesh_of,
    parallel,
    shard_differences,
    worst,
)
from reference_mixtral import TinyMixtral, TinyQwen3Moe
from test_specs import OfSpec

import parallel_ext as px
from parallel_ext.models import SPECS
from parallel_ext.nn.blocks import BlockExperts, replicated_linear
from parallel_ext.nn.sharded_module import named_shards
from parallel_ext.parallel.invariant import check_invariant
from parallel_ext.sharding.blocks import own_blocks
from parallel_ext.sharding.layout import split
from parallel_ext.training import leaves

KINDS = {
    "odd": Tiny(dtype=torch.float32),
    "tied": Tiny(dtype=torch.float32, tied=True),
    "bf16": Tiny(dtype=torch.bfloat16, heads=8, key_value_heads=4, bias=True),
    "qwen3": OfSpec("qwen3", dtype=torch.float32),
    "mixtral": TinyMixtral(num_experts=5, top_k=3, dtype=torch.float32),
    "bf16 mixtral": TinyMixtral(dtype=torch.bfloat16, heads=8, key_value_heads=4, inner=64),
    "mixtral, an idle rank": TinyMixtral(dtype=torch.float32, skew="an idle rank"),
    "mixtral, one expert": TinyMixtral(dtype=torch.float32, skew="one expert takes all"),
    "balanced mixtral": TinyMixtral(num_experts=5, top_k=1, dtype=torch.float32, balance=True),
    "balanced qwen3_moe": TinyQwen3Moe(
        dtype=torch.bfloat16, balance=True, options=(("head_dim", 8),)
    ),
    "qwen3_moe": TinyQwen3Moe(dtype=torch.float32, tied=True, options=(("head_dim", 8),)),
}
ROWS, STEPS = 7, 3
BITS = tuple[list[tuple[str, str]], str, dict[str, str]]


def _mesh(kind: str, sides: int | tuple[int, int]) -> px.Mesh:
    """Of tp and ep; of one number both, where there are experts."""
    tp, ep = sides if isinstance(sides, tuple) else (sides, sides)
    return mesh_of(tp=tp, ep=ep if isinstance(KINDS[kind], TinyMixtral) else 1)


def _batch(vocab_size: int, step: int) -> dict[str, torch.Tensor]:
    found = batch(vocab_size, ROWS, 11, seed=step)
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["attention_mask"][0, 8:] = 0  # padding in one leaf
    found["labels"] = found["labels"].masked_fill(found["attention_mask"] == 0, -100)
    return found


def _bits(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, str]:
    """Of each block that this rank holds."""
    found = {}
    for name, parameter, layout in named_shards(model):
        first, blocks = 0, ((0, layout.shape[0]),)
        if layout.blocks:
            first, blocks = layout.ranges(rank)[0][0], own_blocks(layout, rank).own
        for kind, tensor in (
            ("weight", parameter),
            ("gradient", parameter.grad),
            ("moment", optimizer.state[parameter]["exp_avg_sq"]),
        ):
            for start, stop in blocks:
                block = tensor.detach().narrow(layout.dim or 0, start, stop - start).contiguous()
                data = block.flatten().view(torch.uint8).numpy()
                found[f"{kind} of {name} from {first + start}"] = hashlib.sha256(data).hexdigest()
    return found


def _train(
    kind: str,
    sides: int | tuple[int, int],
    steps: Sequence[int] = range(STEPS),
    root: Path | None = None,
    how: str = "",
) -> BITS:
    """Losses and norms, the digest, and what this rank holds, after steps on this pool's ranks."""
    tiny, mesh = KINDS[kind], _mesh(kind, sides)
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=5))
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
    if how.startswith("forced"):
        px.force_routing(model, how.removeprefix("forced "))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if root is not None and steps[0] > 0:
        px.load_checkpoint(root, model, optimizer)
    log = []
    for step in steps:
        optimizer.zero_grad()
        whole = _batch(tiny.vocab_size, step)
        if how == "ranks without rows":
            whole = {name: value[:2] for name, value in whole.items()}
        if how == "accumulation":
            count = (whole["labels"][:, 1:] != -100).sum()
            parts = [{n: v[a:b] for n, v in whole.items()} for a, b in ((0, 3), (3, ROWS))]
            loss = sum(px.train_leaves(model, p | {"num_items_in_batch": count}) for p in parts)
        elif how == "own loop":
            count = (whole["labels"][:, 1:] != -100).sum()
            with px.leaves(model, rows=ROWS) as own:
                for leaf in own:
                    part = {name: value[leaf] for name, value in whole.items()}
                    own.backward(model(**part, num_items_in_batch=count).loss)
            loss = own.loss
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=how.startswith("autocast")):
                loss = px.train_leaves(model, whole)
        log.append((loss.item().hex(), px.clip_grad_norm_(model, 0.5).item().hex()))
        optimizer.step()
    if root is not None and steps[-1] < STEPS - 1:
        px.save_checkpoint(root, steps[-1] + 1, model, optimizer)
    return log, px.digest(model), _bits(model, optimizer, mesh.rank)


def _so(how: str, *args: Any) -> BITS:
    return _train(*args, how=how)


def _assert_bits(results: Sequence[BITS], whole: BITS) -> None:
    log, digest, blocks = whole
    for own_log, own_digest, own in results:
        assert (own_log, own_digest) == (log, digest)
        assert {name for name, bits in own.items() if blocks[name] != bits} == set()


LAYOUTS = [(2, 1), (3, 1), (4, 1), (4, 2), (3, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_has_the_bits_of_one_process(kind: str) -> None:
    (whole,) = pool(1).run(_train, kind, 1)
    for ranks, tp in LAYOUTS:
        _assert_bits(pool(ranks).run(_train, kind, tp), whole)


# (ranks, tp, ep): experts over dp ranks, over all tp ranks of these, or over some of the tp ranks.
APART = [(2, 1, 2), (4, 1, 2), (4, 1, 4), (3, 1, 3), (4, 2, 4), (2, 2, 1), (4, 2, 1), (4, 4, 2)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "mixtral" in kind or "moe" in kind])
def test_experts_on_any_ranks_have_the_bits_of_one_process(kind: str) -> None:
    (whole,) = pool(1).run(_train, kind, 1)
    for ranks, tp, ep in APART:
        _assert_bits(pool(ranks).run(_train, kind, (tp, ep)), whole)


WAYS = [
    *("checkpointing", "reentrant checkpointing", "autocast, checkpointing"),
    *("accumulation", "ranks without rows"),
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["odd", "mixtral"])
def test_ways_to_train_have_the_bits_of_one_process(kind: str, how: str) -> None:
    (whole,) = pool(1).run(_so, how, kind, 1)
    for ranks, sides in ((3, 1), (4, 2), (4, (1, 2)), (3, (1, 3)), (4, (2, 4)), (2, (2, 1))):
        if kind == "mixtral" or not isinstance(sides, tuple):
            _assert_bits(pool(ranks).run(_so, how, kind, sides), whole)


@pytest.mark.parametrize("how", ["reentrant checkpointing", "ranks without rows", "autocast"])
def test_a_balance_loss_has_the_bits_of_one_process_so(how: str) -> None:
    (whole,) = pool(1).run(_so, how, "balanced mixtral", 1)
    for ranks, sides in ((3, 1), (4, (2, 4))):
        _assert_bits(pool(ranks).run(_so, how, "balanced mixtral", sides), whole)


def _adapted(sides: tuple[int, int]) -> tuple[list[str], str]:
    """Losses and norms, and the digest, of an adapter beside experts, which are frozen."""
    mesh, tiny = _mesh("mixtral", sides), KINDS["mixtral"]
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=5))
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], lora_dropout=0.2)
    model = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    log = []
    for step in range(2):
        log.append(px.train_leaves(model, _batch(tiny.vocab_size, step)).item().hex())
        log.append(px.clip_grad_norm_(model, 0.5).item().hex())
        optimizer.step()
        optimizer.zero_grad()
    return log, px.digest(model)


def test_an_adapter_beside_experts_has_the_bits_of_one_process() -> None:
    (whole,) = pool(1).run(_adapted, (1, 1))
    for ranks, sides in ((2, (2, 2)), (4, (1, 2)), (4, (2, 4))):
        assert pool(ranks).run(_adapted, sides) == [whole] * ranks


def _choices(sides: tuple[int, int]) -> list[list[int]]:
    tiny = KINDS["balanced mixtral"]
    mesh = _mesh("balanced mixtral", sides)
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=5))
    with px.RoutingMetrics(model) as metrics:
        px.train_leaves(model, _batch(tiny.vocab_size, 0))
        metrics.step(0)
    return metrics.choices


def test_routing_metrics_count_each_leaf_once() -> None:
    (whole,) = pool(1).run(_choices, (1, 1))
    assert [sum(of_layer) for of_layer in whole] == [ROWS * 11] * 2
    for choices in pool(4).run(_choices, (1, 2)):
        assert choices == whole


@pytest.mark.parametrize("rule", ["balanced", "skewed"])
def test_forced_routing_has_the_bits_of_one_process(rule: str) -> None:
    (whole,) = pool(1).run(_so, f"forced {rule}", "mixtral", 1)
    for ranks, sides in ((2, 2), (3, 1), (4, (2, 4))):
        _assert_bits(pool(ranks).run(_so, f"forced {rule}", "mixtral", sides), whole)


@pytest.mark.parametrize("kind", ["tied", "qwen3"])
def test_bf16_autocast_has_the_bits_of_one_process(kind: str) -> None:
    (whole,) = pool(1).run(_so, "autocast", kind, 1)
    (of_fp32,) = pool(1).run(_train, kind, 1)
    assert whole[0] != of_fp32[0]
    for ranks, tp in ((3, 1), (3, 3), (4, 2)):
        _assert_bits(pool(ranks).run(_so, "autocast", kind, tp), whole)


@pytest.mark.parametrize("kind", ["odd", "mixtral"])
def test_a_loop_of_ones_own_has_the_bits_of_train_leaves(kind: str) -> None:
    (whole,) = pool(1).run(_train, kind, 1)
    for ranks, sides in ((1, 1), (3, 1), (4, 2), (4, (1, 2))):
        _assert_bits(pool(ranks).run(_so, "own loop", kind, sides), whole)


@pytest.mark.parametrize("kind", ["odd", "mixtral"])
def test_a_run_resumes_on_other_layouts_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    ((log, digest, held),) = pool(1).run(_train, kind, 1)
    ways = [((4, 2), (3, 1)), ((2, 1), (3, 3))]
    if kind == "mixtral":
        ways = [((4, (2, 4)), (3, (1, 3))), ((2, (1, 2)), (4, (2, 1))), ((2, 1), (3, 3))]
    for (saving, tp), (loading, other) in ways:
        root = tmp_path / f"{saving} to {loading}"
        pool(saving).run(_train, kind, tp, (0, 1), root)
        resumed = pool(loading).run(_train, kind, other, (2,), root)
        _assert_bits(resumed, (log[2:], digest, held))


def _warnings_of_a_load(root: Path) -> list[list[str]]:
    """What a load says to models of the same and of other bits."""
    tiny, mesh = KINDS["odd"], mesh_of(tp=1)
    found = []
    for invariant in (px.Invariant(8, leaves=5), px.Invariant(8, leaves=4), None):
        model = px.parallelize(tiny.model(), mesh, invariant=invariant)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            px.load_checkpoint(root, model)
        found.append([str(each.message) for each in told if "not in bits" in str(each.message)])
    return found


def test_a_load_warns_of_other_bits(tmp_path: Path) -> None:
    pool(2).run(_train, "odd", 2, (0,), tmp_path)
    for same, other, ordinary in pool(2).run(_warnings_of_a_load, tmp_path):
        assert same == []
        assert "px.Invariant(blocks=8, leaves=5) and torch" in other[0]
        assert "goes on with px.Invariant(blocks=8, leaves=4)" in other[0]
        assert "goes on with ordinary sums" in ordinary[0]


def _as_a_chain(nodes: list, node: Any, count: int, add: Any) -> None:
    """Instead of the tree: each leaf added to the sum of those before."""
    if nodes and node[0] == nodes[-1][0] + nodes[-1][1]:
        start, width, value = nodes.pop()
        node = start, width + node[1], add(value, node[2])
    nodes.append(node)


def _chained(*args: Any) -> BITS:
    with mock.patch.object(leaves, "_push", _as_a_chain):
        return _train(*args)


def test_the_tests_above_notice_a_chain_of_leaves() -> None:
    (whole,) = pool(1).run(_chained, "odd", 1)
    with pytest.raises(AssertionError):
        _assert_bits(pool(2).run(_chained, "odd", 1), whole)


def _joined(*args: Any) -> BITS:
    """With the choices of a token summed on each rank, and then over the ranks."""
    with mock.patch.object(BlockExperts, "joins_choices", True):
        return _train(*args)


def test_the_tests_above_notice_choices_summed_by_rank() -> None:
    (whole,) = pool(1).run(_joined, "mixtral", 1)
    with pytest.raises(AssertionError):
        _assert_bits(pool(2).run(_joined, "mixtral", 2), whole)


def _one_product(
    self: BlockExperts, rows: torch.Tensor, attribute: str, plan: Any, adapters: Any
) -> torch.Tensor:
    """An expert's rows of all leaves at once, the gradient halved between the two."""
    copies = self.weights.get(attribute, [getattr(self, attribute)])
    weights = (sum(copies) / len(copies)).unbind()
    of_experts = rows.split(plan.rows_per_expert(self.group.rank))
    return torch.cat([*map(replicated_linear, of_experts, weights)])


def _leaves_at_once(*args: Any) -> BITS:
    with mock.patch.object(BlockExperts, "_linear", _one_product):
        return _train(*args)


def test_the_tests_above_notice_a_product_of_several_leaves() -> None:
    (whole,) = pool(1).run(_leaves_at_once, "mixtral", 1)
    _assert_bits(pool(2).run(_leaves_at_once, "mixtral", (1, 1)), whole)
    with pytest.raises(AssertionError):
        _assert_bits(pool(2).run(_leaves_at_once, "mixtral", (1, 2)), whole)


def _recursive(values: Sequence[str]) -> str:
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return f"({_recursive(values[:half])}{_recursive(values[half:])})"


@settings(max_examples=300, deadline=None)
@given(count=st.integers(1, 70), ranks=st.integers(1, 12))
def test_nodes_of_any_ranks_make_the_tree(count: int, ranks: int) -> None:
    def add(left: str, right: str) -> str:
        return f"({left}{right})"

    merged: list = []
    for first, last in split(count, ranks):
        own: list = []
        for number in range(first, last):
            leaves._push(own, (number, 1, f"{number},"), count, add)
        assert len(own) <= 2 * max(1, (count - 1).bit_length())
        for node in own:
            leaves._push(merged, node, count, add)
    ((_, _, value),) = merged
    assert value == _recursive([f"{number}," for number in range(count)])


MIXTURE = TinyMixtral(num_experts=5, top_k=3)
BALANCED = TinyMixtral(num_experts=5, top_k=3, balance=True)


def _differences(tiny: Tiny | TinyMixtral, tp: int, ep: int) -> tuple[float, dict[str, float]]:
    reference = tiny.model()
    model = parallel(reference, mesh_of(tp=tp, ep=ep), invariant=px.Invariant(4, leaves=4))
    of_batch = _batch(tiny.vocab_size, 0)
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
        *((Tiny(), 1, 1, 1), (Tiny(), 4, 2, 1), (Tiny(), 4, 1, 1)),
        *((MIXTURE, 1, 1, 1), (MIXTURE, 4, 2, 2), (MIXTURE, 4, 1, 2), (MIXTURE, 4, 2, 1)),
        *((BALANCED, 1, 1, 1), (BALANCED, 3, 1, 1), (BALANCED, 4, 1, 4)),
    ],
)
def test_gradients_are_those_of_the_plain_model(
    tiny: Tiny | TinyMixtral, ranks: int, tp: int, ep: int
) -> None:
    for loss, gradients in pool(ranks).run(_differences, tiny, tp, ep):
        assert loss < FLOOR[torch.float64]
        assert worst(gradients) < (FLOOR[torch.float64], "")


def _refusals() -> list[str]:
    mesh = mesh_of(tp=1)
    tiny = KINDS["odd"]
    whole = _batch(tiny.vocab_size, 0)

    def refused(function: Any) -> str:
        try:
            function()
        except (ValueError, RuntimeError, px.DisagreementError) as error:
            return str(error)
        return "nothing was raised"

    def made(**options: Any) -> Any:
        return px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, **options))

    model = made(leaves=2)
    own = {name: value + mesh.rank for name, value in whole.items()}
    short = whole | {"labels": whole["labels"][:3]}
    found = [
        refused(made),
        refused(lambda: px.Invariant(8, leaves=0)),
        refused(lambda: px.train_leaves(px.parallelize(tiny.model(), mesh), whole)),
        refused(lambda: px.train_leaves(made(leaves=2).eval(), whole)),
        refused(lambda: px.train_leaves(model, {"input_ids": whole["input_ids"]})),
        refused(lambda: px.train_leaves(model, short)),
        refused(lambda: px.train_leaves(model, own)),
        refused(lambda: model(**whole).loss.backward()),
    ]
    assert all(parameter.grad is None for parameter in model.parameters())
    return found


def _mistakes_in_own_loops() -> list[str]:
    mesh = mesh_of(tp=1)
    tiny = KINDS["odd"]
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=4))
    whole = _batch(tiny.vocab_size, 0)
    px.train_leaves(model, whole)
    before = [parameter.grad.clone() for parameter in model.parameters()]

    def part(leaf: slice, **options: Any) -> dict[str, Any]:
        return {name: value[leaf] for name, value in whole.items()} | options

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

    found = []
    for body, rows in (
        (lambda own, leaf: own.backward(model(**part(leaf)).loss), ROWS),
        (lambda own, leaf: None, ROWS),
        (lambda own, leaf: True, ROWS),
        (again, ROWS),
        (nested, ROWS),
        (right, 0),
        (right, ROWS + mesh.rank),
    ):
        try:
            loop(body, rows)
        except (ValueError, RuntimeError, px.DisagreementError) as error:
            found.append(str(error))
    try:
        with px.leaves(model, ROWS) as own:
            for leaf in own:
                right(own, leaf)
            own.backward(model(**part(slice(None), num_items_in_batch=20)).loss)
    except RuntimeError as error:
        found.append(str(error))
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
        "can be run once",
        "those of another batch are running",
        "at least 1, got 0",
        "pass the global batch's",
        "outside of the loop",
    ]
    for texts in pool(2).run(_mistakes_in_own_loops):
        for text, word in zip(texts, words, strict=True):
            assert word in text, text


def test_experts_on_parts_of_tp_groups_are_refused() -> None:
    model, mesh = TinyMixtral().model(), SimpleNamespace(dp_size=3, tp_size=2, ep_size=3)
    with pytest.raises(ValueError, match="divides the other, but the mesh has ep=3 and tp=2"):
        check_invariant(model, SPECS["mixtral"], mesh, leaves=3)


def _refusals_of_mixtures() -> list[str]:
    def refused(tiny: TinyMixtral) -> str:
        whole = _batch(tiny.vocab_size, 0)
        try:
            model = px.parallelize(
                tiny.model(), mesh_of(tp=2, ep=2), invariant=px.Invariant(8, leaves=2)
            )
            with px.leaves(model, ROWS) as own:
                for leaf in own:
                    part = {name: value[leaf] for name, value in whole.items()}
                    own.backward(model(**part, num_items_in_batch=20).loss)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    single = torch.float32
    return [
        refused(TinyMixtral(num_experts=1, top_k=1, dtype=single)),
        refused(TinyMixtral(dtype=single, options=(("router_jitter_noise", 0.1),))),
        refused(TinyMixtral(dtype=single, options=(("hidden_act", "gelu"),))),
        refused(TinyMixtral(dtype=single, balance=True)),
    ]


def test_mixtures_that_are_not_served_are_refused_by_name() -> None:
    words = [
        "ep=2 is more than the 1 experts",
        "router_jitter_noise",
        "the activation SiLU",
        "px.leaves does not serve the load balancing loss",
    ]
    for texts in pool(2).run(_refusals_of_mixtures):
        for text, word in zip(texts, words, strict=True):
            assert word in text, text


def test_what_is_not_served_is_refused_by_name() -> None:
    words = [
        "fewer parts than dp=2",
        "leaves must be an integer of at least 1, not 0",
        "px.parallelize(..., invariant=)",
        "model.train()",
        "has no labels",
        "must have its rows",
        "every rank passes the whole batch",
        "needs px.train_leaves",
    ]
    for texts in pool(2).run(_refusals):
        for text, word in zip(texts, words, strict=True):
            assert word in text, text
