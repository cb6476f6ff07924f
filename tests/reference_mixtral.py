"""A small Mixtral, its routing made as uneven as a test wants it, and its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers
from reference import Tiny, batch, difference, exact, gradients_of, shard_differences
from torch import nn
from transformers.models.mixtral import modeling_mixtral

import parallel_ext as px
from parallel_ext import ops


@dataclass(frozen=True)
class Layout:
    """The sides of a mesh."""

    dp: int
    tp: int
    ep: int

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"dp{self.dp}-tp{self.tp}-ep{self.ep}"

    def mesh(self) -> px.Mesh:
        return _mesh(self)


@lru_cache
def _mesh(layout: Layout) -> px.Mesh:
    return px.init_mesh(tp=layout.tp, ep=layout.ep, dp=layout.dp, timeout=60.0)


def layouts_of(world: int) -> Iterator[Layout]:
    """Every (dp, tp, ep) of so many ranks."""
    sides = [side for side in range(1, world + 1) if world % side == 0]
    return (Layout(world // tp, tp, ep) for tp in sides for ep in sides)


SKEWS = ("as drawn", "zipf", "one expert takes all", "an idle expert", "an idle rank")


def _skew(kind: str, num_experts: int, ep: int) -> torch.Tensor:
    """What is added to the router's logits."""
    skew = torch.zeros(num_experts, dtype=torch.float64)
    if kind == "zipf":
        skew -= 2 * torch.arange(1, num_experts + 1).double().log()
    elif kind == "one expert takes all":
        skew[-1] = 60
    elif kind == "an idle expert":
        skew[0] = -60
    elif kind == "an idle rank":  # the last one, of which half of the experts are
        skew[(num_experts + 1) // 2 :] = -60
    return skew


def _router(self: Any, hidden: torch.Tensor) -> Any:
    """HuggingFace's, in fp64 where the model is, plus the skew of a test."""
    hidden = hidden.reshape(-1, self.hidden_dim)
    logits = nn.functional.linear(hidden, self.weight)
    logits = logits + getattr(self, "skew", 0.0)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values, indices = torch.topk(logits.to(wide).softmax(-1), self.top_k, dim=-1)
    values = values / values.sum(-1, keepdim=True)
    return logits, values, indices


_fp32_balance = modeling_mixtral.load_balancing_loss_func


def _balance(
    logits: tuple[torch.Tensor, ...], num_experts: int, top_k: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """HuggingFace's balance loss, in fp64 where the model is."""
    if logits[0].dtype != torch.float64:
        return _fp32_balance(logits, num_experts, top_k, mask)
    probabilities = torch.cat([one.softmax(-1) for one in logits])
    chosen = nn.functional.one_hot(probabilities.topk(top_k).indices, num_experts).sum(1).double()
    rows = torch.ones(len(probabilities), dtype=torch.float64)
    if mask is not None:
        rows = mask.double().flatten().repeat(len(logits))
    shares = [rows @ one / rows.sum() for one in (chosen, probabilities)]
    return num_experts * shares[0] @ shares[1]


@dataclass(frozen=True)
class TinyMixtral:
    """A small Mixtral; the defaults divide nothing."""

    num_experts: int = 8
    top_k: int = 2
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 2
    vocab_size: int = 37
    tied: bool = False
    dtype: torch.dtype = torch.float64
    skew: str = "as drawn"
    balance: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def config(self) -> transformers.MixtralConfig:
        return transformers.MixtralConfig(
            vocab_size=self.vocab_size,
            hidden_size=8 * self.heads,
            intermediate_size=13,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            num_local_experts=self.num_experts,
            num_experts_per_tok=self.top_k,
            tie_word_embeddings=self.tied,
            output_router_logits=self.balance,
            router_aux_loss_coef=0.5,
            max_position_embeddings=128,
            sliding_window=None,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            experts_implementation="eager",
            **dict(self.options),
        )

    def model(self, seed: int = 1) -> transformers.MixtralForCausalLM:
        """The single-process model, the same on every rank."""
        torch.manual_seed(seed)
        model = transformers.MixtralForCausalLM(self.config()).to(self.dtype).train()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.3)
            elif "gate.weight" in name or "experts" in name:  # else nearly uniform, and nearly zero
                nn.init.normal_(parameter, std=0.3)
        modeling_mixtral.MixtralTopKRouter.forward = _router
        modeling_mixtral.load_balancing_loss_func = _balance
        if self.skew != "as drawn":
            for layer in model.model.layers:
                layer.mlp.gate.skew = _skew(self.skew, self.num_experts, 2).to(self.dtype)
        return model if self.dtype != torch.float64 else exact(model)


def batches(
    tiny: TinyMixtral | Tiny, dp: int, seed: int = 2
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The concatenated batch, and each dp rank's, with unequal numbers of labels and padding."""
    whole = batch(tiny.vocab_size, rows=2 * dp, tokens=7, seed=seed)
    for rank in range(dp):
        whole["labels"][2 * rank, rank + 3 :] = -100
    return whole, [
        {name: value[2 * rank : 2 * rank + 2] for name, value in whole.items()}
        for rank in range(dp)
    ]


def job_loss(loss: torch.Tensor, mesh: px.Mesh) -> torch.Tensor:
    """The mean over the dp ranks of their shares."""
    return ops.reduce_from_tp(loss.detach(), mesh.dp) / mesh.dp_size


def training_differences(
    reference: nn.Module, model: nn.Module, mesh: px.Mesh, tiny: TinyMixtral | Tiny, steps: int
) -> dict[str, float]:
    """Of losses, gradients, norms and weights in AdamW steps, from one process on all batches."""
    differences: dict[str, float] = {}
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (reference, model)
    ]
    for step in range(steps):
        whole, own = batches(tiny, mesh.dp_size, seed=step)
        expected, got = reference(**whole), model(**own[mesh.dp_rank])
        expected.loss.backward()
        got.loss.backward()
        differences[f"loss of step {step}"] = difference(job_loss(got.loss, mesh), expected.loss)
        for name, error in shard_differences(model, gradients_of(reference), True).items():
            differences[f"{name}.grad of step {step}"] = error
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        differences[f"norm of step {step}"] = difference(px.clip_grad_norm_(model, 1.0), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = dict(reference.named_parameters())
    for name, error in shard_differences(model, after, gradients=False).items():
        differences[f"{name} after {steps} steps"] = error
    return differences
