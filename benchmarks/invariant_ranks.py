"""The ranks of ``invariant.py``: both modes take turns in them, on the same model and batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import harness
import peft
import torch
import transformers

import parallel_ext as px

MODES = ("ordinary", "invariant")
SIZES = harness.size(
    {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 32000},
    {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 1, "vocab_size": 509},
)
TOKENS = harness.size(1024, 32)  # in two rows, or one a leaf
WARM_UP = harness.size(2, 0)


def build(
    mesh: px.Mesh, request: Mapping[str, Any], mode: str
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model of a mode, with the same weights in both, and its optimizer.

    Over dp ranks the ordinary mode is ZeRO-2.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**SIZES, **heads)
    if request["model"] == "mixture":
        half = {"intermediate_size": SIZES["intermediate_size"] // 2}  # of 8 experts, 2 a token
        config = transformers.MixtralConfig(**SIZES | half, **heads, num_local_experts=8)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(getattr(torch, request["dtype"])).train()
    leaves = max(1, request["leaves"])
    invariant = px.Invariant(blocks=8, leaves=leaves) if mode == "invariant" else None
    px.parallelize(model, mesh, invariant=invariant)
    if mesh.dp_size > 1 and invariant is None:
        px.data_parallel(model, mesh)
    if request["model"] == "lora":
        adapter = px.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
        model = peft.get_peft_model(model, adapter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-4)  # px.Invariant refuses a fused one


def forward_backward(model: torch.nn.Module, ids: torch.Tensor, mesh: px.Mesh, leaves: int) -> Any:
    """Return the loss of a batch of which each dp rank computes its share."""
    if leaves:
        return px.train_leaves(model, {"input_ids": ids, "labels": ids})
    own = ids.chunk(mesh.dp_size)[mesh.dp_rank]
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    return sum(mesh.control.all_gather_object(loss.item())) / mesh.world_size


def main() -> None:
    request = harness.arguments()
    mesh = px.init_mesh(tp=request["tp"], ep=request["tp"] if request["model"] == "mixture" else 1)
    runs = {mode: build(mesh, request, mode) for mode in MODES}
    answer = {mode: {"times": [], "losses": []} for mode in MODES}
    generator = torch.Generator().manual_seed(1)
    rows = max(2, request["leaves"])
    for turn in range(WARM_UP + request["repetitions"]):
        ids = torch.randint(0, SIZES["vocab_size"], (rows, TOKENS // rows), generator=generator)
        for mode in MODES if turn % 2 else MODES[::-1]:
            model, optimizer = runs[mode]
            leaves = request["leaves"] if mode == "invariant" else 0
            mesh.control.barrier("benchmark")
            start = time.perf_counter()
            loss = forward_backward(model, ids, mesh, leaves)
            px.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            spent = max(mesh.control.all_gather_object(time.perf_counter() - start))
            answer[mode]["losses"].append(float(loss))
            if turn >= WARM_UP:
                answer[mode]["times"].append(spent)
    harness.finish(answer)


if __name__ == "__main__":
    main()
