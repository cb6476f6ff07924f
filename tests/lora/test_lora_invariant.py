"""Adapters with the same bits on any tp and dp: losses, norms and digests of steps of leaves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from ranks import pool
from reference import Tiny, assert_within, batch, mesh_of, parallel, worst
from reference_invariant import BITS, assert_bits, digests
from reference_leaves import Layout, sweep
from reference_lora import ALL, FILE, config, gradient_errors, plain, share_masks
from reference_mixtral import TinyMixtral
from safetensors.torch import load_file
from test_specs import OfSpec

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn.blocks import BlockRowLinear
from parallel_ext.nn.forward_counter import ForwardCounter

ROWS, STEPS = 7, 2
LAYERS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"]
KINDS: dict[str, tuple[Tiny | OfSpec | TinyMixtral, dict[str, Any]]] = {
    "odd": (Tiny(dtype=torch.float32), {"lora_dropout": 0.1, "target_modules": "all-linear"}),
    "bf16": (
        Tiny(dtype=torch.bfloat16, heads=8, key_value_heads=4, bias=True),
        {"r": 16, "target_modules": [*ALL, "lm_head", "embed_tokens"]},
    ),
    "embedding": (
        Tiny(dtype=torch.float32, tied=True),
        {"lora_dropout": 0.3, "use_rslora": True, "target_modules": LAYERS},
    ),
    "head": (
        Tiny(dtype=torch.float32),
        {"lora_dropout": 0.1, "target_modules": ["lm_head", "k_proj"], "lora_bias": True},
    ),
    "biases": (
        Tiny(dtype=torch.float32, heads=8, key_value_heads=2, inner=33, bias=True),
        {"lora_bias": True, "bias": "all", "target_modules": "all-linear"},
    ),
    "modules": (
        Tiny(dtype=torch.float32),
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["lm_head", "embed_tokens", "norm", "input_layernorm"],
        },
    ),
    "tied modules": (
        Tiny(dtype=torch.bfloat16, tied=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "mlp", "v_proj"]},
    ),
    "rows of tokens": (
        Tiny(dtype=torch.bfloat16, tied=True),
        {"target_modules": ["q_proj"], "trainable_token_indices": [90, 0, 1, 32]},
    ),
    "joined": (
        OfSpec("phi3", dtype=torch.float32),
        {"lora_dropout": 0.1, "target_modules": "all-linear", "lora_bias": True},
    ),
    "low ranks": (
        OfSpec("deepseek_v3", dtype=torch.float32),
        {"lora_dropout": 0.1, "target_modules": ["q_b_proj", "kv_b_proj", "o_proj"]},
    ),
    "experts": (
        TinyMixtral(dtype=torch.float32, num_experts=5, skew="an idle expert"),
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
}


def _model(kind: str, tp: int, ep: int = 0) -> Any:
    tiny, changes = KINDS[kind]
    mesh = mesh_of(tp=tp, ep=ep or (tp if isinstance(tiny, TinyMixtral) else 1))
    model = px.parallelize(tiny.model(), mesh, invariant=px.Invariant(8, leaves=5))
    torch.manual_seed(11)
    return peft.get_peft_model(model, config(**changes)).train()


def _train(
    kind: str,
    tp: int,
    steps: Sequence[int] = range(STEPS),
    root: Path | None = None,
    how: str = "",
) -> BITS:
    """Losses, norms and the digest after steps on this pool's ranks."""
    tiny, _ = KINDS[kind]
    model = _model(kind, tp, ep=1 if how == "whole experts" else 0)
    if how == "checkpointing":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if root is not None and steps[0] > 0:
        px.load_checkpoint(root, model, optimizer)
    log = []
    for step in steps:
        optimizer.zero_grad()
        of_batch = batch(tiny.vocab_size, 2 if how == "ranks without rows" else ROWS, 11, seed=step)
        if how == "no leaves":
            loss = model(**of_batch).loss
            loss.backward()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                loss = px.train_leaves(model, of_batch)
        log.append((loss.item().hex(), px.clip_grad_norm_(model, 0.5).item().hex()))
        optimizer.step()
    if root is not None and steps[-1] < STEPS - 1:
        px.save_checkpoint(root, steps[-1] + 1, model, optimizer)
    return log, digests(model, optimizer), px.digest(model)


def _so(how: str, *args: Any) -> BITS:
    return _train(*args, how=how)


@lru_cache
def _whole(kind: str, how: str = "") -> BITS:
    (bits,) = pool(1).run(_so, how, kind, 1)
    return bits


@sweep(KINDS, [(2, 1, 0), (3, 1, 0), (4, 2, 0), (3, 3, 0)], often=[(4, 2, 0)])
def test_any_layout_has_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    for ranks, tp, _ in layouts:
        assert_bits(pool(ranks).run(_train, case, tp), _whole(case))


@sweep(
    ["checkpointing", "ranks without rows", "autocast"],
    [(3, 1, 0), (4, 2, 0)],
    often=[(4, 2, 0)],
)
def test_ways_to_train_have_the_bits_of_one_process(case: str, layouts: Sequence[Layout]) -> None:
    whole = _whole("odd", "" if case == "checkpointing" else case)
    for ranks, tp, _ in layouts:
        assert_bits(pool(ranks).run(_so, case, "odd", tp), whole)


def test_without_leaves_any_tp_has_the_bits_of_one_process() -> None:
    assert_bits(pool(3).run(_so, "no leaves", "odd", 3), _whole("odd", "no leaves"))


def test_a_run_resumes_on_other_layouts_with_the_same_bits(tmp_path: Path) -> None:
    log, blocks, digest = _whole("odd")
    for (saving, tp), (loading, other) in (((4, 2), (3, 1)), ((2, 1), (3, 3))):
        root = tmp_path / f"{saving} to {loading}"
        pool(saving).run(_train, "odd", tp, (0,), root)
        resumed = pool(loading).run(_train, "odd", other, (1,), root)
        assert_bits(resumed, (log[1:], blocks, digest))


def _keyed_by_forward(*args: Any) -> BITS:
    """As if dropout counted the forwards of a rank, and began anew in each."""
    number = ForwardCounter.number

    def counted(self: ForwardCounter, what: str) -> int:
        self.first_row = None
        return number(self, what)

    with mock.patch.object(ForwardCounter, "number", counted):
        return _train(*args)


def _summed_over_ranks(*args: Any) -> BITS:
    """With one product a rank, and their sum, in the place of the tree of blocks."""

    def summed(self: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.reduce_from_region(input @ weight.T, self.group)

    with mock.patch.object(BlockRowLinear, "like_weight", summed):
        return _train(*args)


@pytest.mark.parametrize(("broken", "tp"), [(_keyed_by_forward, 1), (_summed_over_ranks, 2)])
def test_the_tests_above_notice(broken: Any, tp: int) -> None:
    (whole,) = pool(1).run(broken, "odd", 1)
    with pytest.raises(AssertionError):
        assert_bits(pool(2).run(broken, "odd", tp), whole)


def _digest_of_changed(kind: str, name: str) -> tuple[str, str]:
    model = _model(kind, 2)
    before = px.digest(model)
    with torch.no_grad():
        model.get_parameter(name).add_(1e-3)
    return before, px.digest(model)


def test_the_digest_is_of_the_factors_too() -> None:
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.default.weight"
    for factor in "AB":
        for before, after in pool(2).run(_digest_of_changed, "odd", name.format(factor)):
            assert before != after


def _parity(directory: Path, tp: int) -> dict[str, float]:
    """Differences from PEFT's gradients and loss on the same adapter and masks."""
    tiny = Tiny(bias=True)
    mesh = mesh_of(tp=tp)
    model = parallel(tiny.model(), mesh, invariant=px.Invariant(4, leaves=4))
    torch.manual_seed(11)
    changes = {"lora_dropout": 0.3, "target_modules": [*LAYERS, "lm_head"]}
    model = peft.get_peft_model(model, config(**changes)).train()
    model.save_pretrained(directory)
    reference = plain(directory, tiny).train()
    step = share_masks(reference, model)
    of_batch = batch(tiny.vocab_size, ROWS, 11)
    found = {}
    for step[0] in (1, 2):
        model.zero_grad()
        reference.zero_grad()
        loss, expected = px.train_leaves(model, of_batch), reference(**of_batch).loss
        expected.backward()
        gradients = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
        found[f"gradients of step {step[0]}"] = worst(gradient_errors(model, gradients))[0]
        found[f"loss of step {step[0]}"] = (loss / expected - 1).abs().item()
    return found


@pytest.mark.parametrize(("ranks", "tp"), [(4, 2), (3, 1)])
def test_gradients_are_those_of_peft(tmp_path: Path, ranks: int, tp: int) -> None:
    assert_within(pool(ranks).run(_parity, tmp_path, tp), 1e-9)


def _saved(folder: Path, tp: int) -> None:
    _model("odd", tp).save_pretrained(folder)


def test_files_of_an_adapter_are_the_same_on_any_layout(tmp_path: Path) -> None:
    pool(1).run(_saved, tmp_path / "whole", 1)
    pool(4).run(_saved, tmp_path / "ours", 2)
    whole, ours = (load_file(tmp_path / each / FILE) for each in ("whole", "ours"))
    assert whole.keys() == ours.keys()
    assert all(torch.equal(whole[name], ours[name]) for name in whole)


def test_ranks_with_all_experts_have_the_bits_of_one_process() -> None:
    assert_bits(pool(2).run(_so, "whole experts", "experts", 2), _whole("experts"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_dropout_are_those_of_the_whole(dtype: torch.dtype) -> None:
    dropout = ops.Dropout(0.3, key=2**40 + 5, step=3, token=7, feature=37)
    input = torch.randn(2, 9, 300, dtype=dtype, requires_grad=True)
    output = ops.seeded_dropout(input, dropout)
    output.sum().backward()
    kept = input.grad != 0
    assert 0.6 < kept.float().mean() < 0.8
    assert torch.equal(output != 0, kept)
    expected = input.detach()[kept].double() * 65536 / (65536 - round(0.3 * 65536))
    torch.testing.assert_close(output.detach()[kept].double(), expected, rtol=5e-3, atol=0)
    part = dropout._replace(token=7 + 9, feature=37 + 130)
    assert torch.equal(ops.seeded_dropout(input[1, :, 130:], part), output[1, :, 130:])
