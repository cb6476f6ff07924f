"""Copies that a GPU fills while the host continues, with a double of the GPU."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import pool
from reference_mixtral import Layout
from reference_training import MIXTRAL, Job, build, train
from test_asynchronous_checkpoint import _files

import parallel_ext as px
from parallel_ext.checkpoint import staging
from parallel_ext.checkpoint.staging import Copies


class LateGpu:
    """A GPU that holds all tensors but integers, and copies only when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.locked: dict[int, int] = {}
        self.waited_by: list[threading.Thread] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    def lock_pages(self, memory: torch.Tensor) -> None:
        memory.fill_(255)  # NaN, where nothing arrives
        self.locked[memory.data_ptr()] = memory.nbytes

    def unlock_pages(self, address: int) -> None:
        del self.locked[address]

    def start_copy(self, copy: torch.Tensor, value: torch.Tensor) -> None:
        low, high = next((a, a + size) for a, size in self.locked.items())
        assert copy.numel() == 0 or low <= copy.data_ptr() <= high - copy.nbytes
        self.queue.append((copy, value.clone()))

    def arrival(self, device: torch.device) -> LateGpu:
        return self

    def synchronize(self) -> None:
        self.waited_by.append(threading.current_thread())
        for copy, value in self.queue:
            copy.copy_(value)
        self.queue.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    double = LateGpu()
    monkeypatch.setattr(staging, "cuda", double)
    return double


VALUES = {
    "odd": torch.arange(21.0).view(3, 7),
    "strided": torch.arange(12.0, dtype=torch.float64).view(3, 4).T,
    "number": torch.tensor(5.0, dtype=torch.bfloat16),
    "on the host": torch.arange(5),
    "empty": torch.ones(0, 3),
    "last": torch.arange(33.0).half(),
}


def _equal(copies: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> bool:
    return list(copies) == list(values) and all(
        torch.equal(copies[name], value) and copies[name].dtype == value.dtype
        for name, value in values.items()
    )


def test_copies_are_the_values_at_the_call_once_they_are_there(gpu: LateGpu) -> None:
    values = {name: value.clone() for name, value in VALUES.items()}
    copies = Copies()
    taken = copies.take(values)
    for value in values.values():
        value.zero_()
    assert not _equal(taken, VALUES)
    assert gpu.waited_by == []
    copies.wait()
    assert _equal(taken, VALUES)
    assert all(copy.is_contiguous() for copy in taken.values())
    copies.wait()
    assert len(gpu.waited_by) == 1


def test_pages_are_locked_once_as_many_as_needed_and_given_back(gpu: LateGpu) -> None:
    weights = {str(n): torch.randn(1000 + n) for n in range(50)}
    copies = Copies()
    copies.take(weights)
    (first,) = gpu.locked.items()
    assert first[1] <= 1.05 * sum(weight.nbytes for weight in weights.values())
    copies.take({"a": weights["3"]})  # of another save, though nobody waited for the first
    assert len(gpu.waited_by) == 1
    assert list(gpu.locked.items()) == [first]
    taken = copies.take({**weights, "more": torch.ones(900)})
    assert len(gpu.locked) == 1
    assert [*gpu.locked.values()][0] > first[1]
    copies.wait()
    assert torch.equal(taken["more"], torch.ones(900))
    del copies, taken
    gc.collect()
    assert gpu.locked == {}


def test_what_is_on_the_host_needs_no_pages_of_a_gpu(gpu: LateGpu) -> None:
    copies = Copies()
    assert _equal(copies.take({"ids": torch.arange(5)}), {"ids": torch.arange(5)})
    copies.wait()
    assert gpu.locked == {}
    assert gpu.waited_by == []


def test_values_without_numbers_are_copied_too(gpu: LateGpu) -> None:
    assert Copies().take({"empty": torch.ones(0, 3)})["empty"].shape == (0, 3)


def _save_behind_a_late_gpu(root: Path) -> tuple[bool, int, int]:
    model, optimizer, scheduler, mesh = build(Job(MIXTRAL, Layout(1, 2, 1)))
    train(model, optimizer, scheduler, mesh, range(2))
    px.save_checkpoint(root / "sync", 2, model, optimizer, scheduler)
    with mock.patch.object(staging, "cuda", LateGpu()) as gpu:
        px.save_checkpoint(root / "late", 2, model, optimizer, scheduler, asynchronous=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        train(model, optimizer, scheduler, mesh, range(2, 3))
        px.wait_for_checkpoint(model)
        px.save_checkpoint(root / "late", 3, model, optimizer, scheduler, asynchronous=True)
        px.wait_for_checkpoint(model)
    on_main = threading.main_thread() in gpu.waited_by
    return on_main, len(gpu.waited_by), len(gpu.locked)


def test_the_thread_that_writes_waits_for_the_gpu_and_training_does_not(tmp_path: Path) -> None:
    answers = pool(2).run(_save_behind_a_late_gpu, tmp_path)
    assert answers == [(False, 2, 1)] * 2
    expected = _files(tmp_path / "sync" / "step-00000002")
    assert _files(tmp_path / "late" / "step-00000002") == expected
    assert px.verify_checkpoint(tmp_path / "late" / "step-00000003") == 3
