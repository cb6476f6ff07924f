"""What the processes of ``train_step.py`` run: building the competitors, timing, measuring."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import harness
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import parallel_ext as px
from parallel_ext import _C

TRANSFORMERS_TP = "transformers TP"
OURS = "parallel_ext"
ONE_PROCESS = "one process"

BATCH, SEQUENCE, VOCABULARY = 4, 256, 32000


def build(competitor: str, directory: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model of a competitor with the weights in ``directory``, ready for training."""
    if competitor == TRANSFORMERS_TP:
        parallel = DistributedConfig(tp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(
            directory, dtype=dtype, distributed_config=parallel
        )
    else:
        model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype)
        if competitor == OURS:
            px.parallelize(model, px.init_mesh(tp=dist.get_world_size()))
    return model.train()


class Trainer:
    """One competitor's model and optimizer; called, it does a step and returns its two phases.

    Attributes:
        losses: of all steps so far.
    """

    def __init__(self, competitor: str, directory: str, dtype: torch.dtype) -> None:
        self.model = build(competitor, directory, dtype)
        # On CPUs AdamW runs without foreach by default too; DTensor parameters do not allow it.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.ids = torch.randint(
            0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3)
        )
        self.losses: list[float] = []

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.losses.append(loss.item())

    def __call__(self) -> list[float]:
        start = time.perf_counter()
        self.forward_backward()
        middle = time.perf_counter()
        self.optimizer.step()
        stop = time.perf_counter()
        return [middle - start, stop - middle, stop - start]


def time_steps(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time the requested competitors, all alive in this process, in turn."""
    dtype = getattr(torch, request["dtype"])
    trainers = {name: Trainer(name, request["weights"], dtype) for name in request["competitors"]}
    rounds = harness.interleaved(trainers, request["repetitions"], request["warm_up"])
    return {
        "rounds": [asdict(each) for each in rounds],
        "losses": {name: trainer.losses for name, trainer in trainers.items()},
    }


def measure_alone(request: Mapping[str, Any]) -> dict[str, Any]:
    """Memory, collectives and profiles of the only competitor in this process."""
    (competitor,) = request["competitors"]
    empty = harness.resident_anonymous()
    trainer = Trainer(competitor, request["weights"], getattr(torch, request["dtype"]))
    loaded = harness.resident_anonymous() - empty
    for _ in range(request["warm_up"]):
        trainer()
    trainer.optimizer.zero_grad()
    trained = harness.resident_anonymous() - empty
    growth = harness.peak_growth(trainer)
    loaded, trained, growth = harness.slowest([loaded, trained, growth])
    _C.reset_collective_counts()
    trainer()
    own = _C.collective_counts()
    losses = list(trainer.losses)  # a profile repeats the halves of a step on their own
    forward_backward = harness.profile(trainer.forward_backward)
    optimizer_step = harness.profile(trainer.optimizer.step)
    return {
        "mib": {"loaded": loaded, "trained": trained, "growth": growth},
        "collectives": own if competitor == OURS else forward_backward.collectives,
        "profile": {
            "forward + backward": forward_backward.top(25),
            "optimizer": optimizer_step.top(8),
        },
        "losses": {competitor: losses},
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    request = harness.arguments()
    torch.manual_seed(0)
    if request["ranks"] > 1:
        dist.init_process_group("gloo")
    harness.report({"time": time_steps, "alone": measure_alone}[request["task"]](request))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
