"""Small models on the device train and generate as HuggingFace's do on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from on_device import CPU, placed
from reference import FLOOR, Tiny, batch, exact_norms, worst
from reference_lora import ALL
from reference_mixtral import TinyMixtral, TinyQwen3Moe, batches, differences_of_steps
from reference_ops import aten_path

import parallel_ext as px

MODELS = {"Llama": Tiny(), "Mixtral": TinyMixtral(), "Qwen3-MoE": TinyQwen3Moe()}
EVERY_MODEL = pytest.mark.parametrize("tiny", MODELS.values(), ids=MODELS)


def _loaded(reference: Any, folder: Path, device: torch.device) -> tuple[Any, px.Mesh]:
    """Return the parallel model of what the plain one saves."""
    loss = reference.__dict__.pop("_loss_function")  # of ``exact``
    reference.save_pretrained(folder)
    reference._loss_function = loss
    mesh = px.init_mesh(device=device)
    model = exact_norms(px.from_pretrained(folder, mesh, dtype=torch.float64)).train()
    assert {each.device for each in model.parameters()} == {mesh.device}
    assert {each.device for each in model.buffers()} == {mesh.device}
    assert mesh.device == device
    return model, mesh


ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA and rows of tokens": {"use_dora": True, "trainable_token_indices": [96, 0, 14]},
}


def _with_adapters(reference: Any, model: Any, **changes: Any) -> tuple[Any, Any]:
    options = {"r": 5, "lora_alpha": 7, "target_modules": ALL, "init_lora_weights": False}
    options |= changes
    ours = peft.get_peft_model(model, px.LoraConfig(**options)).double()
    plain = peft.get_peft_model(reference, peft.LoraConfig(**options)).double()
    trained = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    missing = plain.load_state_dict(trained, strict=False)
    assert not missing.unexpected_keys
    return plain, ours


@pytest.mark.parametrize("name", [*MODELS, *ADAPTERS])
def test_steps_are_those_of_huggingface(name: str, device: torch.device, tmp_path: Path) -> None:
    tiny = MODELS.get(name, MODELS["Llama"])
    reference = tiny.model().to(device)
    model, mesh = _loaded(reference, tmp_path, device)
    if name in ADAPTERS:
        reference, model = _with_adapters(reference, model, **ADAPTERS[name])
    of_steps = (placed(batches(tiny, 1, seed=step), device) for step in range(3))
    differences = differences_of_steps(reference, model, mesh, of_steps)
    assert len(differences) > 20
    error, where = worst(differences)
    assert error <= FLOOR[torch.float64] * (10 if name in ADAPTERS else 1), where


@EVERY_MODEL
def test_greedy_tokens_are_those_of_huggingface(
    tiny: Any, device: torch.device, tmp_path: Path
) -> None:
    reference = tiny.model().eval().to(device)
    model, _ = _loaded(reference, tmp_path, device)
    prompt = placed(batch(tiny.vocab_size), device)
    del prompt["labels"]
    options = {"max_new_tokens": 9, "eos_token_id": None, "do_sample": False}
    expected = reference.generate(**prompt, **options)
    ours = px.generate(model.eval(), prompt.pop("input_ids"), **prompt, **options)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("options", [{}, {"top_k": 7, "top_p": 0.8, "temperature": 1.5}], ids=str)
def test_sampled_tokens_are_those_of_the_cpu(
    options: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    reference = MODELS["Llama"].model().eval()
    prompt = batch(MODELS["Llama"].vocab_size)
    del prompt["labels"]
    tokens = []
    for where, aten in ((device, device.type == "cpu"), (CPU, False)):
        model, _ = _loaded(reference, tmp_path, where)
        arguments = {**placed(prompt, where), "do_sample": True, "max_new_tokens": 12, "seed": 3}
        with aten_path(aten):
            ids = arguments.pop("input_ids")
            tokens.append(px.generate(model.eval(), ids, **arguments, **options).tolist())
    assert tokens[0] == tokens[1]
