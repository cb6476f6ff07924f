"""Small jobs whose training is saved and resumed elsewhere."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
import torch.distributed as dist
from reference import FLOOR, Tiny, batch, difference, parallel
from reference_lora import ALL, DOWN, GATE_UP, config
from reference_mixtral import Layout, TinyMixtral
from torch import nn

import parallel_ext as px
from parallel_ext.parallel.state import STATE_NAME, state_of
from parallel_ext.sharding.named_shards import named_shards
from parallel_ext.sharding.slices import take

LLAMA, MIXTRAL = Tiny(layers=1), TinyMixtral(num_experts=5, layers=1)
TIED = replace(LLAMA, tied=True)


@dataclass(frozen=True)
class Job:
    """How a model is spread and trained.

    Attributes:
        lora: train adapters of all that may have some, and a head of the adapter's own.
    """

    tiny: Any = LLAMA
    layout: Layout = Layout(1, 1, 1)
    zero: int | None = None
    optimizer: str = "AdamW"
    vocab_multiple_of: int = 1
    lora: bool = False

    def __str__(self) -> str:
        stage = f"-zero{self.zero}" if self.zero else ""
        return f"{self.layout}{stage}-{self.optimizer}{'-lora' * self.lora}"


OTHERS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.3},
    "Adamax": {"lr": 1e-2},
    "ASGD": {"lr": 0.1, "lambd": 1e-2, "t0": 1},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 0.1},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
}
"""torch's optimizers beside Adam, SGD and Adafactor, and their options."""


class Signed(torch.optim.Optimizer):
    """An optimizer of one's own: signs of averaged gradients."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].mul_(0.7).add_(parameter.grad, alpha=0.3)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(state["average"].sign() * group["lr"])


class SignedSGD(torch.optim.SGD):
    """One that inherits from torch's, and keeps another state."""

    step = Signed.step


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == "Rprop":
        return torch.optim.Rprop([p for group in groups for p in group["params"]])
    if name in OTHERS:
        return getattr(torch.optim, name)(groups, **OTHERS[name])
    if name == "Signed":
        return Signed(groups, lr=1e-2, weight_decay=0.0)
    if name == "SignedSGD":
        return SignedSGD(groups, lr=1e-2, momentum=0.9)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if name == "px.Adafactor" and hasattr(model, STATE_NAME):
        return px.Adafactor(model, groups, lr=0.1)
    if name.endswith("Adafactor"):
        return torch.optim.Adafactor(groups, lr=0.1)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), amsgrad=name == "amsgrad")


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


def with_adapter(model: nn.Module, tiny: Any, seed: int = 1) -> nn.Module:
    """Give a model, parallel or not, an adapter whose values follow from their names."""
    changes: dict[str, Any] = {"target_modules": ALL, "modules_to_save": ["lm_head"]}
    if isinstance(tiny, TinyMixtral):
        changes |= {"target_modules": ALL[:4], "target_parameters": [GATE_UP, DOWN]}
    on_ranks = hasattr(model, STATE_NAME)
    own = config(**changes)
    model = peft.get_peft_model(model, own if on_ranks else peft.LoraConfig(**own.to_dict()))
    layouts = {name: layout for name, _, layout in named_shards(model)} if on_ranks else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            layout = layouts.get(name)
            shape = layout.shape if layout else parameter.shape
            full = 0.3 * torch.randn(shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(take(full, layout, state_of(model).mesh.rank) if layout else full)
    return model


def build(job: Job, seed: int = 1, mesh: px.Mesh | None = None) -> tuple[Any, Any, Any, px.Mesh]:
    """A model, its optimizer and scheduler, and the mesh."""
    in_ranks = dist.is_initialized() or "RANK" in os.environ
    if mesh is None:
        mesh = job.layout.mesh() if in_ranks else px.init_mesh()
    base = job.tiny.model(1 if job.lora else seed)  # which no checkpoint of an adapter holds
    model = parallel(base, mesh, vocab_multiple_of=job.vocab_multiple_of)
    if job.lora:
        model = with_adapter(model, job.tiny, seed)
    if job.zero:
        px.data_parallel(model, mesh, job.zero)
    optimizer = optimizer_of(model, job.optimizer)
    return model, optimizer, scheduler_of(optimizer), mesh


def one_step(model: Any, optimizer: Any, scheduler: Any, data: dict[str, Any]) -> None:
    model(**data).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def train(model: Any, optimizer: Any, scheduler: Any, mesh: px.Mesh, steps: range) -> None:
    """Every step has the same four rows, whatever the number of dp ranks."""
    for step in steps:
        whole = batch(model.config.vocab_size, rows=4, tokens=6, seed=step)
        own = {name: value[mesh.dp_rank :: mesh.dp_size] for name, value in whole.items()}
        one_step(model, optimizer, scheduler, own)


def full_difference(ours: nn.Module, reference: nn.Module) -> float:
    """The largest difference between what files hold of two models."""
    full, expected = px.full_state_dict(ours, writer_only=False), reference.state_dict()
    assert full.keys() == expected.keys()
    return max(difference(full[name], each) for name, each in expected.items())


def difference_trained(
    reference: nn.Module,
    ours: nn.Module,
    losses: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    accumulate: bool = False,
    norms_within: float = FLOOR[torch.float64],
) -> float:
    """The largest difference between what files hold of two models after three steps.

    Args:
        reference: of one process.
        ours: around a parallel model.
        losses: of both models, for the batch of a number.
        accumulate: whether a step has two batches.
        norms_within: how far apart the norms of the gradients may be.
    """
    models = (reference, ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(3):
        if accumulate:
            theirs, own = losses(100 + step)
            theirs.backward()
            with px.no_sync(ours):
                own.backward()
        for loss in losses(step):
            loss.backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in models]
        assert difference(norms[1], norms[0]) <= norms_within
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return full_difference(ours, reference)
