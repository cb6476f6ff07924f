"""One rank over NCCL: what torchrun starts on a machine with one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = """
import sys, torch, torch.distributed as dist
import parallel_ext as px
from reference import Tiny, batch, parallel

mesh = px.init_mesh()
assert mesh.device == torch.device("cuda", 0), mesh.device
assert dist.get_backend_config() == "cpu:gloo,cuda:nccl", dist.get_backend_config()
model = parallel(Tiny().model().to(mesh.device), mesh)
data = {name: each.to(mesh.device) for name, each in batch(101).items()}
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for step in range(3):
    loss = model(**data).loss
    loss.backward()
    px.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if step == 1:
        px.save_checkpoint(sys.argv[1], 2, model, optimizer)
px.load_checkpoint(sys.argv[1], model, optimizer)
assert model(**data).loss.item() == losses[2]
total = torch.ones(3, device=mesh.device)
dist.all_reduce(total)
assert total.tolist() == [1.0] * 3
print("done", losses[0] > losses[2])
"""


def test_a_job_of_one_rank_trains_over_nccl(cuda: torch.device, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PARALLEL_EXT_DEBUG": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["done", "True"]
    assert "destroy_process_group" not in done.stderr  # torch's warning of a group left behind
