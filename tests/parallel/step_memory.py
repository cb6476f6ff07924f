"""Print what a training step takes of a rank's memory: ``torchrun step_memory.py '{...}'``."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import parallel_ext as px
from parallel_ext.lora import adapt_all_linears


def config_of(kind: str, hidden: int = 512) -> transformers.PreTrainedConfig:
    """Return a configuration large enough for its tensors to be most of a process."""
    sizes = {
        "vocab_size": 16 * hidden,
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    if kind == "mixtral":
        return transformers.MixtralConfig(
            intermediate_size=11 * hidden // 8, num_local_experts=8, **sizes
        )
    return transformers.LlamaConfig(intermediate_size=11 * hidden // 4, **sizes)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _step(case: dict[str, Any], hidden: int, mesh: px.Mesh, times: int) -> Any:
    """Train some steps; return what lives on."""
    torch.manual_seed(0)
    config = config_of(case["kind"], hidden)
    model = transformers.AutoModelForCausalLM.from_config(config)
    own = case["sequence_parallel"]
    model = model.to(getattr(torch, case["dtype"]))
    model = px.parallelize(model, mesh, sequence_parallel=own).train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case["r"]:
        model = adapt_all_linears(model, case["r"])
    px.data_parallel(model, mesh, zero=case["zero"])
    if case["kind"] == "mixtral":
        px.force_routing(model, "balanced")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    ids = torch.randint(0, config.vocab_size, (case["rows"], case["tokens"] * hidden // 512))
    for _ in range(times):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main() -> None:
    case = json.loads(sys.argv[1])
    ctypes.CDLL(None).mallopt(-3, 65536)  # else glibc keeps what is freed, up to 32 MiB a tensor
    mesh = px.init_mesh(tp=case["tp"], ep=case["ep"])
    _step(case, 64, mesh, 1)  # libraries make room for themselves
    gc.collect()
    before = _resident("VmRSS")
    kept = _step(case, 512, mesh, 2)
    peak = _resident("VmHWM") - before
    values = [kept[0].parameters(), *(state.values() for state in kept[1].state.values())]
    sizes = [
        sum((v.to_local() if hasattr(v, "to_local") else v).nbytes for v in of if v.dim())
        for of in values
    ]
    if mesh.rank == 0:
        print("RESULT", json.dumps([peak, sizes[0], sum(sizes[1:])]))


if __name__ == "__main__":
    main()
