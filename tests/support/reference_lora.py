"""Adapters on the small Llama and Mixtral, and PEFT's own answers for the same in one process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from philox import kept, scale
from reference import Tiny, mesh_of, parallel
from reference_mixtral import Layout, TinyMixtral
from safetensors.torch import load_file
from torch import nn

import parallel_ext as px
from parallel_ext.lora.layers import AdaptedLinear
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.slices import take

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH: dict[str, Any] = {"target_modules": [], "target_parameters": [GATE_UP, DOWN]}
TINY = Tiny()
FILE = "adapter_model.safetensors"


def config(**changes: Any) -> px.LoraConfig:
    """An adapter that changes the model from the start."""
    options = {"r": 5, "lora_alpha": 7, "target_modules": ALL, "init_lora_weights": False}
    return px.LoraConfig(**{**options, **changes})


def with_adapter(model: Any, **changes: Any) -> peft.PeftModel:
    """A parallel model with an adapter, made by ranks that are seeded unlike."""
    torch.manual_seed(11 + (dist.get_rank() if dist.is_initialized() else 0))
    return peft.get_peft_model(model, config(**changes))


def adapted(tiny: Tiny = TINY, **changes: Any) -> peft.PeftModel:
    """The same of a small Llama, over all ranks."""
    return with_adapter(parallel(tiny.model(), mesh_of()), **changes)


def adapted_experts(tiny: TinyMixtral, layout: Layout, **changes: Any) -> peft.PeftModel:
    """The same of a mixture, with an adapter of its experts alone."""
    return with_adapter(parallel(tiny.model(), layout.mesh()), **{**BOTH, **changes})


def plain(directory: Path, tiny: Tiny | TinyMixtral = TINY) -> peft.PeftModel:
    """The single-process model with the adapter in ``directory``, by PEFT alone."""
    return peft.PeftModel.from_pretrained(
        tiny.model(),
        directory,
        is_trainable=True,
        config=peft.LoraConfig.from_pretrained(directory),
    )


def files_of_layouts(
    root: Path, layouts: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of one adapter that each of the layouts saved, and those that PEFT saved.

    Each lies in a folder of ``root``, that of PEFT in ``peft``. Raises unless all layouts saved the
    same, under PEFT's names, shapes and dtypes, with PEFT's configuration.
    """
    one, *others, expected = (load_file(root / name / FILE) for name in (*layouts, "peft"))
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(other[name], one[name]) for name in one)
    of_one, by_peft = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in each.items()}
        for each in (one, expected)
    )
    assert of_one == by_peft
    configs = [
        json.loads((root / name / "adapter_config.json").read_text())
        for name in (layouts[1], "peft")
    ]
    for each in configs:
        for targets in (each["target_modules"], each["target_parameters"]):
            (targets or []).sort()
    assert configs[0] == configs[1]
    return one, expected


def logits_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """What a model answers in evaluation."""
    with torch.no_grad():
        return model.eval()(**inputs).logits


def logits_in_life(
    base: Any, directory: Path, inputs: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], Any]:
    """Logits with a saved adapter, without, merged, and put back; and the model without PEFT."""
    found = {"base": logits_of(base, inputs)}
    model = peft.PeftModel.from_pretrained(base, directory)
    found["adapted"] = logits_of(model, inputs)
    with model.disable_adapter():
        found["disabled"] = logits_of(model, inputs)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.merge_adapter(safe_merge=True)
    found["merged"] = logits_of(model, inputs)
    with model.disable_adapter():
        found["unmerged by disabling"] = logits_of(model, inputs)
    model.merge_adapter()
    model.unmerge_adapter()
    found["unmerged"] = logits_of(model, inputs)
    assert not [n for n, p in model.named_parameters() if not torch.equal(before[n], p)]
    plain = model.merge_and_unload()
    return {**found, "unloaded": logits_of(plain, inputs)}, plain


def check_life(found: dict[str, torch.Tensor], expected: torch.Tensor, biased: bool) -> None:
    """Raise unless the logits of a life are those that PEFT's own model gives with the adapter."""
    largest = expected.abs().max()
    for name in ("adapted", "merged", "unloaded"):
        assert (found[name] - expected).abs().max() < 1e-9 * largest, name
    assert torch.equal(found["unmerged"], found["adapted"])
    assert torch.equal(found["unmerged by disabling"], found["disabled"])
    assert torch.equal(found["disabled"], found["base"]) or biased  # PEFT trains those of the base
    assert (found["disabled"] - expected).abs().max() > 1e-3 * largest


class Masked(nn.Module):
    """Dropout by the masks of the parallel model's forward number ``step``."""

    def __init__(self, p: float, key: int, step: list[int]) -> None:
        super().__init__()
        self.p, self.key, self.step = p, key, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        tokens = x.numel() // x.shape[-1]
        mask = kept(tokens, x.shape[-1], self.p, self.key, self.step[0]).view(x.shape)
        return x * mask * scale(self.p)


def share_masks(reference: nn.Module, model: nn.Module) -> list[int]:
    """Give ``reference`` the masks of ``model``; returns the cell that holds its step."""
    step = [0]
    for path, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            dropouts = reference.get_submodule(path).lora_dropout
            for adapter, layer in dropouts.items():
                if isinstance(layer, nn.Dropout):
                    dropouts[adapter] = Masked(layer.p, module._mask_keys[adapter], step)
    return step


def train(
    model: Any, clip: Any, data: list[dict[str, Any]], step: list[int], first: int
) -> tuple[list[float], list[float]]:
    """AdamW steps: the losses, and the gradient norms before clipping."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses, norms = [], []
    for number, batch in zip(itertools.count(first), data, strict=False):
        step[0] = number
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(float(clip(model)))
        optimizer.step()
    return losses, norms


def gradient_errors(model: Any, gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of every trained parameter's shard, relative to the largest element of the whole."""
    errors = {}
    for name, parameter, layout in named_shards(model):
        if parameter.requires_grad:
            full = gradients[name]
            own = take(full, layout, mesh_of().tp_rank)
            largest = full.abs().max().clamp_min(1e-30)
            difference = (parameter.grad - own).abs()
            errors[name] = (difference.max() / largest).item() if own.numel() else 0.0
    return errors
