"""LoRA on a parallel model against PEFT on the single-process model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from ranks import Raised, pool
from reference import Tiny, batch, exact, mesh_of, parallel, worst
from safetensors.torch import load_file

import parallel_ext as px
from parallel_ext import _C
from parallel_ext.sharded import named_shards, take

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TINY = Tiny()
FILE = "adapter_model.safetensors"


def _config(**changes: Any) -> px.LoraConfig:
    options = {"r": 5, "lora_alpha": 7, "target_modules": ALL, "init_lora_weights": False}
    return px.LoraConfig(**{**options, **changes})


def _adapted(tiny: Tiny, **changes: Any) -> peft.PeftModel:
    model = parallel(tiny.model(), mesh_of())  # seeds
    torch.manual_seed(11 + (dist.get_rank() if dist.is_initialized() else 0))  # unlike on ranks
    return peft.get_peft_model(model, _config(**changes))


def _train(model: Any, clip: Any, one: dict[str, Any]) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**one).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(clip(model)))
        optimizer.step()
    return losses, norms


def _parity(
    directory: Path, tiny: Tiny, changes: dict[str, Any], skip_sum: bool = False, how: str = ""
) -> dict[str, Any]:
    """Differences of gradients, losses and norms from PEFT's on the same adapter."""
    model, one = _adapted(tiny, **changes), batch(tiny.vocab_size)
    if how == "two adapters":
        model.add_adapter("second", _config(r=2))
    model.save_pretrained(directory)
    reference = peft.PeftModel.from_pretrained(
        exact(tiny.model()),
        directory,
        is_trainable=True,
        config=peft.LoraConfig.from_pretrained(directory),
    )
    if how == "two adapters":
        reference.load_adapter(directory / "second", "second", is_trainable=True)
        for each in (model, reference):
            each.base_model.set_adapter(["default", "second"])
    elif how:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant checkpoints"})
    if skip_sum:
        for module in model.modules():
            if hasattr(module, "partials"):
                module.partials = None
    for each in (model, reference):
        each.train()
        each(**one).loss.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert sorted(found) == sorted(gradients)
    errors = _gradient_errors(model, gradients)
    if skip_sum:
        return {"gradients": worst(errors)[0]}
    losses, norms = _train(model, lambda m: px.clip_grad_norm_(m, 1.0), one)
    expected_losses, expected_norms = _train(
        reference, lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), one
    )
    return {
        "gradients": worst(errors)[0],
        "losses": max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)),
        "norms": max(abs(a - b) for a, b in zip(norms, expected_norms, strict=True)),
    }


def _gradient_errors(model: Any, gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    errors = {}
    for name, parameter, layout in named_shards(model):
        if parameter.requires_grad:
            full = gradients[name]
            own = take(full, layout, mesh_of().tp_rank)
            scale = full.abs().max().clamp_min(1e-30)
            errors[name] = (
                ((parameter.grad - own).abs().max() / scale).item() if own.numel() else 0.0
            )
    return errors


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"r": 40, "use_rslora": True}, {"target_modules": ["o_proj", "q_proj"], "r": 1}],
    ids=["all linears", "rank above a shard, rslora", "rank 1"],
)
def test_gradients_norm_and_steps_are_those_of_peft(
    tmp_path: Path, tp: int, changes: dict[str, Any]
) -> None:
    tiny = Tiny(bias=True) if tp == 2 else TINY
    for errors in pool(tp).run(_parity, tmp_path, tiny, changes):
        assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("how", ["two adapters", "reentrant checkpoints", "checkpoints"])
def test_other_ways_to_train_are_those_of_peft(tmp_path: Path, how: str) -> None:
    changes = {"rank_pattern": {"q_proj": 3, "down_proj": 9}, "alpha_pattern": {"v_proj": 4}}
    for errors in pool(2).run(_parity, tmp_path, TINY, changes, False, how):
        assert max(errors.values()) < 1e-9, errors


def test_the_comparison_notices_a_missing_sum(tmp_path: Path) -> None:
    for errors in pool(2).run(_parity, tmp_path, TINY, {}, True):
        assert errors["gradients"] > 1e-2


def _save(directory: Path, changes: dict[str, Any]) -> None:
    _adapted(TINY, **changes).save_pretrained(directory)


def test_the_adapter_does_not_depend_on_tp_and_its_files_are_those_of_peft(tmp_path: Path) -> None:
    for tp in (1, 2, 3):
        pool(tp).run(
            _save, tmp_path / str(tp), {"init_lora_weights": True, "base_model_name_or_path": "x"}
        )
    one = load_file(tmp_path / "1" / FILE)
    for tp in (2, 3):
        other = load_file(tmp_path / str(tp) / FILE)
        assert other.keys() == one.keys()
        assert all(torch.equal(other[name], one[name]) for name in one)
    plain = peft.get_peft_model(
        TINY.model(),
        peft.LoraConfig(r=5, lora_alpha=7, target_modules=ALL, base_model_name_or_path="x"),
    )
    plain.save_pretrained(tmp_path / "peft")
    expected = load_file(tmp_path / "peft" / FILE)
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }
    for name, value in one.items():
        if "lora_A" in name:
            assert value.abs().max() <= value.shape[1] ** -0.5
            assert value.std() == pytest.approx((value.shape[1] * 3) ** -0.5, rel=0.15)
        else:
            assert not value.any()
    configs = [
        json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in ("2", "peft")
    ]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]


def _load(directory: Path) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, int]]]:
    """Logits with the adapter, after merging it, and the collectives of a step."""
    model = peft.PeftModel.from_pretrained(
        parallel(TINY.model(), mesh_of()), directory, is_trainable=True
    )
    one = batch(TINY.vocab_size)
    counts = []
    for each in (parallel(TINY.model(), mesh_of()).train(), model.train()):
        if each is not model:
            each.requires_grad_(False)
            each.model.norm.weight.requires_grad_()
        _C.reset_collective_counts()
        loss = each(**one).loss
        forward = _C.collective_counts().get("all_reduce", 0)
        _C.reset_collective_counts()
        loss.backward()
        counts.append((forward, _C.collective_counts().get("all_reduce", 0)))
    model.eval()
    with torch.no_grad():
        logits = model(**{k: v for k, v in one.items() if k != "labels"}).logits
        with model.disable_adapter():
            base = model(input_ids=one["input_ids"]).logits
        plain = parallel(TINY.model(), mesh_of()).eval()(input_ids=one["input_ids"]).logits
        assert torch.equal(base, plain)
        merged = model.merge_and_unload()
        merged_logits = merged(**{k: v for k, v in one.items() if k != "labels"}).logits
    return logits, merged_logits, counts


def test_an_adapter_loads_at_any_tp_merges_and_sends_nothing_more(tmp_path: Path) -> None:
    pool(2).run(_save, tmp_path, {})
    reference = peft.PeftModel.from_pretrained(exact(TINY.model()), tmp_path).eval()
    one = {k: v for k, v in batch(TINY.vocab_size).items() if k != "labels"}
    with torch.no_grad():
        expected = reference(**one).logits
    for tp in (2, 3):
        for logits, merged, counts in pool(tp).run(_load, tmp_path):
            assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()
            assert (merged - expected).abs().max() < 1e-9 * expected.abs().max()
            (base_forward, _), (forward, backward) = counts
            assert forward == base_forward
            # Per layer the input of the attention and of the MLP, but the first layer's, which
            # needs none; the head's; and one for all replicated factors.
            assert backward == 2 * TINY.layers - 1 + 1 + 1


REFUSED = {
    "lora_dropout=0.1": {"lora_dropout": 0.1},
    "use_dora=True": {"use_dora": True},
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "bias='all'": {"bias": "all"},
    "modules_to_save=['lm_head']": {"modules_to_save": ["lm_head"]},
}


def _refused(case: str) -> None:
    _adapted(TINY, **REFUSED[case])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    for raised in pool(2).run_raising(_refused, case):
        assert isinstance(raised, Raised), raised
        assert raised.type == "NotImplementedError"
        assert f"does not support {case}" in raised.text


def test_a_plain_model_is_left_to_peft(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        TINY.model(), px.LoraConfig(r=2, lora_dropout=0.5, target_modules=ALL)
    )
    assert type(model.base_model.model.model.layers[0].mlp.up_proj) is peft.tuners.lora.layer.Linear
    model.save_pretrained(tmp_path)
    assert type(px.LoraConfig.from_pretrained(tmp_path)) is px.LoraConfig
