"""Small mixtures of experts, their routing made as uneven as a test wants it, and layouts."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any
from unittest import mock

import peft
import torch
import transformers
from ranks import pool
from reference import (
    Tiny,
    batch,
    config_sizes,
    difference,
    exact,
    gradient_differences,
    gradients_of,
    parallel,
    shard_differences,
    worst,
)
from torch import nn
from transformers.models.mixtral import modeling_mixtral

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.models import SPECS
from parallel_ext.nn import routing
from parallel_ext.nn.routing import Choose, Product
from parallel_ext.sharding.named_shards import named_shards


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


def _route(
    router: nn.Module,
    hidden: torch.Tensor,
    choose: Choose,
    product: Product = nn.functional.linear,
) -> Any:
    """HuggingFace's of either model, in fp64 where the model is, plus the skew of a test."""
    hidden = hidden.reshape(-1, router.hidden_dim)
    logits = product(hidden, router.weight)
    logits = logits + getattr(router, "skew", 0.0)
    mixtral = not hasattr(router, "norm_topk_prob")
    weights, ids = choose.by_softmax(logits, router.top_k, mixtral or router.norm_topk_prob)
    return logits, weights if mixtral else weights.to(logits.dtype), ids


class _Chosen:
    @staticmethod
    def by_softmax(
        logits: torch.Tensor, top_k: int, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        weights, ids = logits.to(wide).softmax(-1).topk(top_k)
        return weights / weights.sum(-1, keepdim=True) if normalized else weights, ids


def _in_fp64(router: nn.Module, model_type: str) -> None:
    """Let a router's class, and ours in its place, compute by ``_route``."""

    def forward(self: nn.Module, hidden: torch.Tensor) -> Any:
        return _route(self, hidden, _Chosen)

    cls = type(router)
    forward.__module__ = cls.__module__  # else refused
    cls.forward = forward
    object.__setattr__(SPECS[model_type].mixture, "route", _route)


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
    inner: int = 13
    vocab_size: int = 37
    tied: bool = False
    dtype: torch.dtype = torch.float64
    skew: str = "as drawn"
    balance: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def config(self) -> transformers.PreTrainedConfig:
        return self.config_of(
            transformers.MixtralConfig,
            intermediate_size=self.inner,
            num_local_experts=self.num_experts,
            sliding_window=None,
        )

    def config_of(self, architecture: Any, **sizes: Any) -> transformers.PreTrainedConfig:
        """The configuration of a mixture with these sizes of its own."""
        of_all = {
            **config_sizes(self),
            "num_experts_per_tok": self.top_k,
            "output_router_logits": self.balance,
            "router_aux_loss_coef": 0.5,
            "experts_implementation": "eager",
        }
        return architecture(**{**of_all, **sizes, **dict(self.options)})

    def model(self, seed: int = 1) -> transformers.PreTrainedModel:
        """The single-process model, the same on every rank."""
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(self.config())
        model = model.to(self.dtype).train()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=1.0, std=0.3)
            elif "gate.weight" in name or "experts" in name:  # else nearly uniform, and nearly zero
                nn.init.normal_(parameter, std=0.3)
        sys.modules[type(model).__module__].load_balancing_loss_func = _balance
        for block in (layer.mlp for layer in model.model.layers):
            if hasattr(block, "gate"):
                _in_fp64(block.gate, model.config.model_type)
                if self.skew != "as drawn":
                    block.gate.skew = _skew(self.skew, self.num_experts, 2).to(self.dtype)
        return model if self.dtype != torch.float64 else exact(model)


@dataclass(frozen=True)
class TinyQwen3Moe(TinyMixtral):
    """A small Qwen3-MoE: a dense layer and one of experts, heads of another size than usual."""

    num_experts: int = 5

    def config(self) -> transformers.PreTrainedConfig:
        return self.config_of(
            transformers.Qwen3MoeConfig,
            head_dim=6,
            intermediate_size=11,
            moe_intermediate_size=13,
            num_experts=self.num_experts,
            mlp_only_layers=[0],
            norm_topk_prob=True,
        )


@dataclass(frozen=True)
class TinyQwen2Moe(TinyMixtral):
    """A small Qwen2-MoE: a dense layer and one of experts, beside one that all tokens share."""

    num_experts: int = 5

    def config(self) -> transformers.PreTrainedConfig:
        return self.config_of(
            transformers.Qwen2MoeConfig,
            intermediate_size=11,
            moe_intermediate_size=13,
            shared_expert_intermediate_size=self.inner,
            num_experts=self.num_experts,
            mlp_only_layers=[0],
        )


def batches(
    tiny: TinyMixtral | Tiny, dp: int, seed: int = 2
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The concatenated batch, and each dp rank's, with unequal numbers of labels and padding."""
    # Eager attention gives NaN in rows that padding on the left leaves empty.
    left = getattr(tiny, "attention", "sdpa") == "sdpa"
    whole = batch(tiny.vocab_size, rows=2 * dp, tokens=7, seed=seed, left=left)
    for rank in range(dp):
        whole["labels"][2 * rank, rank + 3 :] = -100
    return whole, [
        {name: value[2 * rank : 2 * rank + 2] for name, value in whole.items()}
        for rank in range(dp)
    ]


def spread(
    tiny: TinyMixtral | Tiny, layout: Layout, zero: int | None = 2, **options: Any
) -> tuple[Any, Any, px.Mesh]:
    """The single-process model, the parallel one, and its mesh; None for no ``data_parallel``."""
    reference, mesh = tiny.model(), layout.mesh()
    model = parallel(reference, mesh, **options)
    return reference, px.data_parallel(model, mesh, zero) if zero else model, mesh


def own_batch(
    tiny: TinyMixtral | Tiny, mesh: px.Mesh, seed: int = 2
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The concatenated batch, and that of this rank."""
    whole, own = batches(tiny, mesh.dp_size, seed)
    return whole, own[mesh.dp_rank]


def job_loss(loss: torch.Tensor, mesh: px.Mesh) -> torch.Tensor:
    """The mean over the dp ranks of their shares."""
    return ops.reduce_from_region(loss.detach(), mesh.dp) / mesh.dp_size


def training_differences(
    reference: nn.Module, model: nn.Module, mesh: px.Mesh, tiny: TinyMixtral | Tiny, steps: int
) -> dict[str, float]:
    """Of losses, gradients, norms and weights in AdamW steps, from one process on all batches."""
    of_steps = (batches(tiny, mesh.dp_size, seed=step) for step in range(steps))
    return differences_of_steps(reference, model, mesh, of_steps)


def parity(
    tiny: TinyMixtral | Tiny,
    layout: Layout,
    zero: int | None = 2,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, float]:
    """The same of two steps of a model spread by ``layout``; the second catches stale buffers."""
    return training_differences(*spread(tiny, layout, zero, **options), tiny, 2)


def few_tokens_parity(tiny: TinyMixtral, layout: Layout, **options: Any) -> dict[str, float]:
    """As :func:`parity`, with three tokens a row."""
    of_steps = []
    for seed in range(2):
        one = batch(tiny.vocab_size, tokens=4, seed=seed, left=False)
        one = {name: value[:, :3] for name, value in one.items()}
        of_steps.append((one, [one]))
    return differences_of_steps(*spread(tiny, layout, None, **options), of_steps)


def accumulated_differences(
    reference: nn.Module, model: nn.Module, mesh: px.Mesh, tiny: TinyMixtral | Tiny, sync: bool
) -> dict[str, float]:
    """Of gradients of two batches, of which the first is under ``no_sync`` unless ``sync``."""
    for seed in (3, 4):
        whole, own = own_batch(tiny, mesh, seed)
        reference(**whole).loss.backward()
        with nullcontext() if sync or seed == 4 else px.no_sync(model):
            model(**own).loss.backward()
    return shard_differences(model, gradients_of(reference), True)


def differences_of_steps(
    reference: nn.Module,
    model: nn.Module,
    mesh: px.Mesh,
    of_steps: Iterable[tuple[dict[str, Any], list[dict[str, Any]]]],
) -> dict[str, float]:
    """The same on given batches: for each step the concatenated one, and each dp rank's."""
    differences: dict[str, float] = {}
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (reference, model)
    ]
    for step, (whole, own) in enumerate(of_steps):
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
        differences[f"{name} in the end"] = error
    return differences


def errors_in(
    tiny: TinyMixtral | Tiny,
    layout: Layout,
    dtype: torch.dtype,
    lower: torch.dtype | None = None,
    seeds: Sequence[int] = (2,),
    **options: Any,
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors against fp64 of our gradients and of the single process', both in ``dtype``.

    Each the median over the batches of ``seeds``: the error of one is one draw of the rounding.
    With a ``lower`` dtype both compute in it by autocast. Ours is made with ``options``.
    """
    exact = tiny.model()
    single = replace(tiny, dtype=dtype).model()
    single.load_state_dict(exact.state_dict())
    mesh = layout.mesh()
    model = px.data_parallel(parallel(single, mesh, **options), mesh)
    ours, theirs = defaultdict(list), defaultdict(list)
    for seed in seeds:
        whole, own = own_batch(tiny, mesh, seed)
        for each, data in ((exact, whole), (single, whole), (model, own)):
            each.zero_grad()
            with torch.autocast("cpu", lower, enabled=lower is not None and each is not exact):
                loss = each(**data).loss
            assert loss.dtype != lower
            loss.backward()
        truth = gradients_of(exact)
        for name, error in shard_differences(model, truth, True).items():
            ours[name].append(error)
        for name, gradient in gradients_of(single).items():
            theirs[name].append(difference(gradient, truth[name]))
    return tuple({name: median(of) for name, of in each.items()} for each in (ours, theirs))


def adapter_differences(tiny: TinyMixtral, layout: Layout, **options: Any) -> dict[str, float]:
    """Of the gradients of an adapter, and of what it trains whole, from PEFT in one process."""
    data = batches(tiny, layout.dp)
    return differences_of_adapter(lambda: exact(tiny.model()), layout, data, **options)


def adapted_pair(
    make: Callable[[], Any],
    mesh: px.Mesh,
    how: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> tuple[Any, Any]:
    """PEFT's model in one process, and ours with the same adapter; ``make`` gives the base."""
    model = parallel(make(), mesh, **how)
    torch.manual_seed(11)
    model = peft.get_peft_model(model, px.LoraConfig(init_lora_weights=False, **options))
    config = peft.LoraConfig(init_lora_weights=False, **options)
    plain = peft.get_peft_model(make(), config).double()
    trained = {n: (p, where) for n, p, where in named_shards(model) if p.requires_grad}
    values = px.io.state_dict.gather_in_step(trained, mesh, "test", writer_only=False)
    plain.load_state_dict({name: value.double() for name, value in values.items()}, strict=False)
    return plain, model


def differences_of_adapter(
    make: Callable[[], Any],
    layout: Layout,
    data: tuple[dict[str, Any], list[dict[str, Any]]],
    how: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> dict[str, float]:
    """The same of the model that ``make`` gives, on a batch of all dp ranks and on each rank's."""
    mesh = layout.mesh()
    plain, model = adapted_pair(make, mesh, how, **options)
    whole, own = data
    px.data_parallel(model, mesh)
    return gradient_differences(plain, model, whole, own[mesh.dp_rank])


def load_and_save(layout: Layout, whole: Path, ours: Path, tiny: TinyMixtral) -> tuple[float, str]:
    """Load what transformers has saved, save it again; how far the loaded model is from it."""
    mesh = layout.mesh()
    model = px.from_pretrained(whole, mesh, dtype=tiny.dtype, attn_implementation="sdpa")
    px.data_parallel(model, mesh)
    model(**batches(tiny, layout.dp)[1][mesh.dp_rank])  # leaves FSDP's parameters gathered
    model.save_pretrained(ours, max_shard_size=20_000)
    return worst(shard_differences(model, dict(tiny.model().named_parameters()), False))


def _refused(module: str, case: str) -> None:
    importlib.import_module(module).REFUSALS[case][0]()


def assert_refused(module: str, case: str) -> None:
    """A case of a test module's ``REFUSALS`` raises on all ranks.

    ``REFUSALS`` maps the case to a call, the number of ranks, and a part of the error's text.
    """
    _, ranks, message = importlib.import_module(module).REFUSALS[case]
    pool(ranks).assert_raises(_refused, module, case, timeout_s=60, words=message)


def choosing_again() -> Any:
    """Let backwards inside the context choose the experts again where they recompute a layer."""
    return mock.patch.object(routing, "once", lambda key, make: make())
