"""The mesh as a grid: torch's view of it, copies of it, and what a job of one process lacks."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch.distributed.tensor import Shard, distribute_tensor

import parallel_ext as px
from parallel_ext.distributed.mesh import _device_of, _refuse_shared_gpus


def _view(tp: int) -> dict[str, Any]:
    mesh = px.init_mesh(tp=tp, timeout=60)
    view = mesh.device_mesh
    rows = distribute_tensor(torch.arange(8.0), view["tp"], [Shard(0)], src_data_rank=None)
    summed = {}
    for name in ("dp", "tp"):
        one = torch.tensor([float(mesh.rank)])
        dist.all_reduce(one, group=view[name].get_group())
        summed[name] = one.item()
    try:
        return {
            "ranks": view.mesh.tolist(),
            "place": (view.get_local_rank("dp"), view.get_local_rank("tp")),
            "rows": rows.to_local().tolist(),
            "sums": summed,
            "once": mesh.device_mesh is view,
        }
    finally:
        mesh.close()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_device_mesh_names_the_ranks_of_each_dimension(tp: int) -> None:
    size = 4
    rows = [list(range(first, first + tp)) for first in range(0, size, tp)]
    for rank, seen in enumerate(pool(size).run(_view, tp)):
        dp_rank, tp_rank = divmod(rank, tp)
        each = 8 // tp
        assert seen == {
            "ranks": rows,
            "place": (dp_rank, tp_rank),
            "rows": list(range(tp_rank * each, (tp_rank + 1) * each)),
            "sums": {"dp": sum(row[tp_rank] for row in rows), "tp": sum(rows[dp_rank])},
            "once": True,
        }


def _on_rank_0() -> list[int] | None:
    mesh = px.init_mesh(tp=2, timeout=60)
    found = mesh.device_mesh.mesh.tolist() if mesh.rank == 0 else None
    mesh.close()
    return found


def test_device_mesh_of_one_rank_needs_no_other() -> None:
    assert pool(2).run(_on_rank_0) == [[[0, 1]], None]


def test_device_mesh_of_a_job_without_torch_distributed_says_what_it_needs() -> None:
    with pytest.raises(RuntimeError, match="start the job with torchrun"):
        px.init_mesh().device_mesh  # noqa: B018


def test_a_mesh_is_shared_by_copies_and_is_not_pickled() -> None:
    mesh = px.init_mesh()
    assert copy.deepcopy(mesh) is mesh
    with pytest.raises(TypeError, match=r"model\.save_pretrained, px\.save_checkpoint"):
        pickle.dumps(mesh)


NCCL, GLOO, CPU_ONLY = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:gloo"


@pytest.mark.parametrize(
    ("gpus", "group", "environment", "asked", "expected"),
    [
        (0, None, {"LOCAL_RANK": "1"}, None, "cpu"),
        (1, None, {}, None, "cuda:0"),  # one process without torchrun
        (8, None, {"LOCAL_RANK": "3"}, None, "cuda:3"),
        (8, None, {"SLURM_LOCALID": "5"}, None, "cuda:5"),
        (1, None, {"LOCAL_RANK": "3"}, None, "cuda:0"),  # each rank is shown one GPU
        (8, NCCL, {"LOCAL_RANK": "3"}, None, "cuda:2"),  # the current one
        (8, GLOO, {}, "cuda", "cuda:2"),
        (8, CPU_ONLY, {}, None, "cpu"),
        (8, None, {"LOCAL_RANK": "3"}, "cpu", "cpu"),
        (8, None, {"LOCAL_RANK": "3"}, torch.device("cuda", 6), "cuda:6"),
    ],
)
def test_the_device_is_the_one_asked_for_or_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    group: str | None,
    environment: dict[str, str],
    asked: Any,
    expected: str,
) -> None:
    _machine(monkeypatch, gpus, group, environment)
    assert str(_device_of(asked)) == expected


@pytest.mark.parametrize(
    ("gpus", "group", "asked", "error", "words"),
    [
        (0, None, "cuda", RuntimeError, "device='cuda', but torch sees 0 GPUs"),
        (2, None, "cuda:2", RuntimeError, "device='cuda:2', but torch sees 2 GPUs"),
        (2, CPU_ONLY, "cuda", RuntimeError, "with cpu:gloo, which serves cpu"),
        (2, "cuda:nccl", "cpu", RuntimeError, "with cuda:nccl, which serves cuda"),
        (2, None, "meta", ValueError, "must be a CPU or a CUDA device, got 'meta'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    group: str | None,
    asked: str,
    error: type[Exception],
    words: str,
) -> None:
    _machine(monkeypatch, gpus, group, {})
    with pytest.raises(error, match=words):
        px.init_mesh(device=asked)


def _machine(
    monkeypatch: pytest.MonkeyPatch, gpus: int, group: str | None, environment: dict[str, str]
) -> None:
    """Let torch say that there are GPUs, the third current, and a group of the job."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: min(2, gpus - 1))
    monkeypatch.setattr(dist, "is_initialized", lambda: group is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: group)


def _on_gpus(numbers: list[int | None]) -> None:
    number = numbers[dist.get_rank()]
    properties = SimpleNamespace(uuid=None if number is None else f"GPU-{number}")
    mesh = px.init_mesh(timeout=60.0)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        _refuse_shared_gpus(mesh.control, torch.device("cuda", 0))


def test_two_ranks_that_share_a_gpu_through_nccl_are_named() -> None:
    pool(3).run(_on_gpus, [0, 1, 2])
    pool(3).run(_on_gpus, [None, None, None])  # a torch that does not tell
    words = ("ranks 0 and 2 have the same GPU, GPU-5",)
    pool(3).assert_raises(_on_gpus, [5, 6, 5], words=words)
