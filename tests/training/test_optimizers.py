"""Optimizers on a parallel model take the steps of the single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, batch, mesh_of, parallel, shard_differences, worst
from reference_lora import ALL, config
from reference_mixtral import Layout, own_batch, spread
from reference_training import LLAMA, MIXTRAL
from torch import nn

import parallel_ext as px
from parallel_ext.parallel.state import STATE_NAME
from parallel_ext.training import adafactor

# In fp64: in fp32 a step of AdamW takes the rounding of a gradient near zero for its sign.
LARGE = Tiny(65535, heads=2, key_value_heads=1, inner=13, layers=1, tied=True)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def _adafactor(model: Any, **options: Any) -> torch.optim.Optimizer:
    options = {"lr": 0.05, "weight_decay": 0.1, **options}
    if hasattr(model, STATE_NAME):
        return px.Adafactor(model, **options)
    return torch.optim.Adafactor(model.parameters(), **options)


def _one_step(model: Any, optimizer: torch.optim.Optimizer, data: dict[str, Any]) -> float:
    optimizer.zero_grad()
    loss = model(**data).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def _some_steps(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[float, str]:
    """After 5 and after 20 of them."""
    reference = LARGE.model()
    model = parallel(reference, mesh_of())
    optimizers = make(model), make(reference)
    differences: dict[str, float] = {}
    for step in range(20):
        one = batch(LARGE.vocab_size, rows=1, tokens=5, seed=step)
        ours, theirs = map(_one_step, (model, reference), optimizers, (one, one))
        if step in (4, 19):
            full = dict(reference.named_parameters())
            found = {**shard_differences(model, full, False), "loss": abs(ours / theirs - 1)}
            differences |= {f"step {step}: {name}": error for name, error in found.items()}
    return worst(differences)


@pytest.mark.parametrize("make", [_adamw, _sgd, _adafactor])
def test_steps_equal_the_single_process_with_65535_rows_on_2_ranks(make: Any) -> None:
    assert_within(pool(2).run(_some_steps, make, timeout_s=300.0), 1e-10)


# Model, layout, stage of data_parallel, options of parallelize, options of the optimizer.
CASES = {
    "fused rows": (replace(LLAMA, bias=True, tied=True), Layout(1, 2, 1), None, {}, {}),
    "an empty shard": (
        replace(LLAMA, vocab_size=5),
        Layout(1, 2, 1),
        None,
        {"vocab_multiple_of": 64},
        {"maximize": True, "eps": (1e-4, 0.1), "d": 2.0, "weight_decay": 0.0, "beta2_decay": -0.5},
    ),
    "replicated key-value heads": (
        Tiny(heads=8, key_value_heads=2, layers=1),
        Layout(1, 4, 1),
        None,
        {},
        {},
    ),
    "experts": (MIXTRAL, Layout(1, 2, 2), None, {}, {}),
    "experts on dp ranks": (MIXTRAL, Layout(2, 1, 2), 3, {}, {}),
    "experts over all ranks": (MIXTRAL, Layout(2, 2, 4), 2, {}, {}),
    "cut along both dimensions": (LLAMA, Layout(2, 2, 1), 2, {}, {}),
    "both, an empty shard": (
        replace(LLAMA, vocab_size=5),
        Layout(2, 2, 1),
        3,
        {"vocab_multiple_of": 64},
        {},
    ),
}


def _three_steps(case: str, make: Callable[..., torch.optim.Optimizer]) -> tuple[float, str]:
    tiny, layout, zero, cut, options = CASES[case]
    reference, model, mesh = spread(tiny, layout, zero, **cut)
    ours, theirs = make(model, **options), _adafactor(reference, **options)
    for step in range(3):
        whole, own = own_batch(tiny, mesh, step)
        _one_step(reference, theirs, whole)
        _one_step(model, ours, own)
    return worst(shard_differences(model, dict(reference.named_parameters()), False))


@pytest.mark.parametrize("case", CASES)
def test_adafactor_steps_as_the_single_process(case: str) -> None:
    assert_within(pool(CASES[case][1].world).run(_three_steps, case, _adafactor))


def _adapted() -> tuple[float, str]:
    """Three steps of an adapter at tp = 2, and of the same at tp = 1 with torch's Adafactor."""
    targets = {"target_modules": [*ALL, "lm_head", "embed_tokens"]}
    models = []
    for layout in (Layout(1, 2, 1), Layout(2, 1, 1)):
        _, model, _ = spread(LLAMA, layout, None)
        px.no_data_parallel(model)  # both have the same batch
        torch.manual_seed(3)
        models.append(peft.get_peft_model(model, config(**targets)).train())
    ours, theirs = models
    optimizers = px.Adafactor(ours, lr=0.05), torch.optim.Adafactor(theirs.parameters(), lr=0.05)
    for step in range(3):  # the same batch on both dp ranks of the other
        for model, optimizer in zip(models, optimizers, strict=True):
            _one_step(model, optimizer, batch(LLAMA.vocab_size, seed=step))
    return worst(shard_differences(ours, dict(theirs.named_parameters()), False))


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
def test_adafactor_trains_an_adapter_as_the_single_process() -> None:
    assert_within(pool(2).run(_adapted))


def _means_of_shards() -> float:
    with mock.patch.object(adafactor, "is_sharded_along", return_value=False):
        return _three_steps("fused rows", _adafactor)[0]


def test_the_test_above_notices_means_over_shards() -> None:
    assert min(pool(2).run(_means_of_shards)) >= 1e-3


def _by_torchs_adafactor() -> None:
    model = copy.deepcopy(spread(LLAMA, Layout(1, 2, 1), None)[1])
    torch.optim.Adafactor(model.parameters()).step()


def test_torchs_adafactor_is_refused_on_a_copy_of_a_model_too() -> None:
    words = "of what one rank holds, but model.embed_tokens.weight is sharded"
    pool(2).assert_raises(_by_torchs_adafactor, words=words)


def _copied() -> bool:
    """Whether a copy of model and optimizer, with a parameter of no elements, steps alike."""
    _, model, _ = spread(LLAMA, Layout(1, 2, 1), None)
    model.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
    model.nothing.grad = torch.empty_like(model.nothing)
    optimizer = _adafactor(model)
    one = batch(LLAMA.vocab_size)
    _one_step(model, optimizer, one)
    copies = copy.deepcopy((model, optimizer))
    for each in ((model, optimizer), copies):
        _one_step(*each, one)
    pairs = zip(model.parameters(), copies[0].parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_copied_adafactor_trains_the_copied_model() -> None:
    assert all(pool(2).run(_copied))


def _misused(case: str) -> None:
    reference, model, _ = spread(LLAMA, Layout(1, 2, 1), None)
    rank, one = mesh_of().rank, batch(LLAMA.vocab_size)
    if case == "plain":
        px.Adafactor(reference)
    elif case == "foreign":
        px.Adafactor(model, reference.parameters())
    elif case == "no gradient":
        model(**one).loss.backward()
        if rank == 1:
            model.lm_head.weight.grad = None
        px.Adafactor(model).step()
    elif case == "other parameters":
        model(**one).loss.backward()
        px.Adafactor(model, list(model.parameters())[rank:]).step()


MISUSED = {
    "plain": "is not a parallel model; call px.parallelize(model, mesh) first",
    "foreign": "Adafactor: a parameter of shape (101, 72) does not belong to the model",
    "no gradient": "lm_head.weight has a gradient on 1 ranks, but none on 1 others",
    "other parameters": "the ranks are about to do different things: rank 0: Adafactor.step of 12",
}


@pytest.mark.parametrize("case", MISUSED)
def test_what_cannot_be_right_is_refused_on_all_ranks(case: str) -> None:
    pool(2).assert_raises(_misused, case, words=MISUSED[case])


def test_adafactor_evaluates_a_closure_before_it_steps() -> None:
    reference = Tiny(layers=1).model()
    model, one, losses = parallel(reference, px.init_mesh()), batch(Tiny().vocab_size), []
    for each in (model, reference):

        def closure(each: Any = each) -> torch.Tensor:
            loss = each(**one).loss
            loss.backward()
            return loss

        losses.append(_adafactor(each).step(closure).item())
    assert losses[0] == pytest.approx(losses[1])
    full = dict(reference.named_parameters())
    assert worst(shard_differences(model, full, False))[0] <= 1e-10
