"""accelerate's Accelerator and its functions on models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from interplay import (
    EVERYWHERE,
    TP,
    Spread,
    Trial,
    close,
    each_refused,
    exact,
    expect,
    refused,
    step,
)
from reference import parallel
from torch.utils.data import DataLoader, IterableDataset

import parallel_ext as px
from parallel_ext.distributed.control import world
from parallel_ext.sharding.slices import local_part

A = "accelerate.Accelerator"


@contextmanager
def processes() -> Iterator[None]:
    """Let accelerate see the ranks of the pool, as under torchrun."""
    rank, size = map(str, world())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "1"}
    with mock.patch.dict(os.environ, environment if size != "1" else {}):
        try:
            yield
        finally:
            forget_processes()


def sgd_arguments(
    folder: str, rows: int, steps: int, **more: Any
) -> transformers.TrainingArguments:
    """Of a Trainer that logs each step of SGD at one rate, and saves nothing by itself."""
    rate = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "logging_steps": 1}
    options = {"per_device_train_batch_size": rows, "max_steps": steps, **rate, **quiet, **more}
    return transformers.TrainingArguments(folder, **options)


def forget_processes() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


@contextmanager
def accelerator_of(trial: Trial, **options: Any) -> Iterator[Accelerator]:
    with processes():
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
        trial.backward()
        scaled = [
            [local_part(p.grad) for p in m.parameters()] for m in (trial.model, trial.reference)
        ]
        torch._foreach_mul_(scaled[1], 0.25)
        unscale = mock.Mock(side_effect=lambda: torch._foreach_mul_(scaled[0], 0.25))
        with mock.patch.object(accelerator, "unscale_gradients", unscale):
            norm = accelerator.clip_grad_norm_(trial.model.parameters(), 0.05, torch.inf)
        close(norm, torch.nn.utils.clip_grad_norm_(trial.reference.parameters(), 0.05, torch.inf))
        close(accelerator.unwrap_model(trial.model) is trial.model, True)


@exact(
    f"{A}.prepare",
    f"{A}.prepare_model",
    how="the model as it is: no DDP; dp ranks by px.data_parallel",
    spreads=(Spread(1, 1), *EVERYWHERE),
)
def prepare_model(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        model, optimizer = accelerator.prepare(
            trial.model, torch.optim.SGD(trial.model.parameters(), lr=0.1)
        )
        close(model is trial.model is accelerator.prepare_model(model), True)
        step(model, optimizer, trial.own)
    step(trial.reference, torch.optim.SGD(trial.reference.parameters(), lr=0.1), trial.whole)
    trial.equal()


@exact(f"{A}.prepare (mixed_precision)", how="autocast, as in one process", spreads=EVERYWHERE)
def mixed_precision(trial: Trial) -> None:
    reference = replace(trial.tiny, dtype=torch.float32).model()
    own = parallel(reference, trial.mesh)
    if trial.spread.zero:
        px.data_parallel(own, trial.mesh, trial.spread.zero)
    with accelerator_of(trial, mixed_precision="bf16") as accelerator:
        model = accelerator.prepare(own)
        loss = model(**trial.own).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        close(accelerator.reduce(loss.detach(), "mean"), reference(**trial.whole).loss, 2e-2)
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        model.eval(), reference.eval()
        with torch.no_grad():
            close(model(**trial.own).logits, reference(**trial.own).logits, 1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        reference(**trial.whole).loss.backward()
    close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1), 2e-2)


@refused(
    f"{A}.prepare (dp > 1, without px.data_parallel)",
    instead="px.data_parallel(model, mesh)",
    spreads=(Spread(1, 2), Spread(2, 2)),
)
def prepare_apart(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        close(accelerator.prepare_model(trial.model, evaluation_mode=True) is trial.model, True)
        accelerator.prepare(trial.model)


@refused(
    f"{A}.prepare (FSDP, DeepSpeed, Megatron)",
    "accelerate.ParallelismConfig (of other sizes)",
    instead="which would shard a parallel model once more",
)
def prepare_sharded_again(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        accelerator.state.parallelism_config = accelerate.ParallelismConfig(dp_replicate_size=2)
        words = "tp_size=1 and 2 data parallel ranks"
        expect(ValueError, words, lambda: accelerator.prepare(trial.model))
        accelerator.state.parallelism_config = accelerate.ParallelismConfig(tp_size=2)
        close(accelerator.prepare_model(trial.model) is trial.model, True)
        accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.prepare(trial.model)


@refused(f"{A}.prepare (accelerate sees one process)", instead="start the job with torchrun")
def prepare_unseen(trial: Trial) -> None:
    close(trial.model.training, True)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(torch.arange(8))
    expect(ValueError, "but the mesh has 2 ranks", lambda: accelerator.prepare(loader))
    try:
        accelerator.prepare(trial.model)
    finally:
        forget_processes()


class Stream(IterableDataset):
    """Rows that only come in a row."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8))


@exact(
    f"{A}.prepare (a data loader)",
    f"{A}.prepare_data_loader",
    f"{A}.skip_first_batches",
    how="each dp rank has its batches, which its tp ranks share; also of an IterableDataset",
    spreads=(Spread(2), Spread(2, 2)),
)
def prepare_data_loader(trial: Trial) -> None:
    close(trial.model.training, True)  # which is there, and need not be prepared
    torch.manual_seed(trial.mesh.rank)  # a sampler without a generator is equal all the same
    rows = torch.arange(8)
    with accelerator_of(trial) as accelerator:
        for data, shuffle in ((rows, True), (Stream(), None), (rows, False)):
            torch.manual_seed(3)
            whole = torch.cat(list(DataLoader(data, batch_size=2, shuffle=shuffle)))
            torch.manual_seed(3)
            loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=shuffle))
            own = torch.cat(list(loader))
            if shuffle:  # in the order of one process, batch by batch
                close(own, whole.view(4, 2)[trial.mesh.dp_rank :: trial.mesh.dp_size].flatten())
            close(len(own), 8 // trial.mesh.dp_size)
            of_ranks = trial.mesh.control.all_gather_object(own.tolist())
            close(of_ranks[trial.mesh.rank - trial.mesh.tp_rank], own)
            close(sorted(sum(of_ranks[:: trial.mesh.tp_size], [])), rows)
        (later,) = accelerator.skip_first_batches(loader, len(own) // 2 - 1)
        close(later, own[-2:])


@refused(
    f"{A}.prepare_data_loader (dispatch_batches=True, tp > 1)",
    instead="DataLoaderConfiguration(dispatch_batches=False)",
)
def dispatched(trial: Trial) -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)
    close(trial.model.training, True)
    with accelerator_of(trial, dataloader_config=config) as accelerator:
        accelerator.prepare(DataLoader(torch.arange(8)))


@refused(
    f"{A}.prepare_data_loader (even_batches=False, an unequal number for each dp rank)",
    instead="pass drop_last=True to the data loader",
    spreads=(Spread(1, 2, 2),),
)
def unequal_numbers(trial: Trial) -> None:
    for split, rows in ((True, 6), (False, 9)):
        config = DataLoaderConfiguration(even_batches=False, split_batches=split)
        with accelerator_of(trial, dataloader_config=config) as accelerator:
            equal = accelerator.prepare(trial.model, DataLoader(torch.arange(7), 4))[1]
            close(len(list(equal)), 2 if split else 1)
            dropping = DataLoader(torch.arange(rows), 4, drop_last=True)
            close(len(list(accelerator.prepare(dropping))), 1)
            unequal = DataLoader(torch.arange(rows), 4)
            if split:
                expect(ValueError, "of the 2 batches", partial(accelerator.prepare, unequal))
            else:
                accelerator.prepare(unequal)


@exact(
    f"{A}.join_uneven_inputs",
    how="no rank waits: data loaders give all of them as many batches",
    spreads=(*TP, Spread(1, 2, 2)),
)
def join_uneven_inputs(trial: Trial) -> None:
    on_gpus = mock.patch.object(Accelerator, "multi_device", True)  # where accelerate joins
    with accelerator_of(trial) as accelerator, on_gpus:
        model = accelerator.prepare(trial.model)
        with accelerator.join_uneven_inputs([model]):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), trial.own)
    step(trial.reference, torch.optim.SGD(trial.reference.parameters(), lr=0.1), trial.whole)
    trial.equal()


@refused(
    f"{A}.join_uneven_inputs (even_batches=False, dp > 1)",
    instead="drop_last=True",
    spreads=(Spread(1, 2, 2),),
)
def join_unequal_numbers(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        models = [accelerator.prepare(trial.model)]
        accelerator.join_uneven_inputs(models, even_batches=False)


@refused(f"{A}.split_between_processes", instead="inputs[mesh.dp_rank :: mesh.dp_size]")
def split_between_processes(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        accelerator.prepare(trial.model)
        with accelerator.split_between_processes([1, 2, 3]):
            pass


@exact(
    f"{A}.prepare_scheduler",
    how="steps once for each dp rank, as accelerate counts processes",
    spreads=EVERYWHERE,
)
def prepare_scheduler(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
        kind = torch.optim.lr_scheduler.OneCycleLR
        scheduler = kind(optimizer, 0.1, total_steps=3 * trial.mesh.dp_size)
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        for number in range(1, 5):
            optimizer.step()
            scheduler.step()
            close(scheduler.scheduler.last_epoch, min(number, 3) * trial.mesh.dp_size)


@exact(
    f"{A}.save_state",
    f"{A}.load_state",
    how="by px.save_checkpoint, px.load_checkpoint: any layout resumes it",
    spreads=(Spread(1, 1), *EVERYWHERE),
)
def save_state(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        optimizer = accelerator.prepare(torch.optim.AdamW(trial.model.parameters(), lr=0.1))
        for number in (1, 2):  # the second save takes the place of the first
            step(trial.model, optimizer, trial.own)
            accelerator.step = number
            accelerator.save_state(trial.folder / "state")
        drawn = torch.rand(())
    with accelerator_of(trial) as accelerator:
        again = trial.another(seed=2)
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.1)
        again, optimizer = accelerator.prepare(again, optimizer)
        accelerator.load_state(trial.folder / "state")
        close((accelerator.step, torch.rand(())), (2, drawn))
        step(again, optimizer, trial.own)
    theirs = torch.optim.AdamW(trial.reference.parameters(), lr=0.1)
    for _ in range(3):
        step(trial.reference, theirs, trial.whole)
    trial.model = again
    trial.equal()


@refused(f"{A}.save_state (two optimizers of one model)", instead="several param_groups")
def save_two_optimizers(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        parameters = list(trial.model.parameters())
        accelerator.prepare(
            *(torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:]))
        )
        accelerator.save_state(trial.folder / "state")


@exact(f"{A}.get_state_dict", how="full tensors on rank 0; every rank calls it", spreads=EVERYWHERE)
def get_state_dict(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        full = accelerator.get_state_dict(trial.model)
    for name, value in full.items():
        close(value, trial.reference.state_dict()[name])
    close(len(full), len(trial.reference.state_dict()) if trial.mesh.rank == 0 else 0)


@exact(f"{A}.save_model", how="model.save_pretrained", spreads=EVERYWHERE)
def save_model(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        accelerator.save_model(trial.model, trial.folder / "model", max_shard_size="20KB")
    again = type(trial.reference).from_pretrained(trial.folder / "model", dtype=torch.float64)
    for name, value in again.state_dict().items():
        close(value, trial.reference.state_dict()[name])


@refused(
    f"{A}.save (of a state dict)", f"{A}.register_for_checkpointing", instead="px.save_checkpoint"
)
def saved_objects(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        each_refused(
            lambda: accelerator.register_for_checkpointing(trial.model),
            lambda: accelerator.save(trial.model.state_dict(), trial.folder / "model.pt"),
        )


@exact(
    *(f"{A}.{n}" for n in ("gather_for_metrics", "gather", "pad_across_processes", "reduce")),
    how="each sample once: tp ranks count as one",
    spreads=EVERYWHERE,
)
def gather_for_metrics(trial: Trial) -> None:
    rows, seen, named, objects = torch.arange(7), [], [], []
    with accelerator_of(trial) as accelerator:
        _, loader = accelerator.prepare(trial.model, DataLoader(rows, batch_size=2))
        for batch in loader:
            seen += accelerator.gather_for_metrics({"rows": batch})["rows"]
            named += accelerator.gather_for_metrics([str(row) for row in batch.tolist()])
            objects += accelerator.gather_for_metrics([batch], use_gather_object=True)
        close(seen, rows)
        close(named == [str(row) for row in rows.tolist()], True)
        close(sum(map(len, objects)), 7 if trial.mesh.dp_size == 1 else 8)  # the last rows twice
        dp, own = trial.mesh.dp_size, torch.arange(trial.mesh.dp_rank + 1)
        padded = accelerator.gather(accelerator.pad_across_processes(own, pad_index=9))
        close(padded, [0, 9, 0, 1] if dp == 2 else [0])
        close(accelerator.gather(torch.tensor(trial.mesh.dp_rank)), torch.arange(dp))
        close(accelerator.gather(torch.zeros(0, 3)).shape, (0, 3))
        one = torch.ones(())
        close([accelerator.reduce(one, how) for how in ("sum", "mean")], [dp, 1])
        if tuple(map(int, accelerate.__version__.split(".")[:2])) >= (1, 15):  # else "max" sums
            close(accelerator.reduce(one, "max"), 1)
        if trial.mesh.rank == trial.mesh.world_size - 1:
            accelerator.set_trigger()  # of any rank
        close(accelerator.check_trigger(), True)


@refused(
    f"{A}.gather_for_metrics (nothing prepared but an optimizer)",
    instead="prepare the model, or the data loader",
)
def gather_unprepared(trial: Trial) -> None:
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
    "accelerate.local_sgd.LocalSGD",
    instead="px.data_parallel(model, mesh) trains the dp ranks together",
    spreads=EVERYWHERE,
)
def averaged_now_and_then(trial: Trial) -> None:
    with accelerator_of(trial) as accelerator:
        LocalSGD(accelerator, trial.model, local_sgd_steps=2)


@refused(
    *(f"accelerate.load_checkpoint_{n}" for n in ("in_model", "and_dispatch")),
    instead="px.from_pretrained reads a directory",
)
def loaded_by_accelerate(trial: Trial) -> None:
    each_refused(
        lambda: accelerate.load_checkpoint_and_dispatch(trial.model, trial.folder),
        lambda: accelerate.load_checkpoint_in_model(trial.model, trial.folder),
    )


@exact(
    "accelerate.utils.compile_regions",
    how="equal layers once; after px.data_parallel, whose class it cannot copy, layer.compile()",
)
def compiled_regions(trial: Trial) -> None:
    model = trial.model
    trial.model = accelerate.utils.compile_regions(model, backend="eager")
    trial.backward()
    trial.model = model
    trial.equal(gradients=True)
