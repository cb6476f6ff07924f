"""What the processes of ``checkpoint.py`` run: the competitors' saves and loads."""

from __future__ import annotations

import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import parallel_ext as px
from parallel_ext.parallel.extending import called_by_this_package

OURS = "parallel_ext"
TRANSFORMERS_TP = "transformers TP"
DCP = "DCP"
DCP_HF = "DCP, HuggingFace files"
BOUND = "bound"  # each rank writes its shard into a file of its own, or copies as much out of one

Action = Callable[[], Any]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


class Jobs:
    """The saves and loads of one model of which every competitor holds its shards.

    Args:
        source: a HuggingFace directory.
        scratch: where the saves go.
    """

    def __init__(self, source: str, scratch: str) -> None:
        self.source, self.scratch = source, Path(scratch)
        self.mesh = px.init_mesh(tp=dist.get_world_size())
        self.ours = px.from_pretrained(source, self.mesh)
        self.theirs = self._load_theirs()
        self.shard_bytes = sum(p.nbytes for p in self.ours.parameters())

    def _load_theirs(self) -> LlamaForCausalLM:
        config = DistributedConfig(tp_size=dist.get_world_size())
        with called_by_this_package():  # else what we extend looks for our models' parameters
            return LlamaForCausalLM.from_pretrained(
                self.source, dtype=torch.float32, distributed_config=config
            )

    def _write_shard(self, target: Path) -> None:
        target.mkdir(exist_ok=True)
        with open(target / str(dist.get_rank()), "wb") as file:
            for parameter in self.ours.parameters():
                file.write(parameter.detach().contiguous().numpy())
            file.flush()
            os.fsync(file.fileno())

    def _save_as_hf(self, target: Path) -> None:
        writer = HuggingFaceStorageWriter(
            str(target),
            save_distributed=True,
            enable_consolidation=True,
            fqn_to_index_mapping=None,
        )
        dcp.save(get_model_state_dict(self.theirs), storage_writer=writer)

    def saves(self) -> dict[str, Action]:
        """Competitor -> its save, each into a directory that does not exist."""

        def into_new(name: str, save: Callable[[Path], Any]) -> Action:
            target = self.scratch / name.replace(", ", "-").replace(" ", "-")

            def prepare() -> None:
                if dist.get_rank() == 0:
                    shutil.rmtree(target, ignore_errors=True)
                    os.sync()  # nobody pays for what the one before left to the kernel
                dist.barrier()

            def run() -> None:
                save(target)
                dist.barrier()

            run.prepare = prepare
            return run

        return {
            name: into_new(name, save)
            for name, save in {
                OURS: self.ours.save_pretrained,
                TRANSFORMERS_TP: self.theirs.save_pretrained,
                DCP: lambda to: dcp.save(get_model_state_dict(self.theirs), checkpoint_id=to),
                DCP_HF: self._save_as_hf,
                BOUND: self._write_shard,
            }.items()
        }

    def loads(self) -> dict[str, Action]:
        """Competitor -> its load of the same directory; the bound copies a shard's bytes."""

        def copy() -> None:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as a model's memory is
            shard = mmap.mmap(-1, self.shard_bytes, private)
            with open(max(Path(self.source).glob("*.safetensors")), "rb", buffering=0) as file:
                file.readinto(shard)
            torch.frombuffer(shard, dtype=torch.float32).sum()

        def used(model: LlamaForCausalLM) -> None:
            """Read each weight once: a map of the file costs its time here."""
            for parameter in model.parameters():
                _local(parameter.detach()).sum()

        return {
            OURS: lambda: used(px.from_pretrained(self.source, self.mesh)),
            TRANSFORMERS_TP: lambda: used(self._load_theirs()),
            BOUND: copy,
        }


def _timed(action: Action) -> Callable[[], list[float]]:
    def run() -> list[float]:
        getattr(action, "prepare", dist.barrier)()
        start = time.perf_counter()
        action()
        return [time.perf_counter() - start]

    return run


def _measured(action: Action) -> list[float]:
    """MiB that a call adds to the memory at its peak, and MiB that it writes, of this rank."""
    getattr(action, "prepare", dist.barrier)()
    before = harness.counted_bytes("write_bytes")
    growth = harness.peak_growth(action)
    return [growth, (harness.counted_bytes("write_bytes") - before) / 2**20]


def main() -> None:
    warnings.filterwarnings("ignore")
    request: Mapping[str, Any] = harness.arguments()
    dist.init_process_group("gloo")
    jobs = Jobs(request["source"], request["scratch"])
    answer: dict[str, Any] = {"shard_mib": jobs.shard_bytes / 2**20}
    for kind, actions in (("save", jobs.saves()), ("load", jobs.loads())):
        timed = {name: _timed(action) for name, action in actions.items()}
        rounds = harness.interleaved(timed, request["repetitions"], warm_up=1)
        measured = {name: _measured(action) for name, action in actions.items()}
        answer[kind] = {
            "rounds": [asdict(each) for each in rounds],
            "growth_mib": {n: harness.slowest(m[:1])[0] for n, m in measured.items()},
            "written_mib": {n: harness.total(m[1:])[0] for n, m in measured.items()},
        }
    harness.finish(answer)


if __name__ == "__main__":
    main()
