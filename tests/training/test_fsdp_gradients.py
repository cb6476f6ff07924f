"""Gradients that FSDP holds back are dropped when their caller drops them, and only then."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, gradients_of, shard_differences, worst
from reference_mixtral import Layout, TinyMixtral, own_batch, spread

import parallel_ext as px
from parallel_ext.nn.leaf_sums import LeafSums
from parallel_ext.parallel.state import state_of

TINY = TinyMixtral(num_experts=5)
LAYOUT = Layout(2, 1, 2)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("in a backward")


def _dropped(how: str, zero: int) -> tuple[float, str]:
    """The gradients of one batch after those of another were dropped in the given way."""
    reference, model, mesh = spread(TINY, LAYOUT, zero)
    (_, lost), (whole, kept) = (own_batch(TINY, mesh, seed) for seed in (3, 4))
    if "that raises" in how:
        layer = model.model.layers[0]
        hook = layer.register_forward_hook(lambda module, args, output: _Raises.apply(output))
        output = model(**lost, output_hidden_states="hidden" in how)
        loss = output.hidden_states[-1].sum() if "hidden" in how else output.loss
        with pytest.raises(KeyError):
            loss.backward()
        hook.remove()
    elif how == "a backward that is refused":  # as where a parameter of an adapter has hooks
        loss, partials = model(**lost).loss, state_of(model).partials
        with mock.patch.object(partials, "open", side_effect=KeyError), pytest.raises(KeyError):
            loss.backward()
    elif how == "an exception in no_sync":
        with suppress(KeyError), px.no_sync(model):
            model(**lost).loss.backward()
            raise KeyError
    else:
        with px.no_sync(model):
            model(**lost).loss.backward()
    if how == "zero_grad after the next forward":
        loss = model(**kept).loss
        model.zero_grad()
    else:
        model.zero_grad()
        loss = model(**kept).loss
    loss.backward()
    reference(**whole).loss.backward()
    return worst(shard_differences(model, gradients_of(reference), True))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "how",
    [
        "zero_grad before the next forward",
        "zero_grad after the next forward",
        "an exception in no_sync",
        "a backward that raises",
        "a backward from hidden states that raises",
        "a backward that is refused",
    ],
)
def test_what_was_dropped_is_in_no_later_gradient(how: str, zero: int) -> None:
    assert_within(pool(2).run(_dropped, how, zero))


def _nested(layout: Layout, zero: int | None) -> tuple[float, str]:
    tiny = Tiny(heads=4, key_value_heads=1)
    reference, model, mesh = spread(tiny, layout, zero)
    data = [own_batch(tiny, mesh, seed) for seed in (3, 4, 5)]
    for whole, _ in data:
        reference(**whole).loss.backward()
    optimizer = torch.optim.SGD(model.parameters())
    with px.no_sync(model):
        with px.no_sync(model):
            model(**data[0][1]).loss.backward()
        model(**data[1][1]).loss.backward()
        with pytest.raises(RuntimeError, match=r"step after a backward under px\.no_sync"):
            optimizer.step()
    optimizer.step(model(**data[2][1]).loss.backward)
    return worst(shard_differences(model, gradients_of(reference), True))


@pytest.mark.parametrize(("layout", "zero"), [(Layout(1, 2, 1), None), (Layout(2, 1, 1), 2)])
def test_the_inner_one_of_two_contexts_does_not_end_the_outer(
    layout: Layout, zero: int | None
) -> None:
    assert_within(pool(2).run(_nested, layout, zero))


def _checked(inside: bool, zero: int) -> tuple[tuple[float, str], float]:
    reference, model, mesh = spread(TINY, LAYOUT, zero)
    data = [own_batch(TINY, mesh, seed) for seed in (3, 4, 5)]
    for whole, _ in data:
        reference(**whole).loss.backward()
    first, second, third = (own for _, own in data)
    with px.no_sync(model):
        model(**first).loss.backward()
        if inside:
            report = px.check_gradients(model, third)
    with px.no_sync(model):
        model(**second).loss.backward()
    if not inside:
        report = px.check_gradients(model, third)
    model(**third).loss.backward()
    return worst(shard_differences(model, gradients_of(reference), True)), report.worst[1]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
def test_check_gradients_neither_sees_nor_loses_them(inside: bool, zero: int) -> None:
    for (error, name), reported in pool(2).run(_checked, inside, zero):
        assert error <= 1e-10, name
        assert reported < 1e-4


def _zeroed_late(zero: int) -> tuple[float, str]:
    """``zero_grad`` of the model between the second forward and its backward."""
    reference, model, mesh = spread(TINY, LAYOUT, zero)
    (_, first), (whole, second) = (own_batch(TINY, mesh, seed) for seed in (3, 4))
    model(**first).loss.backward()
    loss = model(**second).loss
    model.zero_grad()
    loss.backward()
    reference(**whole).loss.backward()
    return worst(shard_differences(model, gradients_of(reference), True))


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_grad_of_the_model_finds_the_shards_after_a_forward(zero: int) -> None:
    assert_within(pool(2).run(_zeroed_late, zero))


def test_an_exchange_outside_of_leaves_is_refused() -> None:
    sums = LeafSums(2)
    with pytest.raises(RuntimeError, match=r"a backward runs in px\.train_leaves"):
        sums.check_running()
    sums.begin_round(0, 2)
    sums.check_running()
    sums.reset()
    with pytest.raises(RuntimeError, match=r"a backward runs in px\.train_leaves"):
        sums.check_running()
