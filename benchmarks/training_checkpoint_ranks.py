"""What the processes of ``training_checkpoint.py`` run: the competitors' saves and loads."""

from __future__ import annotations

import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import parallel_ext as px
from parallel_ext.io import disk, hashing
from parallel_ext.io.places import HOT_BYTES

OURS = "parallel_ext"
DCP = "DCP"
DCP_HF = "DCP, HuggingFace files"
TORCH_SAVE = "torch.save, a file a rank"
BOUND = "bound"  # each rank writes its state to a file of its own, or reads it from there
BOUND_READS = "bound, as many bytes as ours"  # and those beside its state that our load reads
UNHASHED = "parallel_ext, nothing hashed"
UNSYNCED = "parallel_ext, no fsync"
DCP_UNSYNCED = "DCP, no fsync"
NO_SAVE, SAVE, BEHIND = "no save", "save", "asynchronous save"
STEPS, TOKENS = harness.size((8, 512), (2, 8))  # after each save; of a sequence

MIB = 2**20
TINY = {
    "vocab_size": 127,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

Action = Callable[[Path], Any]


def _do_nothing(*arguments: object) -> None:
    """Unlike a mock it keeps no arguments, which are the memory of tensors."""


@contextmanager
def without_hashes() -> Iterator[None]:
    """Inside, our saves and loads hash no tensors; only a benchmark may do so."""

    def count(hasher: Any, memory: memoryview) -> None:
        hasher._size += len(memory)

    with (
        mock.patch.object(hashing.ChunkHasher, "update", count),
        mock.patch.object(hashing.ChunkCheck, "update", _do_nothing),
        mock.patch.object(hashing.ChunkCheck, "finish", _do_nothing),
    ):
        yield


@contextmanager
def without_sync() -> Iterator[None]:
    """Inside, our saves wait for no disk; only a benchmark may do so."""
    with (
        mock.patch.object(disk, "sync", _do_nothing),
        mock.patch.object(disk, "sync_path", _do_nothing),
    ):
        yield


def inside(context: Callable[[], AbstractContextManager[None]], action: Action) -> Action:
    """``action``, run in the context."""

    def run(path: Path) -> None:
        with context():
            action(path)

    return run


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sync_all(directory: Path) -> None:
    """Make all that was saved durable: every file, and every directory with its entries."""
    for folder, _, names in os.walk(directory):
        for path in (*(Path(folder, name) for name in names), Path(folder)):
            disk.sync_path(path)
    disk.sync_path(directory.parent)


class Trained:
    """A model and its AdamW after one step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> Iterator[torch.Tensor]:
        """This rank's shards of the weights and of the state of the optimizer."""
        for parameter in self.model.parameters():
            yield _local(parameter.detach())
            yield from self.state_of(parameter)

    def state_of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        state = self.optimizer.state.get(parameter, {})
        return [_local(value) for value in state.values() if value.dim()]

    def state_bytes(self) -> int:
        """Of this rank's shards of the state of the optimizer."""
        return sum(t.nbytes for p in self.model.parameters() for t in self.state_of(p))

    def start_again(self) -> None:
        """As a job that is resumed begins: without a state of the optimizer."""
        self.optimizer.state.clear()
        gc.collect()


class Jobs:
    """The saves and loads of one model of which every competitor holds its shards.

    Args:
        source: a HuggingFace directory.
        names: of the competitors; only what they need is built.
    """

    def __init__(self, source: str, names: Collection[str]) -> None:
        mesh = px.init_mesh(tp=dist.get_world_size())
        config = DistributedConfig(tp_size=dist.get_world_size())
        if OURS in names:
            self.ours = Trained(px.from_pretrained(source, mesh, dtype=torch.float32))
            self._ours_read = 0  # bytes, by the last load
        if DCP in names:
            self.theirs = Trained(
                LlamaForCausalLM.from_pretrained(
                    source, dtype=torch.float32, distributed_config=config
                )
            )

    def trained(self, name: str) -> Trained:
        """Whose tensors a competitor saves and loads."""
        return self.theirs if name.startswith(DCP) else self.ours

    def _save_ours(self, root: Path) -> None:
        px.save_checkpoint(root, 1, self.ours.model, self.ours.optimizer)

    def _load_ours(self, root: Path) -> None:
        before = harness.counted_bytes("rchar")
        px.load_checkpoint(root, self.ours.model, self.ours.optimizer)
        self._ours_read = harness.counted_bytes("rchar") - before

    def _save_dcp(self, to: Path, sync_files: bool = True) -> None:
        model, optimizer = get_state_dict(self.theirs.model, self.theirs.optimizer)
        writer = dcp.FileSystemWriter(to, sync_files=sync_files)
        dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer)

    def _load_dcp(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.theirs.model, self.theirs.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(
            self.theirs.model,
            self.theirs.optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
        )

    def _save_dcp_hf(self, to: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(to), save_distributed=True, enable_consolidation=True, fqn_to_index_mapping=None
        )
        dcp.save(get_model_state_dict(self.theirs.model), storage_writer=writer)
        state = get_optimizer_state_dict(self.theirs.model, self.theirs.optimizer)
        dcp.save({"optimizer": state}, checkpoint_id=to / "optimizer")

    def _load_dcp_hf(self, path: Path) -> None:
        model = get_model_state_dict(self.theirs.model)
        dcp.load(model, storage_reader=HuggingFaceStorageReader(str(path)))
        set_model_state_dict(self.theirs.model, model)
        state = get_optimizer_state_dict(self.theirs.model, self.theirs.optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=path / "optimizer")
        set_optimizer_state_dict(self.theirs.model, self.theirs.optimizer, state)

    def _save_torch(self, to: Path) -> None:
        to.mkdir(exist_ok=True)
        model, optimizer = self.ours.model, self.ours.optimizer
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, to / f"{dist.get_rank()}.pt")

    def _load_torch(self, path: Path) -> None:
        state = torch.load(path / f"{dist.get_rank()}.pt", weights_only=True)
        self.ours.model.load_state_dict(state["model"])
        self.ours.optimizer.load_state_dict(state["optimizer"])

    def _write(self, to: Path) -> None:
        to.mkdir(exist_ok=True)
        with open(to / str(dist.get_rank()), "wb", buffering=0) as file:
            for tensor in self.ours.tensors():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        state = []  # in new memory, and all there at the end
        with open(path / str(dist.get_rank()), "rb", buffering=0) as file:
            for parameter in self.ours.model.parameters():
                for _ in range(2):
                    state.append(torch.empty_like(parameter))
                    file.readinto(state[-1].view(-1).view(torch.uint8).numpy())
                file.readinto(parameter.detach().view(-1).view(torch.uint8).numpy())

    def _read_as_many(self, path: Path) -> None:
        self._read(path)
        room = torch.empty(HOT_BYTES, dtype=torch.uint8).numpy()
        with open(path / str(dist.get_rank()), "rb", buffering=0) as file:
            size = os.path.getsize(file.name)
            for offset in range(0, self._ours_read - size, HOT_BYTES):
                os.preadv(file.fileno(), [room], offset % size)

    def saves(self) -> dict[str, Action]:
        """Competitor -> its save into a new directory."""
        return {
            OURS: self._save_ours,
            DCP: self._save_dcp,
            DCP_HF: self._save_dcp_hf,
            TORCH_SAVE: self._save_torch,
            BOUND: self._write,
            UNHASHED: inside(without_hashes, self._save_ours),
            UNSYNCED: inside(without_sync, self._save_ours),
            DCP_UNSYNCED: partial(self._save_dcp, sync_files=False),
        }

    def loads(self) -> dict[str, Action]:
        """Competitor -> its load of what it has saved."""
        return {
            OURS: self._load_ours,
            DCP: self._load_dcp,
            DCP_HF: self._load_dcp_hf,
            TORCH_SAVE: self._load_torch,
            BOUND: self._read,
            BOUND_READS: self._read_as_many,
            UNHASHED: inside(without_hashes, self._load_ours),
        }


class Runs:
    """Each competitor's saves and loads, timed and measured.

    Args:
        jobs: that run.
        scratch: where the saves go.
        names: of the competitors.
    """

    def __init__(self, jobs: Jobs, scratch: str, names: Collection[str]) -> None:
        self._jobs, self._names = jobs, names
        self._path = {
            name: Path(scratch, name.replace(", ", "-").replace(" ", "-")) for name in names
        }

    def save(self, name: str) -> list[float]:
        """Seconds until the competitor says that it has saved, and until that is durable."""
        path = self._prepare_save(name)
        start = time.perf_counter()
        self._jobs.saves()[name](path)
        dist.barrier()
        saved = time.perf_counter()
        if dist.get_rank() == 0 and name not in (UNSYNCED, DCP_UNSYNCED):
            _sync_all(path)
        dist.barrier()
        return [saved - start, time.perf_counter() - start]

    def _prepare_save(self, name: str) -> Path:
        path = self._path[name]
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()  # nobody pays for what the one before left to the kernel
        dist.barrier()
        return path

    def _path_of_load(self, name: str) -> Path:
        saved_by = {UNHASHED: OURS, BOUND_READS: BOUND}  # of which the first saves no checkpoint
        return self._path[saved_by.get(name, name)]

    def load(self, name: str) -> list[float]:
        """Seconds that a load takes, with the files in the page cache."""
        self._jobs.trained(name).start_again()
        dist.barrier()
        start = time.perf_counter()
        self._jobs.loads()[name](self._path_of_load(name))
        dist.barrier()
        return [time.perf_counter() - start]

    def measure_save(self, name: str) -> list[float]:
        """MiB that a save adds to the memory of this rank at its peak, and MiB that it writes."""
        path, before = self._prepare_save(name), harness.counted_bytes("write_bytes")
        growth = harness.peak_growth(lambda: self._jobs.saves()[name](path))
        return [growth, (harness.counted_bytes("write_bytes") - before) / MIB]

    def measure_load(self, name: str) -> list[float]:
        """MiB that a load adds to the memory at its peak, beyond this rank's shards."""
        trained = self._jobs.trained(name)
        trained.start_again()
        growth = harness.peak_growth(lambda: self._jobs.loads()[name](self._path_of_load(name)))
        return [growth - trained.state_bytes() / MIB]

    def all(self, repetitions: int) -> dict[str, Any]:
        """What rank 0 reports; of memory the worst rank, of bytes the sum."""
        answer: dict[str, Any] = {}
        for kind, run, measure in (
            ("save", self.save, self.measure_save),
            ("load", self.load, self.measure_load),
        ):
            names = [name for name in self._names if name in getattr(self._jobs, f"{kind}s")()]
            answer[kind] = {"rounds": []}
            if repetitions:
                timed = {name: partial(run, name) for name in names}
                rounds = harness.interleaved(timed, repetitions, warm_up=1)
                answer[kind]["rounds"] = [asdict(each) for each in rounds]
            measured = {name: measure(name) for name in names}
            answer[kind] |= {
                "growth_mib": {n: harness.slowest(m[:1])[0] for n, m in measured.items()},
                "written_mib": {n: sum(harness.total(m[1:])) for n, m in measured.items()},
            }
        return answer


def _tiny_saves(scratch: str, repetitions: int) -> list[float]:
    """Milliseconds of saves in which nothing takes time but the commit."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    tiny = Trained(px.parallelize(model, px.init_mesh(tp=dist.get_world_size())))
    times = []
    for step in range(repetitions + 2):
        dist.barrier()
        start = time.perf_counter()
        px.save_checkpoint(Path(scratch, "tiny"), step, tiny.model, tiny.optimizer)
        times.append((time.perf_counter() - start) * 1e3)
    return harness.slowest(times[2:])


def _saves_between_steps(source: str, scratch: str, repetitions: int) -> dict[str, Any]:
    """Seconds of the call that saves, and with the steps after it until all is on the disk."""
    ours = Trained(px.from_pretrained(source, px.init_mesh(tp=dist.get_world_size())))
    ids = torch.randint(ours.model.config.vocab_size, (1, TOKENS))
    dist.broadcast(ids, 0)
    saved = 0

    def run(kind: str) -> list[float]:
        nonlocal saved
        dist.barrier()
        start = time.perf_counter()
        if kind != NO_SAVE:
            saved += 1
            root, behind = Path(scratch, "steps"), kind == BEHIND
            px.save_checkpoint(
                root, saved, ours.model, ours.optimizer, keep_last=1, asynchronous=behind
            )
        called = time.perf_counter() - start
        for _ in range(STEPS):
            ours.model(input_ids=ids, labels=ids).loss.backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
        px.wait_for_checkpoint(ours.model)
        return [called, time.perf_counter() - start]

    timed = {kind: partial(run, kind) for kind in (NO_SAVE, SAVE, BEHIND)}
    return {"rounds": [asdict(each) for each in harness.interleaved(timed, repetitions, warm_up=1)]}


def main() -> None:
    warnings.filterwarnings("ignore")
    request: Mapping[str, Any] = harness.arguments()
    dist.init_process_group("gloo")
    if request["part"] == "commit":
        answer: Any = _tiny_saves(request["scratch"], request["repetitions"])
    elif request["part"] == "asynchronous":
        answer = _saves_between_steps(request["source"], request["scratch"], request["repetitions"])
    else:
        names = request["names"]
        jobs = Jobs(request["source"], names)
        answer = Runs(jobs, request["scratch"], names).all(request["repetitions"])
    harness.finish(answer)


if __name__ == "__main__":
    main()
