"""Adapters on the experts of the small Mixtral, and PEFT's own for the single-process model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from reference import parallel
from reference_lora import config
from reference_mixtral import Layout, TinyMixtral

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH: dict[str, Any] = {"target_modules": [], "target_parameters": [GATE_UP, DOWN]}
FILE = "adapter_model.safetensors"


def adapted_experts(tiny: TinyMixtral, layout: Layout, **changes: Any) -> peft.PeftModel:
    """A parallel model with an adapter, made by ranks that are seeded unlike."""
    model = parallel(tiny.model(), layout.mesh())  # seeds
    torch.manual_seed(11 + (dist.get_rank() if dist.is_initialized() else 0))
    return peft.get_peft_model(model, config(**{**BOTH, **changes}))


def plain_experts(directory: Path, tiny: TinyMixtral) -> peft.PeftModel:
    """The single-process model with the adapter in ``directory``, by PEFT alone."""
    return peft.PeftModel.from_pretrained(
        tiny.model(),
        directory,
        is_trainable=True,
        config=peft.LoraConfig.from_pretrained(directory),
    )
