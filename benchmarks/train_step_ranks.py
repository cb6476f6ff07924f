"""What the processes of a training benchmark run: building the competitors, timing, measuring."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration, PreTrainedModel
from transformers.distributed import DistributedConfig

import parallel_ext as px
from parallel_ext import _C

TRANSFORMERS_TP = "transformers TP"
OURS = "parallel_ext"
ONE_PROCESS = "one process"

BATCH, SEQUENCE, VOCABULARY = harness.size((4, 256, 32000), (2, 8, 509))
IMAGE_ID, IMAGE_TOKENS = 0, 4


Build = Callable[[str, Mapping[str, Any]], nn.Module]
"""Competitor and request -> its model, ready for training."""


def build(competitor: str, request: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a competitor with the weights and in the dtype that the request names."""
    directory, dtype = request["weights"], getattr(torch, request["dtype"])
    is_of_images = request.get("model") == "llava"
    cls = LlavaForConditionalGeneration if is_of_images else LlamaForCausalLM
    if competitor == TRANSFORMERS_TP:
        parallel = DistributedConfig(tp_size=dist.get_world_size())
        model = cls.from_pretrained(directory, dtype=dtype, distributed_config=parallel)
    else:
        model = cls.from_pretrained(directory, dtype=dtype)
        if competitor == OURS:
            px.parallelize(model, px.init_mesh(tp=dist.get_world_size()))
    return model.train()


class Trainer:
    """One competitor's model and optimizer; called, it does a step and returns its two phases.

    Attributes:
        losses: of all steps so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        # On CPUs AdamW runs without foreach by default too; DTensor parameters do not allow it.
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(1, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        self.inputs = {"input_ids": ids, "labels": ids}
        if isinstance(model, LlavaForConditionalGeneration):  # an image in each row
            ids[:, :IMAGE_TOKENS] = IMAGE_ID
            pixels = torch.randn(BATCH, 3, 28, 28, generator=generator)
            self.inputs["pixel_values"] = pixels.to(model.dtype)
        self.losses: list[float] = []

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(**self.inputs).loss
        loss.backward()
        self.losses.append(loss.item())

    def __call__(self) -> list[float]:
        start = time.perf_counter()
        self.forward_backward()
        middle = time.perf_counter()
        self.optimizer.step()
        stop = time.perf_counter()
        return [middle - start, stop - middle, stop - start]


def time_steps(request: Mapping[str, Any], build: Build) -> dict[str, Any]:
    """Time the requested competitors, all alive in this process, in turn."""
    trainers = {name: Trainer(build(name, request)) for name in request["competitors"]}
    rounds = harness.interleaved(trainers, request["repetitions"], request["warm_up"])
    return {
        "rounds": [asdict(each) for each in rounds],
        "losses": {name: trainer.losses for name, trainer in trainers.items()},
    }


def measure_alone(request: Mapping[str, Any], build: Build) -> dict[str, Any]:
    """Memory, collectives and profiles of the only competitor in this process."""
    (competitor,) = request["competitors"]
    empty = harness.resident_anonymous()
    trainer = Trainer(build(competitor, request))
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


def answer(request: Mapping[str, Any], build: Build) -> None:
    """Do what ``train_step.measure`` requests, with the models that ``build`` makes."""
    if request["ranks"] > 1:
        dist.init_process_group("gloo")
    harness.finish({"time": time_steps, "alone": measure_alone}[request["task"]](request, build))


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    answer(harness.arguments(), build)


if __name__ == "__main__":
    main()
