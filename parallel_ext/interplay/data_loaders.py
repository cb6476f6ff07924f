"""accelerate's data loaders around parallel models: who reads which rows, and how many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, SkipBatchSampler
from accelerate.state import GradientState
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from parallel_ext.distributed.errors import warn_user
from parallel_ext.distributed.mesh import Mesh
from parallel_ext.nn.temporarily import temporarily


class DrawnTogether(Sampler):
    """A sampler that draws one order on all ranks, also where their random numbers differ.

    Where all have the same, each draws by its own, as one process does. Else all draw by a
    generator that rank 0 seeds. All ranks of the mesh go through it.
    """

    def __init__(self, sampler: Iterable[Any], mesh: Mesh) -> None:
        self.sampler, self._mesh = sampler, mesh

    def __iter__(self) -> Iterator[Any]:
        control = self._mesh.control
        state = torch.get_rng_state().numpy().tobytes()
        if len(set(control.all_gather_object(xxhash.xxh3_64_hexdigest(state)))) == 1:
            yield from self.sampler
            return
        own = torch.empty((), dtype=torch.int64, device="cpu").random_().item()
        drawn = torch.Generator().manual_seed(control.all_gather_object(own)[0]).get_state()
        items, end = None, object()
        while True:
            kept = torch.get_rng_state()
            torch.set_rng_state(drawn)
            try:
                items = iter(self.sampler) if items is None else items  # many draw all at once here
                item = next(items, end)
                drawn = torch.get_rng_state()
            finally:
                torch.set_rng_state(kept)
            if item is end:
                return
            yield item

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        # The first where it is being unpickled; for the second accelerate would draw a seed.
        if name in ("sampler", "generator"):
            raise AttributeError(name)
        return getattr(self.sampler, name)


def drawn_together(data_loader: DataLoader, mesh: Mesh, seedable: bool) -> DataLoader:
    """Return a loader whose sampler draws one order on all ranks of ``mesh``; maybe a copy.

    ``seedable`` is whether accelerate replaces a ``RandomSampler`` by one that it seeds.
    """
    batches = data_loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    random = isinstance(sampler, RandomSampler) and (seedable or sampler.generator is not None)
    if sampler is None or random or isinstance(sampler, (SequentialSampler, DrawnTogether)):
        return data_loader
    together, batches = copy(data_loader), copy(batches)
    batches.sampler = DrawnTogether(sampler, mesh)
    vars(together)["batch_sampler"] = batches  # a loader lets nobody set it
    return together


def seed_workers_of_dp_ranks(data_loader: DataLoader, mesh: Mesh) -> None:
    """Let worker processes of tp ranks draw the same, where a trainer seeds them by the process."""
    function = data_loader.worker_init_fn
    if isinstance(function, partial) and "rank" in function.keywords:
        data_loader.worker_init_fn = partial(function, rank=mesh.dp_rank)


@contextmanager
def dp_ranks_as_processes(accelerator: Accelerator, mesh: Mesh) -> Iterator[None]:
    """Let accelerate share data among dp ranks, each of which reads its own part."""
    state, config = accelerator.state, accelerator.dataloader_config
    groups = [mesh.process_group(group) for group in (mesh.dp, mesh.tp)]
    names = ("dp_shard", "tp")  # accelerate's
    ranks = mesh.device_mesh.mesh.tolist()
    grid = DeviceMesh.from_group(groups, mesh.device.type, ranks, mesh_dim_names=names)
    with temporarily(state, device_mesh=grid), temporarily(config, dispatch_batches=False):
        yield


def skip_first_batches(
    plain: Callable[..., DataLoader], dataloader: DataLoader, num_batches: int = 0
) -> DataLoader:
    """Extend ``accelerate.skip_first_batches`` to say how many rows the last batch has.

    accelerate's own forgets the size of a batch, and counts rows that fill up the last one.
    """
    rest = plain(dataloader, num_batches)
    for skipping in (rest.sampler, rest.batch_sampler):
        whole = getattr(skipping, "batch_sampler", None)
        if isinstance(skipping, SkipBatchSampler) and not getattr(whole, "drop_last", False):
            for name in ("batch_size", "num_processes", "split_batches"):
                if hasattr(whole, name):
                    setattr(skipping, name, getattr(whole, name))
    return rest


class CountedRows(IterableDataset):
    """The rows of a dataset without a length, at whose end accelerate hears how many there were."""

    def __init__(self, dataset: IterableDataset, rows_at_once: int) -> None:
        self.dataset, self._rows_at_once = dataset, rows_at_once  # of all dp ranks

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for row in self.dataset:
            count += 1
            yield row
        if (loader := GradientState().active_dataloader) is not None:  # none in a worker process
            loader.remainder = count % self._rows_at_once

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # it is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def refuse_unequal_numbers(accelerator: Accelerator, data_loader: DataLoader, dp_size: int) -> None:
    """Raise if ``even_batches=False`` would let a dp rank wait for another's forward."""
    batches = data_loader.batch_sampler
    sized = not isinstance(data_loader.dataset, IterableDataset) and hasattr(batches, "__len__")
    if accelerator.even_batches or not sized or getattr(batches, "drop_last", False):
        return
    if accelerator.split_batches:  # the last ranks have no row of a last batch that is short
        of_rank = batches.batch_size // dp_size
        last = len(batches.sampler) % batches.batch_size
        unequal = 0 < last <= of_rank * (dp_size - 1)
    else:
        unequal = len(batches) % dp_size > 0
    if unequal:
        raise ValueError(
            f"Accelerator.prepare_data_loader: even_batches=False would give the dp={dp_size} "
            f"ranks unequal numbers of the {len(batches)} batches, but under px.data_parallel they "
            "call forward equally often; leave it out, or pass drop_last=True to the data loader"
        )


def warn_of_repeated_rows(accelerator: Accelerator, mesh: Mesh | None) -> None:
    """Warn of a step on rows that accelerate repeats, where the batch is the last one."""
    state = accelerator.gradient_state
    filled = state.remainder > 0 and accelerator.even_batches
    if mesh is not None and mesh.dp_size > 1 and mesh.rank == 0 and filled:
        warn_user(
            f"the last batch of the data loader has {state.remainder} rows for dp={mesh.dp_size} "
            "ranks, and accelerate repeats others so that each has as many: these count twice in "
            "this step, which one process does not do; pass drop_last=True to the data loader, or "
            "choose a multiple of the rows of a step"
        )


def with_counted_rows(data_loader: DataLoader, processes: int) -> DataLoader:
    """Return a loader that knows at its end how many rows its last batch has.

    accelerate will share the rows among ``processes``, with a batch of its size for each.
    """
    dataset, size = data_loader.dataset, data_loader.batch_size
    known = not isinstance(dataset, IterableDataset) or hasattr(dataset, "__len__")
    if known or size is None or data_loader.drop_last:
        return data_loader
    if data_loader.num_workers > 0:
        warn_user(
            "worker processes read an IterableDataset without a length, so the rows that fill up "
            "its last batch count as if it had them; num_workers=0, drop_last=True or a __len__ of "
            "the dataset avoid it"
        )
    counted = copy(data_loader)
    vars(counted)["dataset"] = CountedRows(dataset, size * processes)  # a loader lets nobody set it
    return counted


def keep_length(prepared: DataLoader, dataset: Any, processes: int) -> None:
    """Tell accelerate's loader the length of an iterable dataset; it would take that of a shard."""
    shard = prepared.dataset
    if isinstance(shard, IterableDatasetShard) and hasattr(dataset, "__len__"):
        shard.total_dataset_length = len(dataset)
        prepared.batch_sampler.num_processes = processes


def keep_full_batches(prepared: DataLoader, data_loader: DataLoader, dp_size: int) -> None:
    """Tell accelerate's loader that a batch sampler of the script's own leaves out a short batch.

    Of a loader that is given one, accelerate does not see it, and takes rows of a full batch for
    rows that are there a second time.
    """
    if dp_size > 1 and getattr(data_loader.batch_sampler, "drop_last", False):
        prepared._drop_last = True
