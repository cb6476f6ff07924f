"""ZeRO under ``px.Invariant``: the bits of one process without FSDP, on any tp and dp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool
from reference import mesh_of, refusal
from reference_leaves import (
    KINDS,
    ROWS,
    Bits,
    Layout,
    as_a_chain,
    assert_bits,
    check_layouts,
    check_resume,
    leaf_batch,
    of_one_process,
    part_of,
    sweep,
    train,
)

import parallel_ext as px
from parallel_ext.nn import leaf_sums
from parallel_ext.training import gradients

LAYOUTS = [(2, 1, 2), (3, 1, 3), (4, 1, 3), (4, 2, 2), (4, 2, 3)]


@sweep(["odd", "tied", "bf16", "qwen3", "phi3"], LAYOUTS, often=[(4, 2, 2)])
def test_any_layout_has_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    check_layouts(case, "", layouts)


EXPERTS = [
    *((2, (1, 2), 2), (4, (1, 2), 3), (3, (1, 3), 2), (4, (2, 4), 3), (3, (1, 1), 3)),
    *((4, (2, 2), 2), (4, (2, 1), 3)),
]
"""Experts over dp ranks, with rows over edp ranks or without; over tp ranks, or some of these."""


MIXTURES = ["mixtral, an idle rank", "balanced qwen3_moe", "qwen2_moe"]


def test_experts_over_tp_ranks_have_the_bits_of_one_process() -> None:
    check_layouts("mixtral", "", [(4, (2, 2), 2)])


@sweep(MIXTURES, EXPERTS, often=[(4, (1, 2), 3)])
def test_experts_on_any_ranks_have_the_bits_of_one_process(
    case: str, layouts: Sequence[Layout]
) -> None:
    check_layouts(case, "", layouts)


WAYS_OF_EXPERTS = [
    *("autocast, reentrant checkpointing", "accumulation", "ranks without rows"),
    *("adapter, checkpointing", "forced skewed"),
]


@sweep(WAYS_OF_EXPERTS, [(4, (1, 2), 2), (3, (1, 3), 3), (4, (2, 2), 3)], often=[(3, (1, 3), 3)])
def test_ways_to_train_experts_have_the_bits_of_one_process(
    case: str, layouts: Sequence[Layout]
) -> None:
    check_layouts("mixtral", case, layouts)


def test_a_loop_of_ones_own_has_the_balance_loss_of_train_leaves() -> None:
    found = pool(3).run(train, "balanced mixtral", (1, 3), 3, "own loop")
    assert_bits(found, of_one_process("balanced mixtral"))


@sweep(
    ["mixtral"],
    [
        *((4, (2, 2), 3), (4, (2, 1), 2), (2, 1, 2)),
        *((4, (1, 2), 3), (3, (1, 3), 2), (4, (2, 4), 2)),
    ],
    often=[(4, (2, 2), 3), (4, (1, 2), 3)],
)
def test_an_adapter_on_experts_has_the_bits_of_one_process(
    case: str, layouts: Sequence[Layout]
) -> None:
    check_layouts(case, "adapter on experts", layouts)


WAYS = [
    *("accumulation", "own loop", "ranks without rows"),
    *("autocast, checkpointing", "adapter, reentrant checkpointing"),
]


@sweep(WAYS, [(3, 1, 2), (4, 2, 3)], often=[(4, 2, 3)])
def test_ways_to_train_have_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    check_layouts("odd", case, layouts)


def test_a_run_resumes_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    check_resume("odd", tmp_path, [((4, 2, 3), (3, 1, 2)), ((2, 2, 0), (4, 2, 2))])
    moves = [((4, (1, 2), 3), (3, (1, 3), 2)), ((4, (2, 4), 2), (2, (1, 2), 0))]
    check_resume("mixtral", tmp_path, moves)


def _chained(*args: Any) -> Bits:
    """With each leaf added to the sum of those before."""
    with mock.patch.object(leaf_sums, "push", as_a_chain):
        return train(*args)


def _of_blocks_of_ranks(*args: Any) -> Bits:
    """With the norm of the rows that each rank holds."""
    with mock.patch.object(gradients, "gather_rows", lambda shard, layout, mesh: (shard, layout)):
        return train(*args)


@pytest.mark.parametrize("broken", [_chained, _of_blocks_of_ranks])
def test_the_tests_above_notice_broken_code(broken: Any) -> None:
    with pytest.raises(AssertionError):
        check_layouts("odd", "", [(2, 1, 2)], broken)


def _refusals() -> list[str]:
    mesh, tiny = mesh_of(tp=1), KINDS["odd"]
    whole = leaf_batch(tiny.vocab_size, 0)
    invariant = px.Invariant(8, leaves=2)
    model = px.data_parallel(px.parallelize(tiny.model(), mesh, invariant=invariant), mesh, 3)
    # Gradients of before, which stay.
    px.train_leaves(model, whole)
    before = [parameter.grad.full_tensor() for parameter in model.parameters()]

    def loop(*bodies: Any) -> None:
        with px.leaves(model, ROWS) as own:
            for leaf in own:
                part = part_of(whole, leaf)
                for body in bodies:
                    body(own, model(**part, num_items_in_batch=20).loss)

    def right(own: Any, loss: Any) -> None:
        own.backward(loss)

    found = [
        refusal(lambda: model(**whole).loss.backward()),
        refusal(lambda: loop(right, right)),
        refusal(lambda: loop(lambda own, loss: loss.backward(), right)),
        refusal(lambda: loop(lambda own, loss: None)),
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
        "needs px.train_leaves",
        "add its losses before",
        "in which FSDP sums each gradient once",
        "without a backward(loss)",
    ]
    pool(2).assert_says(_refusals, words=words)
