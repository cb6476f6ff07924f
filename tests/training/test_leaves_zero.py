"""ZeRO under ``px.Invariant``: the bits of one process without FSDP, on any tp and dp."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool
from reference import mesh_of
from test_leaves import BITS, KINDS, ROWS, STEPS, _batch

import parallel_ext as px
from parallel_ext.nn import leaf_sums
from parallel_ext.training import gradients

LAYOUTS = [(2, 1, 2), (3, 1, 3), (4, 1, 3), (4, 2, 2), (4, 2, 3)]
"""Ranks, tp and stage of ZeRO."""


def _bits(model: Any, optimizer: torch.optim.Optimizer, tp_rank: int) -> dict[str, str]:
    """Of the rows of all dp ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for kind, tensor in (
            ("weight", parameter),
            ("gradient", parameter.grad),
            ("moment", optimizer.state[parameter]["exp_avg_sq"]),
        ):
            tensor = tensor.detach()
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            data = full.contiguous().flatten().view(torch.uint8).numpy()
            found[f"{kind} of {name} at {tp_rank}"] = hashlib.sha256(data).hexdigest()
    return found


def _train(
    kind: str,
    tp: int,
    zero: int = 0,
    how: str = "",
    steps: Sequence[int] = range(STEPS),
    root: Path | None = None,
) -> BITS:
    """Losses and norms, the digest, and what this rank's dp ranks hold, after steps."""
    tiny, mesh = KINDS[kind], mesh_of(tp=tp)
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=5))
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
    if "adapter" in how:
        import peft

        config = px.LoraConfig(r=3, lora_dropout=0.2, target_modules="all-linear")
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config).train()
    if zero:
        px.data_parallel(model, mesh, zero)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    if root is not None and steps[0] > 0:
        px.load_checkpoint(root, model, optimizer)
    log = []
    for step in steps:
        optimizer.zero_grad()
        whole = _batch(tiny.vocab_size, step)
        if how == "ranks without rows":
            whole = {name: value[:2] for name, value in whole.items()}
        count = (whole["labels"][:, 1:] != -100).sum()
        if how == "accumulation":
            parts = [{n: v[a:b] for n, v in whole.items()} for a, b in ((0, 3), (3, ROWS))]
            loss = sum(px.train_leaves(model, p | {"num_items_in_batch": count}) for p in parts)
        elif how == "own loop":
            with px.leaves(model, rows=ROWS) as own:
                for leaf in own:
                    part = {name: value[leaf] for name, value in whole.items()}
                    own.backward(model(**part, num_items_in_batch=count).loss)
            loss = own.loss
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
                loss = px.train_leaves(model, whole)
        norm = (
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if how == "own loop"
            else px.clip_grad_norm_(model, 0.5)
        )
        log.append((loss.item().hex(), norm.item().hex()))
        optimizer.step()
    if root is not None and steps[-1] < STEPS - 1:
        px.save_checkpoint(root, steps[-1] + 1, model, optimizer)
    return log, px.digest(model), _bits(model, optimizer, mesh.tp_rank)


def _assert_bits(results: Sequence[BITS], of_one: dict[int, Sequence[BITS]], tp: int) -> None:
    """Compare with one process, and with what plain tp ranks without dp hold."""
    ((log, digest, _),) = of_one[1]
    held: dict[str, str] = {}
    for _, _, own in of_one[tp]:
        held |= own
    for own_log, own_digest, own in results:
        assert own_log == log
        assert own_digest == digest
        assert own.items() <= held.items()


def _check(kind: str, how: str, layouts: Sequence[tuple[int, int, int]]) -> None:
    whole: dict[int, Sequence[BITS]] = {}
    for ranks, tp, zero in layouts:
        for size in {1, tp} - whole.keys():
            whole[size] = pool(size).run(_train, kind, size, 0, how)
        _assert_bits(pool(ranks).run(_train, kind, tp, zero, how), whole, tp)


@pytest.mark.parametrize("kind", ["odd", "tied", "bf16", "qwen3"])
def test_any_layout_has_the_bits_of_one_process(kind: str) -> None:
    _check(kind, "", LAYOUTS)


WAYS = [
    "checkpointing",
    "reentrant checkpointing",
    "accumulation",
    "own loop",
    "ranks without rows",
    "autocast",
    "autocast, checkpointing",
    "adapter",
    "adapter, checkpointing",
]


@pytest.mark.parametrize("how", WAYS)
def test_ways_to_train_have_the_bits_of_one_process(how: str) -> None:
    _check("odd", how, [(3, 1, 2), (4, 2, 3)])


def test_a_run_resumes_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    of_one = {size: pool(size).run(_train, "odd", size) for size in (1, 2)}
    ((log, digest, held),) = of_one[1]
    of_one[1] = [(log[2:], digest, held)]
    layouts = ((4, 2, 3), (3, 1, 2)), ((2, 2, 0), (4, 2, 2)), ((3, 1, 2), (2, 1, 0))
    for (saving, tp, zero), (loading, other, stage) in layouts:
        root = tmp_path / f"{saving} to {loading}"
        pool(saving).run(_train, "odd", tp, zero, "", (0, 1), root)
        resumed = pool(loading).run(_train, "odd", other, stage, "", (2,), root)
        _assert_bits(resumed, of_one, other)


def _as_a_chain(nodes: list, node: Any, count: int, add: Any) -> None:
    """Instead of the tree: each leaf added to the sum of those before."""
    if nodes:
        _, width, value = nodes.pop()
        node = 0, width + node[1], add(value, node[2])
    nodes.append(node)


def _chained(*args: Any) -> BITS:
    with mock.patch.object(leaf_sums, "push", _as_a_chain):
        return _train(*args)


def _of_blocks_of_ranks(*args: Any) -> BITS:
    """With the norm of the rows that each rank holds."""
    with mock.patch.object(gradients, "gather_rows", lambda shard, layout, mesh: (shard, layout)):
        return _train(*args)


@pytest.mark.parametrize("broken", [_chained, _of_blocks_of_ranks])
def test_the_tests_above_notice_broken_code(broken: Any) -> None:
    of_one = {1: pool(1).run(_train, "odd", 1)}
    with pytest.raises(AssertionError):
        _assert_bits(pool(2).run(broken, "odd", 1, 2), of_one, 1)


def _refusals() -> list[str]:
    mesh, tiny = mesh_of(tp=1), KINDS["odd"]
    whole = _batch(tiny.vocab_size, 0)
    invariant = px.Invariant(8, leaves=2)
    model = px.data_parallel(px.parallelize(tiny.model(), mesh, invariant=invariant), mesh, 3)
    mixture = px.parallelize(KINDS["mixtral"].model(), mesh, invariant=invariant)
    # Gradients of before, which stay.
    px.train_leaves(model, whole)
    before = [parameter.grad.full_tensor() for parameter in model.parameters()]

    def loop(*bodies: Any) -> None:
        with px.leaves(model, ROWS) as own:
            for leaf in own:
                part = {name: value[leaf] for name, value in whole.items()}
                for body in bodies:
                    body(own, model(**part, num_items_in_batch=20).loss)

    def refused(function: Any) -> str:
        try:
            function()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "nothing was raised"

    def right(own: Any, loss: Any) -> None:
        own.backward(loss)

    found = [
        refused(lambda: px.data_parallel(mixture, mesh)),
        refused(lambda: model(**whole).loss.backward()),
        refused(lambda: loop(right, right)),
        refused(lambda: loop(lambda own, loss: loss.backward(), right)),
        refused(lambda: loop(lambda own, loss: None)),
    ]
    after = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    with px.no_sync(model):
        loop(right)
    after = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert not any(map(torch.equal, before, after))
    return found


def test_what_is_not_served_is_refused_and_leaves_the_gradients() -> None:
    words = [
        "does not shard mixtures",
        "needs px.train_leaves",
        "add its losses before",
        "in which FSDP sums each gradient once",
        "without a backward(loss)",
    ]
    for texts in pool(2).run(_refusals):
        for text, word in zip(texts, words, strict=True):
            assert word in text, text
