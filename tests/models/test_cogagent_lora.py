"""Adapters on a CogAgent that is spread over ranks are those of PEFT on the single process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from ranks import pool
from reference import assert_within, difference, parallel
from reference_cogagent import batches_of, exact, picture, text, tiny_model
from reference_lora import logits_of
from reference_mixtral import Layout, assert_refused, differences_of_adapter
from transformers import AutoModelForCausalLM

import parallel_ext as px
from parallel_ext.models.cogagent import CogAgentForCausalLM

DECODER = [
    *("language_expert_query_key_value", "language_expert_dense"),
    *("vision_expert_query_key_value", "vision_expert_dense"),
    *("language_mlp.gate_proj", "language_mlp.up_proj", "language_mlp.down_proj"),
    *("vision_mlp.gate_proj", "vision_mlp.up_proj", "vision_mlp.down_proj"),
    *("cross_attn.query", "cross_attn.key_value", "cross_attn.dense"),
]
TOWER = ["attention.query_key_value", "attention.dense", "fc1", "fc2", "dense_4h_to_h"]
EVERYWHERE = {"r": 3, "lora_alpha": 5, "target_modules": [*DECODER, *TOWER]}
ROWS = [picture(6), text(9)]


def _model() -> CogAgentForCausalLM:
    return exact(tiny_model().train())


def _gradients(layout: Layout, options: dict[str, Any], ranks: list) -> dict[str, float]:
    return differences_of_adapter(_model, layout, batches_of(ranks), **options)


CASES = {
    "a tower whole, dp ranks": (
        Layout(2, 2, 1),
        {"target_modules": ["language_expert_dense"], "modules_to_save": ["cross_vision"]},
        [[picture(6)], [text(9)]],
    ),
    "all linears, four ranks": (Layout(1, 4, 1), EVERYWHERE, [ROWS]),
    "biases of adapters": (Layout(1, 2, 1), {**EVERYWHERE, "lora_bias": True}, [ROWS]),
    "whole modules beside": (
        Layout(1, 2, 1),
        {
            "target_modules": ["language_expert_dense"],
            "modules_to_save": ["vision_mlp", "cross_attn", "cross_vision", "linear_proj"],
        },
        [ROWS],
    ),
    "text only": (Layout(1, 2, 1), EVERYWHERE, [[text(5), text(9)]]),
    "a dp rank without an image": (Layout(2, 2, 1), EVERYWHERE, [[picture(6)], [text(9)]]),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_adapters_are_those_of_peft(case: str) -> None:
    layout, *_ = CASES[case]
    assert_within(pool(layout.world).run(_gradients, *CASES[case]), 1e-5)  # factors are fp32


def test_all_linear_means_all_that_are_cut() -> None:
    found = pool(2).run(_targets)[0]
    targets = {*DECODER, *TOWER, "linear_proj.gate_proj", "dense_h_to_4h"}
    assert all(path.endswith(tuple(targets)) for path in found)
    assert all(any(path.endswith(target) for path in found) for target in targets)


def _targets() -> list[str]:
    model = parallel(_model(), Layout(1, 2, 1).mesh())
    config = px.LoraConfig(target_modules="all-linear")
    return peft.get_peft_model(model, config).base_model.targeted_module_names


# Training, with dropout, at any tp; saving, merging, reading back.

INPUTS = {name: value for name, value in batches_of([ROWS])[0].items() if name != "labels"}
_logits = partial(logits_of, inputs=INPUTS)


def _generated(model: Any) -> list[list[int]]:
    wanted = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    return model.eval().generate(**INPUTS, **wanted).tolist()


def _train_and_save(directory: Path) -> tuple[list[float], torch.Tensor, torch.Tensor, list]:
    model = parallel(tiny_model().float(), Layout(1, dist.get_world_size(), 1).mesh())
    torch.manual_seed(11)  # of rank 0 counts
    model = peft.get_peft_model(model, px.LoraConfig(**EVERYWHERE, lora_dropout=0.1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    losses = []
    for _ in range(3):
        loss = model.train()(**batches_of([ROWS])[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.save_pretrained(directory)
    before, tokens = _logits(model), _generated(model)
    model.merge_adapter()
    merged = _logits(model)
    model.unmerge_adapter()
    assert torch.equal(_logits(model), before)
    return losses, before, merged, tokens


def test_an_adapter_trains_equally_at_any_tp_and_its_merge_answers_equally(tmp_path: Path) -> None:
    """The failures of CogVLM #268 (sizes), #456 (merged answers) and #448 (buffers lost)."""
    runs = {tp: pool(tp).run(_train_and_save, tmp_path / f"{tp}")[0] for tp in (1, 2, 4)}
    losses, logits, _, tokens = runs[1]
    assert losses[2] < losses[0] - 1e-2
    for tp, (own_losses, own_logits, merged, own_tokens) in runs.items():
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert difference(own_logits, logits) < 1e-3  # three steps of AdamW in fp32
        assert difference(merged, own_logits) < 1e-5
        plain = peft.PeftModel.from_pretrained(tiny_model().float(), tmp_path / f"{tp}")
        assert difference(_logits(plain), own_logits) < 1e-5
        assert _generated(plain) == own_tokens
        whole = plain.merge_and_unload()
        assert difference(_logits(whole), own_logits) < 1e-5
        assert _generated(whole) == own_tokens
    whole.save_pretrained(tmp_path / "merged")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(_logits(again), _logits(whole))
    assert tokens == _generated(again)
    for found in pool(2).run(_read_merged, tmp_path / "merged"):
        assert difference(found, _logits(whole)) < 1e-5


def _read_merged(directory: Path) -> torch.Tensor:
    return _logits(px.from_pretrained(directory, Layout(1, 2, 1).mesh()))


def _tower_trained_whole(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = Layout(1, dist.get_world_size(), 1).mesh()
    whole = {"target_modules": ["fc1"], "modules_to_save": ["cross_vision"]}
    model = peft.get_peft_model(parallel(tiny_model(), mesh), px.LoraConfig(**whole))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.3)
    model.save_pretrained(directory)
    again = peft.PeftModel.from_pretrained(parallel(tiny_model(), mesh), directory)
    return _logits(model), _logits(again)


def test_a_tower_trained_whole_is_saved_with_its_buffers(tmp_path: Path) -> None:
    plain = None
    for logits, again in pool(2).run(_tower_trained_whole, tmp_path):
        plain = plain or peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
        assert torch.equal(again, logits)
        assert difference(_logits(plain), logits) < 1e-10
        assert difference(_logits(tiny_model()), logits) > 1e-3


# What does not fit.


def _adapter(target: str) -> None:
    model = parallel(_model(), Layout(1, 2, 1).mesh())
    peft.get_peft_model(model, px.LoraConfig(target_modules=target))


def _dead() -> None:
    _adapter(r".*\.blocks\.\d+\.attn\.q_proj")


def _whole() -> None:
    _adapter(r".*vision\.linear_proj\.linear_proj")


REFUSALS = {
    "a dead adapter": (_dead, 2, "reads the weights of its q, k and v past these modules"),
    "a module that is whole on every rank": (_whole, 2, "linear_proj.linear_proj is not supported"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_is_refused(case: str) -> None:
    assert_refused(__name__, case)
