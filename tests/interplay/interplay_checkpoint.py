"""torch.distributed.checkpoint, and its functions on state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from interplay import EVERYWHERE, TP, Spread, Trial, close, each_refused, exact, refused, step
from reference_mixtral import batches
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

import parallel_ext as px

ALONE = Spread(1, 1)


def optimizer_of(trial: Trial) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trial.model.parameters(), lr=1e-3)


def save(trial: Trial, folder: Path) -> None:
    """Two steps, saved; and what comes of a third."""
    optimizer = optimizer_of(trial)
    for _ in range(2):
        step(trial.model, optimizer, trial.own)
    model, state = of_torch.get_state_dict(trial.model, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)


def load(trial: Trial, folder: Path, dp: int) -> None:
    """What :func:`save` has saved with so many dp ranks, and a third step, are one process'."""
    before, _ = batches(trial.tiny, dp)
    trial.model = trial.another(seed=2)
    optimizer = optimizer_of(trial)
    model, state = of_torch.get_state_dict(trial.model, optimizer)
    everything = {"model": model, "optimizer": state}
    dcp.load(everything, checkpoint_id=folder)
    of_torch.set_state_dict(
        trial.model,
        optimizer,
        model_state_dict=everything["model"],
        optim_state_dict=everything["optimizer"],
    )
    theirs = torch.optim.AdamW(trial.reference.parameters(), lr=1e-3)
    for _ in range(2):
        step(trial.reference, theirs, before)
    trial.equal(tolerance=1e-9)
    step(trial.reference, theirs, trial.whole)
    step(trial.model, optimizer, trial.own)
    trial.equal(tolerance=1e-9)


@exact(
    *("torch.distributed.checkpoint.save", "torch.distributed.checkpoint.load"),
    *(f"torch.distributed.checkpoint.state_dict.{n}" for n in ("get_state_dict", "set_state_dict")),
    how="any layout loads what another has saved, model and optimizer",
    spreads=(*EVERYWHERE, ALONE),
)
def saved_and_loaded(trial: Trial) -> None:
    save(trial, trial.folder / "ours")
    load(trial, trial.folder / "ours", trial.spread.dp)


@exact("torch.distributed.checkpoint.HuggingFaceStorageWriter", how="with full names and shapes")
def hf_storage(trial: Trial) -> None:
    trial.model = trial.another(seed=2)
    trial.reference.load_state_dict(trial.tiny.model(seed=2).state_dict())
    folder = str(trial.folder / "hf")
    state = {n: v for n, v in trial.model.state_dict().items() if "_extra_state" not in n}
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    trial.model = trial.another(seed=3)
    state = {n: v for n, v in trial.model.state_dict().items() if "_extra_state" not in n}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
    trial.equal()


@exact(
    "torch.distributed.checkpoint.state_dict.get_model_state_dict",
    how="shards that DCP saves; full tensors with full_state_dict=True",
    spreads=EVERYWHERE,
)
def get_model_state_dict(trial: Trial) -> None:
    expected = trial.reference.state_dict()
    full = of_torch.get_model_state_dict(
        trial.model, options=StateDictOptions(full_state_dict=True)
    )
    if full.keys() != expected.keys():
        raise AssertionError(f"{full.keys() ^ expected.keys()}")
    for name, value in full.items():
        close(value, expected[name])
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_first = of_torch.get_model_state_dict(trial.model, options=options)
    close(len(on_first), len(expected) if trial.mesh.rank == 0 else 0)
    trial.model.lm_head.requires_grad_(False)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    trained = of_torch.get_model_state_dict(trial.model, options=options)
    close(trained.keys() == expected.keys() - {"lm_head.weight"}, True)
    offloaded = of_torch.get_model_state_dict(
        trial.model, options=StateDictOptions(cpu_offload=True)
    )
    dcp.save(offloaded, checkpoint_id=trial.folder / "offloaded")
    trial.model = trial.another(seed=2)
    state = trial.model.state_dict()
    dcp.load(state, checkpoint_id=trial.folder / "offloaded")
    trial.equal()


@exact(
    "torch.distributed.checkpoint.state_dict.set_model_state_dict",
    how="full tensors of all ranks, or broadcast from rank 0",
)
def set_model_state_dict(trial: Trial) -> None:
    full = trial.tiny.model(seed=2).state_dict()
    trial.reference.load_state_dict(full)
    of_torch.set_model_state_dict(
        trial.model, dict(full), options=StateDictOptions(full_state_dict=True)
    )
    trial.equal()
    trial.model = trial.another()
    of_torch.set_model_state_dict(
        trial.model,
        dict(full) if trial.mesh.rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    trial.equal()


@exact(
    *(f"torch.distributed.checkpoint.state_dict.{n}_optimizer_state_dict" for n in ("get", "set")),
    how="flattened or not",
    spreads=EVERYWHERE,
)
def optimizer_state_dicts(trial: Trial) -> None:
    optimizer = optimizer_of(trial)
    step(trial.model, optimizer, trial.own)
    optimizer.zero_grad()
    for options in (None, StateDictOptions(flatten_optimizer_state_dict=True)):
        state = of_torch.get_optimizer_state_dict(trial.model, optimizer, options=options)
        dcp.save({"optimizer": state}, checkpoint_id=trial.folder / str(bool(options)))
        loaded = optimizer_of(trial)
        target = of_torch.get_optimizer_state_dict(trial.model, loaded, options=options)
        dcp.load({"optimizer": target}, checkpoint_id=trial.folder / str(bool(options)))
        of_torch.set_optimizer_state_dict(trial.model, loaded, target, options=options)
        for parameter, expected in optimizer.state.items():
            for key, value in expected.items():
                if not torch.equal(_local(loaded.state[parameter][key]), _local(value)):
                    raise AssertionError(f"{key} differs")


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@refused(
    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict (full_state_dict=True)",
    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict (full_state_dict=True)",
    instead="px.save_checkpoint",
    spreads=EVERYWHERE,
)
def full_optimizer_state(trial: Trial) -> None:
    optimizer = optimizer_of(trial)
    options = StateDictOptions(full_state_dict=True)
    each_refused(
        lambda: of_torch.get_state_dict(trial.model, optimizer, options=options),
        lambda: of_torch.set_optimizer_state_dict(trial.model, optimizer, {}, options=options),
        lambda: of_torch.get_optimizer_state_dict(trial.model, optimizer, options=options),
    )


@refused(
    "torch.distributed.checkpoint.state_dict.set_model_state_dict (full tensors, dp ranks sharded)",
    instead="px.load_checkpoint",
    spreads=EVERYWHERE[1:],
)
def full_after_data_parallel(trial: Trial) -> None:
    of_torch.set_model_state_dict(
        trial.model,
        trial.tiny.model(seed=2).state_dict(),
        options=StateDictOptions(full_state_dict=True),
    )


@refused("torch.distributed.checkpoint.async_save", instead="asynchronous=True", spreads=EVERYWHERE)
def async_save(trial: Trial) -> None:
    dcp.async_save({"model": trial.model.state_dict()}, checkpoint_id=trial.folder / "ours")


@refused(
    "torch.distributed.checkpoint.load_sharded_optimizer_state_dict",
    instead="get_optimizer_state_dict",
)
def load_sharded_optimizer_state_dict(trial: Trial) -> None:
    dcp.load_sharded_optimizer_state_dict(
        trial.model.state_dict(), "optimizer", dcp.FileSystemReader(trial.folder)
    )


@exact(
    "torch.distributed.checkpoint.save_state_dict", "torch.distributed.checkpoint.load_state_dict"
)
def deprecated(trial: Trial) -> None:
    dcp.save_state_dict(trial.model.state_dict(), dcp.FileSystemWriter(trial.folder / "old"))
    trial.model = trial.another(seed=2)
    dcp.load_state_dict(trial.model.state_dict(), dcp.FileSystemReader(trial.folder / "old"))
    trial.equal()


@refused(
    "torch.distributed.checkpoint.save (of parameters themselves)",
    instead="model.state_dict()",
    spreads=TP,
)
def bare_parameters(trial: Trial) -> None:
    dcp.save(dict(trial.model.named_parameters()), checkpoint_id=trial.folder / "ours")


@exact("torch.distributed.checkpoint.load (px.save_checkpoint beside it)")
def beside_our_own(trial: Trial) -> None:
    optimizer = optimizer_of(trial)
    step(trial.model, optimizer, trial.own)
    px.save_checkpoint(trial.folder / "px", 1, trial.model, optimizer)
    dcp.save({"model": trial.model.state_dict()}, checkpoint_id=trial.folder / "dcp")
    other = trial.another(seed=2)
    px.load_checkpoint(trial.folder / "px", other)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=trial.folder / "dcp")
    other.load_state_dict(state["model"])
    step(trial.reference, torch.optim.AdamW(trial.reference.parameters(), lr=1e-3), trial.whole)
    trial.model = other
    trial.equal()
