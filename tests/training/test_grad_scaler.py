"""fp16 with a scaled loss: all ranks skip the steps that the single process skips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool
from reference import FLOOR, batch, mesh_of, parallel, shard_differences, worst
from reference_mixtral import Layout, batches, spread
from reference_training import LLAMA

import parallel_ext as px
from parallel_ext.interplay import gradients as interplay_gradients

TINY = replace(LLAMA, dtype=torch.float32)


def _optimizer(model: Any, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # unscales by itself


def _step(model: Any, optimizer: Any, scaler: Any, data: dict[str, Any]) -> float:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(**data).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def _train(
    layout: Layout, zero: int | None, name: str, init_scale: float
) -> tuple[list[float], list[float], float]:
    """The scales of both, and how far our parameters are from those of the single process."""
    reference, model, mesh = spread(TINY, layout, zero)
    scalers = [torch.amp.GradScaler("cpu", init_scale, growth_interval=2) for _ in range(2)]
    ours, theirs = _optimizer(model, name), _optimizer(reference, name)
    scales: tuple[list[float], list[float]] = [], []
    for step in range(5):
        whole, own = batches(TINY, layout.dp, seed=step)
        scales[0].append(_step(reference, theirs, scalers[0], whole))
        scales[1].append(_step(model, ours, scalers[1], own[mesh.dp_rank]))
    full = dict(reference.named_parameters())
    return *scales, worst(shard_differences(model, full, False))[0]


# A dp rank computes with as many times its share of the loss as there are dp ranks, so it
# overflows at smaller scales than the single process; at these both do, or neither.
@pytest.mark.parametrize(
    ("layout", "zero", "init_scale", "skips"),
    [
        (Layout(1, 2, 1), None, 2.0**16, 1),
        (Layout(1, 2, 1), None, 2.0**30, 5),
        (Layout(2, 1, 1), 2, 2.0**8, 0),
        (Layout(2, 1, 1), 2, 2.0**30, 5),
    ],
    ids=str,
)
def test_steps_and_scales_are_those_of_the_single_process(
    layout: Layout, zero: int | None, init_scale: float, skips: int
) -> None:
    for theirs, ours, error in pool(2).run(_train, layout, zero, "SGD", init_scale):
        assert ours == theirs
        assert sum(b < a for a, b in zip([init_scale, *theirs], theirs, strict=False)) == skips
        assert error <= FLOOR[torch.float16]


def _overflow(name: str, clip: bool) -> tuple[bool, float]:
    """Whether a rank made the step when only the last one holds an infinity, and its scale."""
    _, model, mesh = spread(TINY, Layout(1, 2, 1), None)
    optimizer = _optimizer(model, name)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(**batch(TINY.vocab_size)).loss).backward()
    if mesh.rank == 1:
        model.lm_head.weight.grad[3, 5] = float("inf")
    before = model.lm_head.weight.detach().clone()
    if clip:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(model.lm_head.weight, before), scaler.get_scale()


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled before"])
@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])
def test_all_ranks_skip_the_step_when_one_shard_overflows(name: str, clip: bool) -> None:
    assert pool(2).run(_overflow, name, clip) == [(False, 2.0**15)] * 2


def _overflow_without_extension() -> tuple[bool, float]:
    with mock.patch.object(interplay_gradients, "owners_in", return_value={}):
        return _overflow("SGD", False)


def test_the_test_above_notices_ranks_that_decide_alone() -> None:
    assert pool(2).run(_overflow_without_extension) == [(True, 2.0**16), (False, 2.0**15)]


def _scaled_otherwise() -> None:
    _, model, mesh = spread(TINY, Layout(1, 2, 1), None)
    optimizer = _optimizer(model, "SGD")
    scaler = torch.amp.GradScaler("cpu", 2.0 ** (8 + mesh.rank))
    _step(model, optimizer, scaler, batch(TINY.vocab_size))


def _in_fp16() -> None:
    model = parallel(replace(TINY, dtype=torch.float16).model(), mesh_of())
    _step(model, _optimizer(model, "SGD"), torch.amp.GradScaler("cpu"), batch(TINY.vocab_size))


def test_scales_that_differ_and_gradients_in_fp16_are_refused_on_all_ranks() -> None:
    for function, text in (
        (
            _scaled_otherwise,
            "the scale must be equal on all ranks, but is 256.0 on rank 0 and 512.0 on rank 1",
        ),
        (_in_fp16, "gradients in fp16 cannot be unscaled without loss"),
    ):
        pool(2).assert_raises(function, words=text)


def test_one_process_needs_no_other_ranks() -> None:
    model = parallel(TINY.model(), px.init_mesh())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert _step(model, _optimizer(model, "SGD"), scaler, batch(TINY.vocab_size)) == 1.0
