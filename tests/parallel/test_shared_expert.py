"""An expert that all tokens share is sharded as an MLP is, and takes adapters as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ranks import pool
from reference import (
    assert_within,
    batch,
    exact,
    gradient_differences,
    mesh_of,
    parallel,
    worst,
)
from reference_lora import (
    FILE,
    GATE_UP,
    check_life,
    gradient_errors,
    logits_in_life,
    logits_of,
    plain,
    share_masks,
    with_adapter,
)
from reference_mixtral import (
    Layout,
    TinyQwen2Moe,
    few_tokens_parity,
    parity,
    spread,
    training_differences,
)
from reference_ops import counted
from safetensors.torch import load_file

import parallel_ext as px
from parallel_ext.nn.region import ChangeOutput

TINY = TinyQwen2Moe(inner=17)
OWN: dict[str, Any] = {"sequence_parallel": True}
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERT = [f"model.layers.1.mlp.shared_expert.{name}" for name in MLP]
INPUTS = {name: value for name, value in batch(TINY.vocab_size).items() if name != "labels"}


@pytest.mark.parametrize(
    ("layout", "zero", "balance", "options"),
    [
        *((Layout(1, 2, 2), 2, False, {}), (Layout(1, 3, 1), 2, False, {})),
        *((Layout(2, 1, 2), 2, False, {}), (Layout(2, 2, 2), 3, True, {})),
        *((Layout(1, 2, 1), 2, False, OWN), (Layout(1, 3, 3), 2, True, OWN)),
        *((Layout(2, 2, 4), 2, False, OWN), (Layout(1, 4, 2), 2, False, OWN)),
    ],
    ids=str,
)
def test_training_equals_the_single_process(
    layout: Layout, zero: int, balance: bool, options: dict[str, Any]
) -> None:
    tiny = TinyQwen2Moe(inner=17, balance=balance)
    assert_within(pool(layout.world).run(parity, tiny, layout, zero, options, timeout_s=60))


def _few_tokens(balance: bool) -> dict[str, float]:
    return few_tokens_parity(TinyQwen2Moe(inner=17, balance=balance), Layout(1, 4, 2), **OWN)


@pytest.mark.parametrize("balance", [False, True], ids=["", "balance loss"])
def test_a_rank_without_tokens_takes_part(balance: bool) -> None:
    assert_within(pool(4).run(_few_tokens, balance))


def _adapted(layout: Layout, options: dict[str, Any], **changes: Any) -> Any:
    model = parallel(TINY.model(), layout.mesh(), **options)
    return with_adapter(model, target_modules=[*MLP, "o_proj"], **changes)


def _with_adapter(
    directory: Path, layout: Layout, options: dict[str, Any], changes: dict[str, Any], base: bool
) -> dict[str, float]:
    """Of losses, gradients, norms and weights in steps; of the base's too if it is trained."""
    model = _adapted(layout, options, **changes)
    model.save_pretrained(directory)
    reference = plain(directory, TINY)
    if base:
        for each in (reference, model):
            each.requires_grad_(True)
    px.data_parallel(model, layout.mesh())
    return training_differences(reference, model, layout.mesh(), TINY, 2)


@pytest.mark.parametrize(
    ("layout", "options", "changes", "base"),
    [
        *((Layout(1, 1, 1), {}, {}, True), (Layout(1, 3, 1), {}, {}, True)),
        *((Layout(2, 2, 4), {}, {}, False), (Layout(1, 2, 1), OWN, {}, True)),
        (Layout(1, 4, 2), OWN, {}, True),
        (Layout(1, 2, 2), {}, {"target_parameters": [GATE_UP]}, False),
        (Layout(1, 3, 1), OWN, {"modules_to_save": ["shared_expert_gate", "gate"]}, False),
    ],
    ids=str,
)
def test_an_adapter_on_it_trains_as_in_peft(
    tmp_path: Path, layout: Layout, options: dict[str, Any], changes: dict[str, Any], base: bool
) -> None:
    for differences in pool(layout.world).run(
        _with_adapter, tmp_path, layout, options, changes, base, timeout_s=60
    ):
        assert any("shared_expert.up_proj.lora_B." in name for name in differences)
        whole = "shared_expert.up_proj.base_layer.weight.grad of step 0"
        assert any(name.endswith(whole) for name in differences) == base
        assert_within([differences], 1e-9)


def _recomputed(
    directory: Path, options: dict[str, Any], reentrant: bool | None
) -> dict[str, float]:
    """Gradients of an adapter with dropout, whose masks are those of the places of tokens."""
    model = _adapted(Layout(1, 3, 1), options, lora_dropout=0.4)
    model.save_pretrained(directory)
    reference = plain(directory, TINY).train()
    share_masks(reference, model)[0] = 1
    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    for each in (reference, model):
        each(**batch(TINY.vocab_size, rows=3)).loss.backward()
    return gradient_errors(
        model, {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    )


@pytest.mark.parametrize(
    ("reentrant", "options"), [(None, {}), (True, {}), (False, OWN), (True, OWN)]
)
def test_dropout_of_an_adapter_is_that_of_the_places_of_tokens(
    tmp_path: Path, reentrant: bool | None, options: dict[str, Any]
) -> None:
    assert_within(pool(3).run(_recomputed, tmp_path, options, reentrant), 1e-9)


def _saved(directory: Path, layout: Layout, options: dict[str, Any]) -> None:
    _adapted(layout, options).save_pretrained(directory)


def _loaded(directory: Path, layout: Layout) -> dict[str, torch.Tensor]:
    found, merged = logits_in_life(parallel(TINY.model(), layout.mesh()), directory, INPUTS)
    merged.save_pretrained(directory / f"merged {layout}")
    return found


def test_an_adapter_of_any_layout_loads_and_merges_at_any_other(tmp_path: Path) -> None:
    saved = {}
    for layout, options in (
        *((Layout(1, 1, 1), {}), (Layout(1, 2, 2), {}), (Layout(1, 3, 1), {})),
        *((Layout(1, 2, 1), OWN), (Layout(1, 2, 2), {"invariant": px.Invariant(4)})),
    ):
        directory = tmp_path / f"{layout} {sorted(options)}"
        pool(layout.world).run(_saved, directory, layout, options)
        saved[directory] = load_file(directory / FILE)
    first, *others = saved
    for other in others:
        assert saved[other].keys() == saved[first].keys()
        assert all(torch.equal(saved[other][n], value) for n, value in saved[first].items())
    assert any("shared_expert.down_proj.lora_A" in name for name in saved[first])
    expected = logits_of(plain(first, TINY), INPUTS)
    for layout in (Layout(1, 2, 2), Layout(1, 3, 1)):
        for found in pool(layout.world).run(_loaded, first, layout):
            check_life(found, expected, biased=False)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            first / f"merged {layout}", dtype=torch.float64, experts_implementation="eager"
        )
        error = (logits_of(exact(again), INPUTS) - expected).abs().max()
        assert error < 1e-6 * expected.abs().max()  # transformers' router computes in fp32


def _reached(**options: Any) -> tuple[list[str], int]:
    """What all-linear reaches, and the columns of a weight that this rank holds."""
    model = parallel(TINY.model(), mesh_of(), **options)
    columns = model.get_submodule(EXPERT[2]).weight.size(1)
    model = peft.get_peft_model(model, px.LoraConfig(r=2, target_modules="all-linear"))
    return sorted(model.peft_config["default"].target_modules), columns


def _reached_in_ways() -> None:
    reached = _reached()
    assert {*EXPERT} < {*reached[0]}
    assert not [name for name in reached[0] if name.endswith("gate")]
    assert reached[1] == 9 - mesh_of().tp_rank
    assert _reached(**OWN) == reached
    assert _reached(invariant=px.Invariant(8))[0] == reached[0]
    model = parallel(TINY.model(), mesh_of())
    with pytest.raises(NotImplementedError, match="shared_expert_gate is not supported: every"):
        peft.get_peft_model(model, px.LoraConfig(r=2, target_modules=["shared_expert_gate"]))


def test_all_linear_reaches_it_however_the_model_is_parallel() -> None:
    pool(2).run(_reached_in_ways)


def _step(options: dict[str, Any]) -> list[dict[str, int]]:
    model = parallel(TINY.model(), mesh_of(), **options)
    loss, forward = counted(lambda: model(**batch(TINY.vocab_size)).loss)
    return [forward, counted(loss.backward)[1]]


def test_it_sends_what_an_mlp_sends() -> None:
    """Of two layers, one with an MLP and one with a mixture."""
    for forward, backward in pool(2).run(_step, {}):
        assert forward["all_reduce"] == 2 + 1 + 1  # attentions, the MLP, the expert
        assert backward["all_reduce"] == 1 + 2 + 1 + 1 + 1  # the head; experts that both hold
    for forward, backward in pool(2).run(_step, OWN):
        assert forward["swap"] == 1 + 2 * (2 + 1 + 1) + 2  # embedding; tokens of the head
        assert backward["swap"] == 2 * (2 + 1 + 1) + 1


def _broken(what: str) -> float:
    reference, model, _ = spread(TINY, Layout(1, 2, 1), None, **(OWN if "order" in what else {}))
    expert = model.model.layers[1].mlp.shared_expert
    if what == "sum of the input's gradient":
        expert._forward_pre_hooks.clear()
    elif what == "order of the sums":
        (leave,) = (h for h in expert._forward_hooks.values() if isinstance(h, ChangeOutput))
        plain = leave.change
        leave.change = lambda partial: plain(partial.flip(0) if partial.dim() == 2 else partial)
    return worst(gradient_differences(reference, model, batch(TINY.vocab_size)))[0]


@pytest.mark.parametrize("what", ["sum of the input's gradient", "order of the sums"])
def test_parity_notices_a_broken(what: str) -> None:
    assert max(pool(2).run(_broken, what)) > 1e-4
