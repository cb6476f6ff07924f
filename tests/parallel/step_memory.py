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
from planned_steps import adapter, as_planned, bytes_held, config_of

import parallel_ext as px
from parallel_ext.parallel.estimate import Step


def parsed(case: dict[str, Any]) -> tuple[str, int, int, Step]:
    """Return which model a case trains, the sides tp and ep of its mesh, and the step."""
    step = {**case, "dtype": getattr(torch, case["dtype"])}
    kind, tp, ep = (step.pop(name) for name in ("kind", "tp", "ep"))
    return kind, tp, ep, Step(adapt=adapter(step.pop("r", None)), **step)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _train(kind: str, hidden: int, mesh: px.Mesh, step: Step, times: int) -> Any:
    """Train some steps; return what lives on."""
    torch.manual_seed(0)
    config = config_of(kind, hidden)
    model = as_planned(transformers.AutoModelForCausalLM.from_config(config), mesh, step)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    ids = torch.randint(0, config.vocab_size, (step.rows, step.tokens * hidden // 512))
    for _ in range(times):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main() -> None:
    kind, tp, ep, step = parsed(json.loads(sys.argv[1]))
    ctypes.CDLL(None).mallopt(-3, 65536)  # else glibc keeps what is freed, up to 32 MiB a tensor
    mesh = px.init_mesh(tp=tp, ep=ep)
    _train(kind, 64, mesh, step, 1)  # libraries make room for themselves
    gc.collect()
    before = _resident("VmRSS")
    model, optimizer = _train(kind, 512, mesh, step, 2)
    peak = _resident("VmHWM") - before
    if mesh.rank == 0:
        print("RESULT", json.dumps([peak, *bytes_held(model, optimizer)]))


if __name__ == "__main__":
    main()
