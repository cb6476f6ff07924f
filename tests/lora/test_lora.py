"""LoRA on a parallel model trains as PEFT does on the single-process model."""

from __future__ import annotations

import contextlib
import copy
import statistics
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, batch, exact, mesh_of, parallel, worst
from reference_lora import (
    ALL,
    TINY,
    adapted,
    config,
    gradient_errors,
    plain,
    share_masks,
    train,
)
from reference_ops import counted_both_ways

import parallel_ext as px
from parallel_ext import ops

EVERYWHERE = [*ALL, "lm_head", "embed_tokens"]
STEPS = 2


def _parity(
    directory: Path, tiny: Tiny, changes: dict[str, Any], break_it: str = "", how: str = ""
) -> dict[str, float]:
    """Differences of gradients, losses and norms from PEFT's on the same adapter."""
    model, data = adapted(tiny, **changes), [batch(tiny.vocab_size)] * STEPS
    if how == "two adapters":
        model.add_adapter("second", config(r=2))
    model.save_pretrained(directory)
    reference = plain(directory, tiny)
    if how == "two adapters":
        reference.load_adapter(directory / "second", "second", is_trainable=True)
        for each in (model, reference):
            each.base_model.set_adapter(["default", "second"])
    elif how in ("reentrant", "checkpoints"):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    elif how == "copy":
        model = copy.deepcopy(model)
    elif how:  # a part of the names of what is frozen
        for each in (model, reference):
            for name, parameter in each.named_parameters():
                if how in name:
                    parameter.requires_grad_(False)
    step = share_masks(reference, model)
    _break(model, break_it)
    for each in (model, reference):
        each.train()
        step[0] = 1
        each(**data[0]).loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert sorted(found) == sorted(gradients)
    errors = gradient_errors(model, gradients)
    if break_it:
        return {"gradients": worst(errors)[0]}
    losses, norms = train(model, lambda m: px.clip_grad_norm_(m, 1.0), data, step, 2)
    expected_losses, expected_norms = train(
        reference,
        lambda m: torch.nn.utils.clip_grad_norm_(
            [p for p in m.parameters() if p.requires_grad], 1.0
        ),
        data,
        step,
        2,
    )
    return {
        "gradients": worst(errors)[0],
        "losses": max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)),
        "norms": max(abs(a - b) for a, b in zip(norms, expected_norms, strict=True)),
    }


def _break(model: Any, what: str) -> None:
    """Break one thing that the comparison must notice."""
    for module in model.modules():
        if what == "no sum" and getattr(module, "partials", None) is not None:
            module.partials.catch = lambda parameter, *_: parameter
        elif what == "other masks" and hasattr(module, "_mask_keys"):
            module._mask_keys["default"] += mesh_of().tp_rank
        elif what == "other scale" and hasattr(module, "lora_A"):
            module.scaling["default"] *= 1 + 1e-2


@pytest.mark.parametrize(
    ("tp", "changes"),
    [
        (1, {"target_modules": EVERYWHERE, "lora_dropout": 0.3}),
        (2, {"target_modules": ["o_proj", "q_proj"], "r": 1}),
        (3, {"target_modules": EVERYWHERE, "lora_dropout": 0.1}),
        (4, {"r": 40, "use_rslora": True}),  # above a shard
    ],
    ids=str,
)
def test_gradients_norm_and_steps_are_those_of_peft(
    tmp_path: Path, tp: int, changes: dict[str, Any]
) -> None:
    tiny = Tiny(bias=True) if tp == 2 else TINY
    assert_within(pool(tp).run(_parity, tmp_path, tiny, changes), 1e-9)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "biases of adapters": ({"lora_bias": True}, {}),
    "biases of adapters, base without": ({"lora_bias": True, "lora_dropout": 0.2}, {"bias": False}),
    "all biases": ({"bias": "all"}, {}),
    "biases of adapted modules": (
        {"bias": "lora_only", "target_modules": ["k_proj", "o_proj"]},
        {},
    ),
    "whole ends and norm beside": ({"modules_to_save": ["lm_head", "embed_tokens", "norm"]}, {}),
    "head of a tied model": ({"target_modules": ["lm_head"]}, {"tied": True}),
    "embedding of a tied model": ({"target_modules": ["embed_tokens"]}, {"tied": True}),
    "DoRA": ({"use_dora": True}, {}),
    "DoRA with dropout and biases": (
        {"use_dora": True, "lora_dropout": 0.3, "bias": "lora_only", "use_rslora": True},
        {"heads": 8, "key_value_heads": 2},
    ),
    "rows of tokens": ({"trainable_token_indices": [59, 0, 14, 96]}, {}),
    "rows of tokens, tied": ({"trainable_token_indices": [59, 0, 14, 96]}, {"tied": True}),
    "whole ends that stay tied": (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"tied": True},
    ),
    "rows of both ends": (
        {"trainable_token_indices": {"embed_tokens": [59, 3], "lm_head": [90, 3, 2]}},
        {},
    ),
    "other ranks for some": ({"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 4}}, {}),
}


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize(("option", "tp"), list(zip(OPTIONS, cycle([4, 2]))))
def test_options_train_as_in_peft(tmp_path: Path, option: str, tp: int) -> None:
    changes, of_model = OPTIONS[option]
    tiny = Tiny(**{"bias": True, **of_model})
    assert_within(pool(tp).run(_parity, tmp_path, tiny, changes), 1e-9)


@pytest.mark.parametrize(
    "how", ["two adapters", "reentrant", "checkpoints", "copy", "lora_A", "lora_B", "layers.0"]
)
def test_other_ways_to_train_are_those_of_peft(tmp_path: Path, how: str) -> None:
    changes: dict[str, Any] = {"rank_pattern": {"q_proj": 3, "down_proj": 9}}
    if how != "two adapters":
        changes |= {"lora_dropout": 0.25, "target_modules": [*ALL, "lm_head"]}
    assert_within(pool(2).run(_parity, tmp_path, TINY, changes, "", how), 1e-9)


@pytest.mark.parametrize("what", ["no sum", "other masks", "other scale"])
def test_the_comparison_notices(tmp_path: Path, what: str) -> None:
    found = pool(2).run(_parity, tmp_path, TINY, {"lora_dropout": 0.3}, what)
    assert max(errors["gradients"] for errors in found) > 3e-3


# Lower precision: adapters in fp32 over a bf16 base are PEFT's default.


def _low_precision(directory: Path, changes: dict[str, Any], autocast: bool) -> dict[str, Any]:
    """Our gradients' and the single process' own distance from those in fp64."""
    low = Tiny(dtype=torch.bfloat16)
    model = parallel(low.model(), mesh_of())
    torch.manual_seed(11)
    model = peft.get_peft_model(model, config(**changes), autocast_adapter_dtype=autocast)
    dtypes = {str(p.dtype) for n, p in model.named_parameters() if "lora_" in n}
    model.save_pretrained(directory)
    one = batch(low.vocab_size)
    single = peft.PeftModel.from_pretrained(
        low.model(),
        directory,
        is_trainable=True,
        autocast_adapter_dtype=autocast,
        config=peft.LoraConfig.from_pretrained(directory),
    )
    truth = peft.PeftModel.from_pretrained(
        exact(low.model().double()),
        directory,
        is_trainable=True,
        config=peft.LoraConfig.from_pretrained(directory),
    ).double()
    for each in (model, single, truth):
        each.train()(**one).loss.backward()
    expected = {n: p.grad for n, p in truth.named_parameters() if p.requires_grad}
    theirs = {
        name: ((p.grad.double() - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name, p in single.named_parameters()
        if p.requires_grad
    }
    return {"ours": gradient_errors(model, expected), "theirs": theirs, "dtypes": dtypes}


@pytest.mark.parametrize("autocast", [True, False], ids=["fp32 adapters", "bf16 adapters"])
def test_gradients_over_a_bf16_base_are_as_exact_as_the_single_process(
    tmp_path: Path, autocast: bool
) -> None:
    for found in pool(2).run(_low_precision, tmp_path, {}, autocast):
        assert found["dtypes"] == {"torch.float32" if autocast else "torch.bfloat16"}
        # Of one element, and of a CPU's own bf16 kernels, each is a draw: the median is not.
        ratios = {name: error / found["theirs"][name] for name, error in found["ours"].items()}
        assert statistics.median(ratios.values()) <= 1.5
        assert worst(ratios) <= (5, "")


# The step of a mask.


def _micro_batches(directory: Path, checkpoints: str) -> dict[str, float]:
    """Two forwards, an evaluation, then their backwards, later one first."""
    model = adapted(lora_dropout=0.4)
    model.save_pretrained(directory)
    reference = plain(directory)
    step = share_masks(reference, model)
    if checkpoints:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints == "reentrant"})
    ones = [batch(TINY.vocab_size, seed=seed) for seed in (3, 4)]
    for each in (model, reference):
        each.train()
        losses = []
        for number, one in enumerate(ones, start=1):
            step[0] = number
            losses.append(each(**one).loss)
        with torch.no_grad():
            each.eval()(**ones[0])
        each.train()
        losses[1].backward()
        losses[0].backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    return gradient_errors(model, gradients)


@pytest.mark.parametrize("checkpoints", ["", "not reentrant", "reentrant"])
def test_a_recomputed_layer_draws_the_mask_of_its_own_forward(
    tmp_path: Path, checkpoints: str
) -> None:
    assert_within(pool(2).run(_micro_batches, tmp_path, checkpoints), 1e-9)


def _masks_in_time() -> list[list[float]]:
    """Losses of repeated forwards: in training, in evaluation, with dropout alone in training."""
    model, one = adapted(lora_dropout=0.4), batch(TINY.vocab_size)
    losses = []
    with torch.no_grad():
        losses.append([model.train()(**one).loss.item() for _ in range(3)])
        losses.append([model.eval()(**one).loss.item() for _ in range(3)])
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.train()
        losses.append([model(**one).loss.item() for _ in range(3)])
    return losses


def test_every_forward_in_training_has_its_own_masks() -> None:
    for train_losses, eval_losses, sampled in pool(2).run(_masks_in_time):
        assert len({*train_losses, *sampled}) == 6
        assert len(set(eval_losses)) == 1


def _replicas_of_tokens() -> list[torch.Tensor]:
    """Adapted outputs of ones on both of two dp ranks."""
    model = px.no_data_parallel(parallel(TINY.model(), mesh_of(tp=1)))
    torch.manual_seed(11)
    model = peft.get_peft_model(model, config(lora_dropout=0.5)).train()
    model(**batch(TINY.vocab_size))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    mask = layer._dropout("default", torch.ones(2, 9, 72))
    ones, eye = torch.ones(2, 9, 72), torch.eye(72)
    return [ops.lora_linear(ones, torch.zeros(72, 72), eye, eye, dropout=mask)]


def test_dp_ranks_draw_the_masks_of_their_own_tokens() -> None:
    (first,), (second,) = pool(2).run(_replicas_of_tokens)
    assert 0.3 < (first == second).double().mean().item() < 0.7


# What is sent, and what is not supported.


def _sent(directory: Path) -> list[tuple[int, int]]:
    """Exchanges of a forward and of a backward, without adapter and with it."""
    model = adapted(lora_dropout=0.1, target_modules=EVERYWHERE, lora_bias=False)
    one, counts = batch(TINY.vocab_size), []
    base = parallel(TINY.model(), mesh_of()).train()
    base.requires_grad_(False)
    base.model.embed_tokens.weight.requires_grad_()
    for each in (base, model.train()):
        forward, backward = counted_both_ways(lambda: each(**one).loss)  # noqa: B023 (at once)
        sums = forward["all_reduce"] + forward.get("swap", 0)  # of the bare embedding's rows
        counts.append((sums, backward.get("all_reduce", 0)))
    return counts


@pytest.mark.parametrize("tp", [2, 3])
def test_a_step_sends_one_sum_more_than_that_of_the_base(tmp_path: Path, tp: int) -> None:
    for (base_forward, base_backward), (forward, backward) in pool(tp).run(_sent, tmp_path):
        assert forward == base_forward
        assert backward == base_backward + 1  # all replicated factors


REFUSED = {
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights=0": {"init_lora_weights": 0},
    "layer_replication=[(0, 2)]": {"layer_replication": [(0, 2)]},
    "target_parameters=['mlp.weight']": {"target_parameters": ["mlp.weight"]},
}


def _refused(case: str) -> None:
    adapted(**REFUSED[case])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    words = f"does not support {case}"
    pool(2).assert_raises(_refused, case, error="NotImplementedError", words=words)


def _replicated_layers() -> int:
    model = parallel(TINY.model(), mesh_of())
    with contextlib.suppress(NotImplementedError):
        peft.get_peft_model(model, config(layer_replication=[(0, 2), (0, 2)]))
    return len(model.model.layers)


def test_a_refused_option_leaves_the_model_as_it_was() -> None:
    assert pool(2).run(_replicated_layers) == [TINY.layers] * 2


def _several_with_dropout() -> None:
    model = adapted(lora_dropout=0.1)
    model.add_adapter("second", config(r=2))
    model.base_model.set_adapter(["default", "second"])
    model.train()(**batch(TINY.vocab_size))


def test_several_adapters_with_dropout_are_refused_together() -> None:
    words = "default, second together with lora_dropout is not supported"
    pool(2).assert_raises(_several_with_dropout, words=words)


def _both_ends(how: str) -> None:
    """Also one after the other; a model that has refused one takes another."""
    names = ["lm_head", "embed_tokens"]
    model = parallel(Tiny(tied=True).model(), mesh_of())
    if how == "one after the other":
        model = peft.get_peft_model(model, config(target_modules=names[:1]))
    try:
        if how == "at once":
            peft.get_peft_model(model, config(target_modules=names))
        elif how == "kept tied":
            peft.get_peft_model(model, config(target_modules=names[1:], ensure_weight_tying=True))
        else:
            model.add_adapter("second", config(target_modules=names[1:]))
    finally:
        assert not any("embed_tokens." in n and "lora" in n for n, _ in model.named_parameters())
        if how != "one after the other":
            peft.get_peft_model(model, config(target_modules=names[1:]))


@pytest.mark.parametrize("how", ["at once", "kept tied", "one after the other"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_adapters_on_both_ends_of_tied_weights_are_refused(how: str) -> None:
    words = "adapters on both ends cannot share it"
    pool(2).assert_raises(_both_ends, how, error="ValueError", words=words)


# PEFT's own classes on parallel and on plain models.


def _plain_config() -> tuple[list[str], tuple[int, int]]:
    model = parallel(TINY.model(), mesh_of())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    model.print_trainable_parameters()
    return sorted(model.peft_config["default"].target_modules), model.get_nb_trainable_parameters()


def test_a_plain_config_and_all_linear_serve_a_parallel_model() -> None:
    expected = peft.get_peft_model(TINY.model(), peft.LoraConfig(r=2, target_modules="all-linear"))
    for targets, counts in pool(2).run(_plain_config):
        assert targets == sorted(expected.peft_config["default"].target_modules)
        assert counts == expected.get_nb_trainable_parameters()


def test_a_plain_model_is_left_to_peft(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        TINY.model(), px.LoraConfig(r=2, lora_dropout=0.5, target_modules=ALL)
    )
    assert type(model.base_model.model.model.layers[0].mlp.up_proj) is peft.tuners.lora.layer.Linear
    model.save_pretrained(tmp_path)
    assert type(px.LoraConfig.from_pretrained(tmp_path)) is px.LoraConfig


def _compiled() -> None:
    config = px.LoraConfig(r=2, target_modules="all-linear")
    model = peft.get_peft_model(parallel(TINY.model(), mesh_of()), config).train()
    data = batch(TINY.vocab_size)
    with mock.patch.object(torch._dynamo.config, "fail_on_recompile_limit_hit", True):
        loss = torch.compile(model, backend="eager")(**data).loss
    assert loss == model(**data).loss


def test_a_compiled_model_is_not_compiled_for_each_adapter() -> None:
    pool(2).run(_compiled)
