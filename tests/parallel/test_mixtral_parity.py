"""A Mixtral spread over any (dp, tp, ep) trains exactly as the single process does."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool
from reference import (
    FLOOR,
    assert_at_most_twice,
    assert_within,
    gradient_differences,
    gradients_of,
    parallel,
    shard_differences,
    worst,
)
from reference_mixtral import (
    Layout,
    TinyMixtral,
    accumulated_differences,
    batches,
    choosing_again,
    errors_in,
    own_batch,
    parity,
    spread,
)
from reference_ops import aten_path, counted

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn import grad_sync
from parallel_ext.nn.grad_sync import PartialGradients
from parallel_ext.parallel.state import state_of

FIVE = TinyMixtral(num_experts=5)
SPREADS = [
    *(Layout(1, 1, 1), Layout(1, 2, 1), Layout(1, 3, 1), Layout(1, 3, 3), Layout(3, 1, 1)),
    *(Layout(2, 2, 1), Layout(4, 1, 2), Layout(1, 4, 2)),
]
SKEWS = [
    *(("zipf", Layout(2, 2, 4)), ("one expert takes all", Layout(2, 1, 2))),
    *(("an idle expert", Layout(1, 2, 2)), ("an idle rank", Layout(2, 2, 4))),
]
BALANCED = TinyMixtral(balance=True, skew="zipf")
CASES: dict[str, tuple[TinyMixtral, Layout, int]] = {
    **{str(layout): (FIVE, layout, 2) for layout in SPREADS},
    **{skew: (TinyMixtral(num_experts=5, skew=skew), layout, 2) for skew, layout in SKEWS},
    "ZeRO-3": (FIVE, Layout(2, 1, 1), 3),
    "ZeRO-3 beside ep": (TinyMixtral(num_experts=5, tied=True), Layout(2, 2, 4), 3),
    "one choice": (TinyMixtral(top_k=1), Layout(2, 1, 2), 2),
    "four choices": (TinyMixtral(top_k=4), Layout(1, 2, 2), 2),
    "all experts chosen": (TinyMixtral(num_experts=4, top_k=4), Layout(2, 2, 4), 2),
    "one expert": (TinyMixtral(num_experts=1, top_k=1), Layout(2, 1, 1), 2),
    "tied weights": (TinyMixtral(tied=True), Layout(2, 1, 2), 2),
    "replicated key-value heads": (TinyMixtral(key_value_heads=1), Layout(2, 2, 2), 2),
    "a vocabulary smaller than tp": (TinyMixtral(vocab_size=3), Layout(1, 4, 4), 2),
    "a balance loss of all tp ranks": (BALANCED, Layout(1, 2, 1), 2),
    "a balance loss of the whole batch": (BALANCED, Layout(2, 2, 4), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process(case: str) -> None:
    tiny, layout, zero = CASES[case]
    for differences in pool(layout.world).run(parity, tiny, layout, zero, timeout_s=60):
        if tiny.top_k == 1:  # the weight of a single choice is 1, whatever the router says
            differences = {n: d for n, d in differences.items() if "gate.weight.grad" not in n}
        assert_within([differences])


def _balance_apart(layout: Layout) -> dict[str, float]:
    """The router's gradient when each dp rank adds the balance loss of its own tokens."""
    reference, model, mesh = spread(BALANCED, layout)
    model.__dict__["forward"] = lambda **batch: type(model).forward(model, **batch)
    state_of(model).own_forward = None  # else it is refused
    return gradient_differences(reference, model, *own_batch(TinyMixtral(), mesh))


def test_parity_notices_a_balance_loss_of_each_rank_alone() -> None:
    for differences in pool(2).run(_balance_apart, Layout(2, 1, 2)):
        assert differences["model.layers.0.mlp.gate.weight"] > 1e-3


def _in_buckets(layout: Layout, size: int) -> tuple[dict[str, float], int, int]:
    """Differences, the sums at the end of backward, and how many buckets there are to sum."""
    tiny, numel = TinyMixtral(), Counter[str]()
    reference, model, mesh = spread(tiny, layout)
    close, sums = PartialGradients._close, 0

    def counting(self: PartialGradients, session: Any) -> None:
        nonlocal sums
        for entry in session.entries.values():
            numel[entry.group.name] += entry.partial.numel()
        before = px._C.collective_counts().get("all_reduce", 0)
        close(self, session)
        sums += px._C.collective_counts().get("all_reduce", 0) - before
        assert not any(hasattr(entry, "partial") for entry in session.entries.values())

    with (
        mock.patch.object(grad_sync, "BUCKET", size),
        mock.patch.object(PartialGradients, "_close", counting),
    ):
        differences = gradient_differences(reference, model, *own_batch(tiny, mesh))
    return differences, sums, sum(-(-each // size) for each in numel.values())


@pytest.mark.parametrize(
    ("layout", "size"), [(Layout(1, 4, 2), 97), (Layout(1, 2, 1), 10**6)], ids=str
)
def test_gradients_of_replicated_experts_are_summed_in_buckets(layout: Layout, size: int) -> None:
    for differences, sums, buckets in pool(layout.world).run(_in_buckets, layout, size):
        assert_within([differences])
        assert sums == buckets
        assert (buckets > 9) == (size < 10**6)


def _frozen(layout: Layout, frozen: str) -> tuple[dict[str, float], list[str]]:
    tiny = TinyMixtral(num_experts=5)
    reference = tiny.model()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(frozen not in name)
    mesh = layout.mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh)
    whole, own = own_batch(tiny, mesh)
    reference(**whole).loss.backward()
    model(**own).loss.backward()
    with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
    zeros = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    truth = {**zeros, **{n: g for n, g in gradients_of(reference).items() if g is not None}}
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return shard_differences(model, truth, True), with_gradient


@pytest.mark.parametrize(
    ("frozen", "layout"),
    [
        *(("gate.weight", Layout(2, 1, 2)), ("gate.weight", Layout(1, 2, 1))),
        *(("experts", Layout(1, 2, 2)), ("experts", Layout(1, 2, 1))),
        *(("embed_tokens", Layout(2, 1, 2)), ("self_attn", Layout(1, 2, 2))),
    ],
    ids=str,
)
def test_a_frozen_part_gets_no_gradient_and_changes_no_other(frozen: str, layout: Layout) -> None:
    for differences, with_gradient in pool(layout.world).run(_frozen, layout, frozen):
        assert_within([differences])
        assert with_gradient
        assert not [name for name in with_gradient if frozen in name]


def _checkpointed(
    layout: Layout, zero: int, reentrant: bool
) -> tuple[tuple[float, str], dict[str, int]]:
    tiny = TinyMixtral(num_experts=5)
    reference, model, mesh = spread(tiny, layout, zero)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    whole, own = own_batch(tiny, mesh)
    reference(**whole).loss.backward()
    loss = model(**own).loss
    _, counts = counted(loss.backward)
    return worst(shard_differences(model, gradients_of(reference), True)), counts


@pytest.mark.parametrize(
    ("layout", "zero", "reentrant"),
    [
        *((Layout(2, 1, 2), 2, False), (Layout(2, 1, 2), 3, True)),
        *((Layout(1, 2, 1), 2, True), (Layout(2, 2, 4), 3, False)),
    ],
    ids=str,
)
def test_gradient_checkpointing_keeps_the_gradients(
    layout: Layout, zero: int, reentrant: bool
) -> None:
    for (error, name), counts in pool(layout.world).run(_checkpointed, layout, zero, reentrant):
        assert error <= 1e-10, name
        if layout.tp == 1:  # routing is kept, so nothing is gathered to count rows again
            assert "all_gather" not in counts


def _as_on_a_gpu(layout: Layout) -> tuple[dict[str, float], float]:
    """Differences of steps, and of one with checkpointing, with counts of rows on the device."""
    with aten_path(True), mock.patch.object(ops.ExchangePlan, "of", side_effect=AssertionError):
        (error, _), _ = _checkpointed(layout, 2, False)
        return parity(TinyMixtral(num_experts=5, skew="an idle expert"), layout), error


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 1)], ids=str)
def test_no_host_plans_what_one_rank_of_a_gpu_has_alone(layout: Layout) -> None:
    for differences, checkpointed in pool(layout.world).run(_as_on_a_gpu, layout):
        assert worst(differences) < (FLOOR[torch.float64], "")
        assert checkpointed <= FLOOR[torch.float64]


def _rerouted(reentrant: bool, kept: bool) -> float:
    """How many experts get other gradients when the router changes before backward.

    Stands for a recomputation that is not bitwise the forward.
    """
    mesh, trained = Layout(2, 1, 2).mesh(), []
    for disturbed in (False, True):
        model = px.data_parallel(parallel(TinyMixtral(5, top_k=1).model(), mesh), mesh)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss = model(**own_batch(TinyMixtral(), mesh)[1]).loss
        for layer in model.model.layers:
            if disturbed:
                layer.mlp.gate.skew = torch.tensor([0.0, 0, 0, 0, 60], dtype=torch.float64)
        with nullcontext() if kept else choosing_again():
            loss.backward()
        gradient = model.model.layers[0].mlp.experts.down_proj.grad.full_tensor()
        trained.append(gradient.flatten(1).any(dim=1))
    return (trained[0] != trained[1]).sum().item()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_recomputed_layer_keeps_its_choice_of_experts(reentrant: bool) -> None:
    assert pool(2).run(_rerouted, reentrant, True) == [0, 0]


def test_the_test_above_notices_a_choice_that_is_not_kept() -> None:
    assert max(pool(2).run(_rerouted, True, False)) > 0


def _from_inside(reentrant: bool) -> list[bool]:
    """Gradients from a hidden state are those without another forward and backward between."""
    tiny, gradients = TinyMixtral(num_experts=5), []
    (first, other), mesh = batches(tiny, 2)[1], Layout(1, 2, 2).mesh()
    for forwards in (0, 1, 2):
        model, states = parallel(tiny.model(), mesh), []
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.model.norm.register_forward_pre_hook(lambda _, args, to=states: to.append(args[0]))
        model(**first)
        losses = [model(**other).loss for _ in range(forwards)]
        if forwards == 2:
            losses[-1].backward()
            model.zero_grad()
        states[0].sum().backward()
        gradients.append([p.grad for p in model.model.layers[0].parameters()])
    return [all(map(torch.equal, gradients[0], each)) for each in gradients[1:]]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_backward_from_inside_finds_no_other_forwards_choices(reentrant: bool) -> None:
    assert pool(2).run(_from_inside, reentrant) == [[True, True]] * 2


def _random_numbers_of_a_step(reentrant: bool) -> bool:
    """Return whether a step leaves torch's generator as the plain model leaves it."""
    tiny, states = TinyMixtral(num_experts=5), []
    for model in (tiny.model(), parallel(tiny.model(), Layout(1, 2, 2).mesh())):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(1)
        model(**batches(tiny, 1)[0]).loss.backward()
        states.append(torch.get_rng_state())
    return torch.equal(*states)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_recomputed_mixture_draws_nothing_from_the_users_generator(reentrant: bool) -> None:
    assert pool(2).run(_random_numbers_of_a_step, reentrant) == [True, True]


def _accumulated(layout: Layout) -> dict[str, float]:
    tiny = TinyMixtral(key_value_heads=1)
    return accumulated_differences(*spread(tiny, layout), tiny, False)


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(2, 2, 1)], ids=str)
def test_no_sync_accumulates_over_micro_batches(layout: Layout) -> None:
    assert_within(pool(layout.world).run(_accumulated, layout))


def _one_expert_a_replica(layout: Layout) -> dict[str, float]:
    """Two dp ranks, each of which uses one of two experts, by its token ids."""
    tiny = TinyMixtral(num_experts=2, top_k=1, layers=1)
    reference = tiny.model()
    with torch.no_grad():
        direction = torch.ones(32, dtype=torch.float64)
        sign = 1.0 - 2 * (torch.arange(tiny.vocab_size) % 2).double()
        reference.model.embed_tokens.weight.mul_(0.1).add_(50 * sign[:, None] * direction)
        gate = reference.model.layers[0].mlp.gate.weight
        gate.copy_(torch.stack([direction, -direction]))
        reference.model.layers[0].post_attention_layernorm.weight.fill_(1.0)
    mesh = layout.mesh()
    model = px.data_parallel(parallel(reference, mesh), mesh)
    whole, own = batches(tiny, 2)
    whole["input_ids"] -= whole["input_ids"] % 2
    whole["input_ids"][2:] += 1
    counts = reference(**whole, output_router_logits=True).router_logits[0].argmax(-1)
    assert counts.view(4, -1)[:2].sum() == 0
    assert counts.view(4, -1)[2:].prod() == 1
    return gradient_differences(reference, model, whole, own[mesh.dp_rank])


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(2, 1, 2)], ids=str)
def test_an_expert_that_one_of_two_replicas_uses_gets_half_of_its_gradient(layout: Layout) -> None:
    """Others divide by the replicas that used it, and double the gradient."""
    assert_within(pool(2).run(_one_expert_a_replica, layout))


def _without(broken: str, layout: Layout) -> float:
    tiny = TinyMixtral()
    reference, model, mesh = spread(tiny, layout)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        if broken == "scale of the experts' gradients":
            experts.grad_scale *= 2
        elif broken == "sum over the replicas of experts":
            experts.replicas = ops.ALONE
        elif broken == "slices of the tokens":
            experts.tp = ops.ALONE
    return worst(gradient_differences(reference, model, *own_batch(tiny, mesh)))[0]


@pytest.mark.parametrize(
    ("broken", "layout"),
    [
        ("scale of the experts' gradients", Layout(2, 1, 2)),
        ("sum over the replicas of experts", Layout(1, 2, 1)),
        ("slices of the tokens", Layout(1, 2, 1)),
    ],
)
def test_parity_notices_a_wrong(broken: str, layout: Layout) -> None:
    assert max(pool(2).run(_without, broken, layout)) > 1e-3


def test_fp32_errs_at_most_twice_as_much_as_one_process() -> None:
    found = pool(4).run(errors_in, TinyMixtral(), Layout(2, 2, 4), torch.float32)
    assert_at_most_twice(found, FLOOR[torch.float32])


def _under_autocast(layout: Layout) -> tuple[dict[str, float], dict[str, float]]:
    """Errors against fp64 of both in bf16, in which the experts' products must be."""
    plain, products = ops.moe_linear, set()

    def moe_linear(*args: Any, **kwargs: Any) -> torch.Tensor:
        rows = plain(*args, **kwargs)
        products.add(rows.dtype)
        return rows

    with mock.patch.object(ops, "moe_linear", moe_linear):
        # One layer: in the next one a last bit of bf16 may choose another expert.
        errors = errors_in(TinyMixtral(layers=1), layout, torch.float32, torch.bfloat16)
    assert products == {torch.bfloat16}
    return errors


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(1, 2, 2)], ids=str)
def test_autocast_errs_at_most_twice_as_much_as_one_process(layout: Layout) -> None:
    assert_at_most_twice(pool(layout.world).run(_under_autocast, layout), FLOOR[torch.bfloat16])
