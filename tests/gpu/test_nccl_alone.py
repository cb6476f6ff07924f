"""One rank over NCCL: a job that torchrun starts on a machine with one GPU, and every op."""

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


OPS = """
import sys, torch, torch.distributed as dist
from on_device import assert_as_in_fp64, device_path
from op_samples import REGISTERED, samples_of
from parallel_ext import _C
from parallel_ext.ops import ALONE, Group

device = torch.device(sys.argv[1])
dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
samples = []
for group in (Group(dist.group.WORLD.group_name, 1, 0), ALONE):
    torch.manual_seed(0)
    samples.append({name: samples_of(name, group) for name in REGISTERED})
_C.reset_collective_counts()
with device_path(device):
    for name in REGISTERED:
        op = getattr(torch.ops.parallel_ext, name)
        for communicating, alone in zip(*(each[name] for each in samples), strict=True):
            assert_as_in_fp64(op, communicating, device, alone)
counts = _C.collective_counts()
print(*sorted(kind for kind in ("all_gather", "all_reduce", "all_to_all") if counts.get(kind)))
dist.destroy_process_group()
"""


def _run(text: str, argument: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Let torchrun start a script as a job of one rank, which must end well."""
    script = folder / "script.py"
    script.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*torchrun, str(script), str(argument)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PARALLEL_EXT_DEBUG": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "destroy_process_group" not in done.stderr  # torch's warning of a group left behind
    return done


def test_a_job_of_one_rank_trains_over_nccl(cuda: torch.device, tmp_path: Path) -> None:
    assert _run(SCRIPT, tmp_path / "checkpoint", tmp_path).stdout.split() == ["done", "True"]


def test_a_group_of_one_with_a_name_communicates(device: torch.device, tmp_path: Path) -> None:
    """Every op, over NCCL on a GPU and over gloo on the CPU, is that of a rank that is alone."""
    found = _run(OPS, str(device), tmp_path).stdout.split()
    assert found == ["all_gather", "all_reduce", "all_to_all"]
