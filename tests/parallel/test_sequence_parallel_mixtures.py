"""Mixtures under sequence parallelism: each rank routes its own tokens, as one process does all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
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
from reference_lora import BOTH, config, plain
from reference_mixtral import (
    Layout,
    TinyMixtral,
    TinyQwen3Moe,
    accumulated_differences,
    batches,
    few_tokens_parity,
    parity,
    spread,
    training_differences,
)
from reference_ops import counted

import parallel_ext as px
from parallel_ext import ops

OWN: dict[str, Any] = {"sequence_parallel": True}
FIVE = TinyMixtral(num_experts=5)
CASES: dict[str, tuple[TinyMixtral, Layout, int]] = {
    "two ranks": (FIVE, Layout(1, 2, 1), 2),
    "three ranks": (FIVE, Layout(1, 3, 1), 2),
    "experts on four ranks": (FIVE, Layout(1, 4, 4), 2),
    "ZeRO-3": (TinyMixtral(num_experts=5, tied=True), Layout(2, 2, 4), 3),
    "an idle rank": (TinyMixtral(num_experts=5, skew="an idle rank"), Layout(1, 2, 2), 2),
    "one expert for all": (TinyMixtral(skew="one expert takes all"), Layout(2, 2, 4), 2),
    "key-value heads replicated": (TinyMixtral(key_value_heads=1), Layout(1, 4, 2), 2),
    "balance loss": (TinyMixtral(balance=True, skew="zipf"), Layout(1, 3, 3), 2),
    "balance loss of two batches": (TinyMixtral(balance=True, skew="zipf"), Layout(2, 2, 2), 2),
    "dense layers between": (TinyQwen3Moe(balance=True), Layout(1, 2, 2), 2),
    "dense layers between, two batches": (TinyQwen3Moe(key_value_heads=1), Layout(2, 2, 1), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_single_process_with(case: str) -> None:
    tiny, layout, zero = CASES[case]
    assert_within(pool(layout.world).run(parity, tiny, layout, zero, OWN, timeout_s=60))


def _few_tokens(layout: Layout) -> dict[str, float]:
    return few_tokens_parity(FIVE, layout, **OWN)


@pytest.mark.parametrize("layout", [Layout(1, 4, 1), Layout(1, 4, 4)], ids=str)
def test_a_rank_without_tokens_takes_part(layout: Layout) -> None:
    assert_within(pool(4).run(_few_tokens, layout))


def _checkpointed(
    layout: Layout, zero: int | None, reentrant: bool, noise: float, copied: bool
) -> dict[str, float]:
    """Forwards and backward of layers that are recomputed, with noise of the same seed."""
    tiny = TinyMixtral(num_experts=5, balance=not reentrant, options=_noise(noise))
    reference, model, mesh = spread(tiny, layout, zero, **OWN)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if copied:
        model = copy.deepcopy(model)
    whole, own = batches(tiny, layout.dp)
    for each, data in ((reference, whole), (model, own[mesh.dp_rank])):
        torch.manual_seed(7)
        for _ in range(2 if zero is None else 1):
            each(**data).loss.backward()
    return shard_differences(model, gradients_of(reference), True)


def _noise(noise: float) -> tuple[tuple[str, Any], ...]:
    return (("router_jitter_noise", noise),)


@pytest.mark.parametrize(
    ("layout", "zero", "reentrant", "noise", "copied"),
    [
        (Layout(1, 3, 1), None, True, 0.2, False),
        (Layout(1, 2, 2), None, False, 0.2, True),
        (Layout(2, 2, 4), 3, True, 0.0, False),
        (Layout(2, 2, 4), 3, False, 0.0, False),
    ],
    ids=str,
)
def test_gradient_checkpointing_keeps_the_gradients_and_the_noise(
    layout: Layout, zero: int | None, reentrant: bool, noise: float, copied: bool
) -> None:
    found = pool(layout.world).run(_checkpointed, layout, zero, reentrant, noise, copied)
    assert_within(found)


def _jittered(layout: Layout) -> tuple[dict[str, float], list[bool]]:
    """Three steps of noise, and whether the generator is left as by one process."""
    tiny, same = TinyMixtral(num_experts=5, options=_noise(0.3)), []
    reference, model, _ = spread(tiny, layout, None, **OWN)
    differences = {}
    for step in range(3):
        one, states = batches(tiny, 1, seed=step)[0], []
        for each in (reference, model):
            torch.manual_seed(step)
            each(**one).loss.backward()
            states.append(torch.get_rng_state())
        same.append(torch.equal(*states))
        errors = shard_differences(model, gradients_of(reference), True)
        differences |= {f"{name}, step {step}": error for name, error in errors.items()}
    same.append(all(layer.mlp.jitter_noise == 0.3 for layer in model.model.layers))
    return differences, same


@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(1, 4, 2)], ids=str)
def test_the_noise_of_a_token_is_that_of_the_single_process(layout: Layout) -> None:
    for differences, same in pool(layout.world).run(_jittered, layout):
        assert_within([differences])
        assert all(same)


def _adapted(
    directory: Path, layout: Layout, zero: int, checkpoints: str, changes: dict[str, Any]
) -> dict[str, float]:
    model = parallel(FIVE.model(), layout.mesh(), **OWN)
    torch.manual_seed(11)
    model = peft.get_peft_model(model, config(**{**BOTH, **changes}))
    model.save_pretrained(directory)
    reference = plain(directory, FIVE)
    px.data_parallel(model, layout.mesh(), zero)
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    return training_differences(reference, model, layout.mesh(), FIVE, 2)


ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


@pytest.mark.parametrize(
    ("layout", "zero", "checkpoints", "changes"),
    [
        (Layout(1, 2, 2), 2, "not reentrant", ATTENTION),
        (Layout(1, 3, 3), 2, "reentrant", {}),
        (Layout(2, 2, 4), 3, "", ATTENTION),
        (Layout(2, 2, 1), 2, "", {}),
        (Layout(1, 4, 2), 2, "", {"modules_to_save": ["gate", "norm"]}),
    ],
    ids=str,
)
def test_adapters_train_as_in_peft(
    tmp_path: Path, layout: Layout, zero: int, checkpoints: str, changes: dict[str, Any]
) -> None:
    found = pool(layout.world).run(_adapted, tmp_path, layout, zero, checkpoints, changes)
    for differences in found:
        assert any(".lora_B." in name and ".grad" in name for name in differences)
        assert_within([differences], 1e-9)


def _accumulated(layout: Layout) -> dict[str, float]:
    return accumulated_differences(*spread(FIVE, layout, **OWN), FIVE, False)


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(2, 2, 1)], ids=str)
def test_micro_batches_add_up(layout: Layout) -> None:
    assert_within(pool(layout.world).run(_accumulated, layout))


def _evaluated(tiny: TinyMixtral, layout: Layout) -> dict[str, float]:
    """With gradients: of an evaluation, and of sequences of one token, which are not divided."""
    reference, model, _ = spread(tiny, layout, None, **OWN)
    one, found = batches(tiny, 1)[0], {}
    first = {"input_ids": one["input_ids"][:, :1]}
    for train, data in ((False, one), (True, first)):
        for each in (reference, model):
            each.train(train).zero_grad()
        ours, theirs = model(**data).logits, reference(**data).logits
        found[f"logits, {train}"] = difference(ours, theirs)
        for logits in (ours, theirs):
            logits.square().sum().backward()
        gradients = gradients_of(reference)
        for name in [*gradients]:  # one key alone has no gradient but rounding
            if train and ".q_" in name or train and ".k_" in name:
                model.get_parameter(name).grad = gradients[name] = None
        for name, error in shard_differences(model, gradients, True).items():
            found[f"{name}, {train}"] = error
    model.eval()
    reference.eval()
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = reference.generate(one["input_ids"], **options)
    for tokens in (
        model.generate(one["input_ids"], **options),
        px.generate(model, one["input_ids"], **options),
    ):
        found["tokens"] = float(not torch.equal(tokens, expected))
    return found


def test_what_is_not_divided_has_the_gradients_and_tokens_of_one_process() -> None:
    assert_within(pool(2).run(_evaluated, TinyQwen3Moe(), Layout(1, 2, 2)))


def _logits(layout: Layout, reentrant: bool | None) -> tuple[dict[str, float], list[int]]:
    """Of the routers, from one process; and the gathers of tokens in a step with and without."""
    reference, model, _ = spread(FIVE, layout, None, **OWN)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    one, found, gathers = batches(FIVE, 1)[0], {}, []
    for inner in (lambda each: each, lambda each: each.model):
        data = one if inner(model) is model else {"input_ids": one["input_ids"]}
        output, expected = (
            inner(each)(**data, output_router_logits=True) for each in (model, reference)
        )
        pairs = zip(output.router_logits, expected.router_logits, strict=True)
        found |= {f"{len(found)}": difference(*pair) for pair in pairs}
    for wanted in (False, True):
        loss, forward = counted(lambda w=wanted: model(**one, output_router_logits=w).loss)
        gathers += [forward["swap"], counted(loss.backward)[1]["swap"]]
    return found, gathers


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpoints", "reentrant"])
def test_router_logits_are_those_of_all_tokens_and_are_gathered_once_where_they_are_wanted(
    reentrant: bool | None,
) -> None:
    for differences, (forward, backward, with_logits, its_backward) in pool(2).run(
        _logits, Layout(1, 2, 1), reentrant
    ):
        assert_within([differences])
        assert (with_logits - forward, its_backward - backward) == (FIVE.layers, 0)


def _step(layout: Layout, own: bool) -> list[dict[str, int]]:
    model = parallel(FIVE.model(), layout.mesh(), sequence_parallel=own)
    loss, forward = counted(lambda: model(**batches(FIVE, 1)[0]).loss)
    return [forward, counted(loss.backward)[1]]


@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(1, 2, 2)], ids=str)
def test_no_token_is_gathered_for_a_mixture(layout: Layout) -> None:
    """What a layer sends: an attention's gather and sum, and, over ep, the rows of its experts."""
    layers, (rows, tokens, hidden) = FIVE.layers, (2, 7, 8 * FIVE.heads)
    without = pool(2).run(_step, layout, False)
    for rank, (forward, backward) in enumerate(pool(2).run(_step, layout, True)):
        exchanges = 2 * layers * (layout.ep > 1)
        assert forward["swap"] == 1 + 2 * layers + 2 + exchanges  # embedding, tokens of the head
        assert forward["all_gather"] == 2 + layers * (layout.ep > 1)  # agreement, loss; counts
        assert "all_reduce" not in forward
        assert backward["swap"] == 2 * layers + 1 + exchanges
        assert backward["all_reduce"] == 1  # norms, routers, experts that both hold
        assert "all_gather" not in backward
        before = without[rank]
        assert before[0]["all_gather"] == forward["all_gather"]
        assert before[0]["swap"] == 1 + layers + exchanges  # embedding, outputs of the mixtures
        assert before[1]["all_gather"] == layers  # gradients of their tokens
        assert before[0]["all_reduce"] == layers  # attentions
        if layout.ep > 1:
            assert before[1]["swap"] == 2 * layers
            assert before[1]["all_reduce"] == 1 + layers  # the head
        if layout.ep == 1:  # else which rows travel depends on whose tokens they are
            own = rows * (tokens - tokens // 2 if rank == 0 else tokens // 2) * hidden * 8
            others = rows * tokens * hidden * 8 - own
            sent = forward["swap_bytes"] - forward["vocab_embedding/bytes"]
            assert sent == (layers + 1) * (own + others)


def _as_without_the_option(layout: Layout, rule: str | None) -> list[Any]:
    """Choices of a step, and the worst gradient, from a model whose ranks have all tokens."""
    model, own = (
        parallel(FIVE.model(), layout.mesh(), sequence_parallel=flag) for flag in (False, True)
    )
    one, found = batches(FIVE, 1)[0], []
    for each in (model, own):
        px.force_routing(each, rule)
        with px.RoutingMetrics(each) as metrics:
            each(**one).loss.backward()
            log = metrics.step(0)
        names = ["moe/expert_overload_max", "moe/idle_experts"]
        if layout.ep > 1:  # else a rank computes the rows of its own tokens, which are others
            names.append("moe/rank_overload_max")
        found.append([metrics.choices, *(log[name] for name in names)])
    differences = [
        difference(ours.grad, theirs.grad)
        for ours, theirs in zip(own.parameters(), model.parameters(), strict=True)
    ]
    return [*found, max(differences)]


@pytest.mark.parametrize(
    ("layout", "rule"),
    [(Layout(1, 2, 2), None), (Layout(1, 3, 1), "balanced"), (Layout(1, 2, 2), "skewed")],
    ids=str,
)
def test_metrics_and_forced_choices_are_those_of_all_tokens(
    layout: Layout, rule: str | None
) -> None:
    for without, own, error in pool(layout.world).run(_as_without_the_option, layout, rule):
        assert own == without
        assert error <= 1e-10


def _without(broken: str) -> float:
    tiny = TinyMixtral(balance=True)
    reference, model, _ = spread(tiny, Layout(1, 2, 2), None, **OWN)
    for mixture in (layer.mlp for layer in model.model.layers):
        if broken == "sum of the router's gradients":
            mixture.gate.used_in_parts.group = ops.ALONE
        elif broken == "gradient of the logits":
            hooks = mixture.gate._forward_hooks
            key, hook = next((k, h) for k, h in hooks.items() if h.__name__ == "gather_logits")
            hooks[key] = lambda *given, hook=hook: (hook(*given)[0].detach(), *given[2][1:])
    return worst(gradient_differences(reference, model, batches(tiny, 1)[0]))[0]


@pytest.mark.parametrize("broken", ["sum of the router's gradients", "gradient of the logits"])
def test_parity_notices_a_broken(broken: str) -> None:
    assert max(pool(2).run(_without, broken)) > 1e-3
