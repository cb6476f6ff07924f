"""accelerate's Accelerator and its functions on models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from interplay import EVERYWHERE, TP, Spread, Trial, close, each_refused, exact, refused, step
from torch.utils.data import DataLoader, TensorDataset

A = "accelerate.Accelerator"


@contextmanager
def processes(trial: Trial) -> Iterator[None]:
    """Let accelerate see the processes of the job, as under torchrun."""
    rank, size = str(trial.mesh.rank), str(trial.mesh.world_size)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "1"}
    with mock.patch.dict(os.environ, environment if size != "1" else {}):
        try:
            yield
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._shared_state.clear()


@contextmanager
def accelerator_of(trial: Trial, **options: Any) -> Iterator[Accelerator]:
    with processes(trial):
        yield Accelerator(cpu=True, **options)


@exact(
    *(f"{A}.{n}" for n in ("backward", "accumulate", "no_sync", "autocast", "unwrap_model")),
    *(f"{A}.{n}" for n in ("clip_grad_norm_", "clip_grad_value_", "unscale_gradients")),
    f"{A}.prepare (an optimizer)",
    f"{A}.prepare_optimizer",
    spreads=EVERYWHERE,
)
def training_loop(trial: Trial) -> None:
    with accelerator_of(trial, gradient_accumulation_steps=2) as accelerator:
        ours = accelerator.prepare(torch.optim.SGD(trial.model.parameters(), lr=0.1))
        theirs = torch.optim.SGD(trial.reference.parameters(), lr=0.1)
        for _ in range(4):
            with accelerator.accumulate(trial.model), accelerator.autocast():
                loss = trial.model(**trial.own).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(trial.model.parameters(), 0.05)
                ours.step()
                ours.zero_grad()
        for _ in range(2):
            for _ in range(2):
                (trial.reference(**trial.whole).loss / 2).backward()
            expected = torch.nn.utils.clip_grad_norm_(trial.reference.parameters(), 0.05)
            theirs.step()
            theirs.zero_grad()
        close(norm, expected)
        trial.equal()
        close(accelerator.unwrap_model(trial.model) is trial.model, True)


@refused(
    f"{A}.prepare (a model)",
    f"{A}.prepare_model",
    instead="train the model as it is",
    spreads=(Spread(2), Spread(1, 2, 2)),
)
def prepare_model(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        each_refused(
            lambda: accelerator.prepare_model(trial.model), lambda: accelerator.prepare(trial.model)
        )


@exact(f"{A}.prepare (a model, in one process)", spreads=(Spread(1, 1),))
def prepare_alone(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        model, optimizer = accelerator.prepare(
            trial.model, torch.optim.SGD(trial.model.parameters(), lr=0.1)
        )
        step(model, optimizer, trial.own)
    step(trial.reference, torch.optim.SGD(trial.reference.parameters(), lr=0.1), trial.whole)
    trial.equal()


@refused(
    f"{A}.prepare (a data loader, under tp)",
    f"{A}.prepare_data_loader",
    instead="must be given the same batch",
)
def prepare_data_loader(trial: Trial) -> None:
    ids = torch.arange(8 * 9).reshape(8, 9)
    with accelerator_of(trial) as accelerator:
        loader = accelerator.prepare(DataLoader(TensorDataset(ids), batch_size=2))
        for (batch,) in loader:
            trial.model(batch, labels=batch)


@refused(f"{A}.prepare_scheduler", instead="step the scheduler itself")
def prepare_scheduler(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.prepare(optimizer, scheduler)


@refused(f"{A}.save_state", f"{A}.load_state", instead="px.save_checkpoint", spreads=EVERYWHERE)
def save_state(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        accelerator.prepare(torch.optim.SGD(trial.model.parameters(), lr=0.1))
        each_refused(
            lambda: accelerator.save_state(trial.folder / "state"),
            lambda: accelerator.load_state(trial.folder),
        )


@exact(f"{A}.get_state_dict", how="full tensors on rank 0; every rank calls it", spreads=EVERYWHERE)
def get_state_dict(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        full = accelerator.get_state_dict(trial.model)
    for name, value in full.items():
        close(value, trial.reference.state_dict()[name])
    close(len(full), len(trial.reference.state_dict()) if trial.mesh.rank == 0 else 0)


@refused(f"{A}.save_model", instead="model.save_pretrained", spreads=EVERYWHERE)
def save_model(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        accelerator.save_model(trial.model, trial.folder / "model")


@refused(
    f"{A}.save (of a state dict)", f"{A}.register_for_checkpointing", instead="px.save_checkpoint"
)
def saved_objects(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        each_refused(
            lambda: accelerator.register_for_checkpointing(trial.model),
            lambda: accelerator.save(trial.model.state_dict(), trial.folder / "model.pt"),
        )


@refused(f"{A}.gather_for_metrics", instead="gather over the dp ranks")
def gather_for_metrics(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        accelerator.gather_for_metrics(trial.model(**trial.own).loss)


@refused(
    *(f"accelerate.{n}" for n in ("cpu_offload", "disk_offload", "cpu_offload_with_hook")),
    *(f"accelerate.{n}" for n in ("dispatch_model", "infer_auto_device_map", "prepare_pippy")),
    instead="px.parallelize and px.from_pretrained have placed it",
    spreads=TP,
)
def offloaded(trial: Trial) -> None:
    each_refused(
        lambda: accelerate.cpu_offload_with_hook(trial.model),
        lambda: accelerate.disk_offload(trial.model, trial.folder),
        lambda: accelerate.dispatch_model(trial.model, {"": "cpu"}),
        lambda: accelerate.infer_auto_device_map(trial.model),
        lambda: accelerate.prepare_pippy(trial.model),
        lambda: accelerate.cpu_offload(trial.model),
    )


@refused(
    *(f"accelerate.load_checkpoint_{n}" for n in ("in_model", "and_dispatch")),
    instead="px.from_pretrained reads a directory",
)
def loaded_by_accelerate(trial: Trial) -> None:
    each_refused(
        lambda: accelerate.load_checkpoint_and_dispatch(trial.model, trial.folder),
        lambda: accelerate.load_checkpoint_in_model(trial.model, trial.folder),
    )
