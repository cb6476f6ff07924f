"""What the ranks of ``moe.py`` run: one layer of experts, forward and backward, in several ways."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import MixtralConfig
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import parallel_ext as px
from parallel_ext import ops
from parallel_ext.nn.moe import ExpertParallelExperts
from parallel_ext.ops import Group
from parallel_ext.sharding.layout import shard_along, split
from parallel_ext.sharding.slices import take

OURS = "parallel_ext"
OURS_GLOO = "parallel_ext, gloo only"
GROUPED = "transformers, grouped_mm"
EAGER = "transformers, eager"
TITAN = "torchtitan's dispatcher"
FLOOR = "GEMMs and 4 exchanges"
COMPETITORS = (OURS, OURS_GLOO, GROUPED, EAGER, TITAN, FLOOR)

# All experts on each rank, and no exchange.
LOCAL_OURS = "parallel_ext, alone"
LOCAL_GROUPED = "transformers, grouped_mm, alone"
LOCAL_EAGER = "transformers, eager, alone"
LOCAL_FLOOR = "GEMMs alone"
LOCAL_COMPETITORS = (LOCAL_OURS, LOCAL_GROUPED, LOCAL_EAGER, LOCAL_FLOOR)

HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = harness.size((1024, 64, 8, 2, 4096), (64, 16, 8, 2, 64))

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _whole(dtype: torch.dtype, implementation: str) -> MixtralExperts:
    """All experts, the same on every rank and for every competitor."""
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, hidden_act="silu"
    )
    config._experts_implementation = implementation
    torch.manual_seed(1)
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.05)
    return experts.to(dtype)


def _ours(group: Group, dtype: torch.dtype) -> ExpertParallelExperts:
    whole, ranges = _whole(dtype, "eager"), split(EXPERTS, group.size)
    layouts = {n: shard_along(n, tuple(p.shape), 0, ranges) for n, p in whole.named_parameters()}
    shards = [
        nn.Parameter(take(p.data, layouts[n], group.rank)) for n, p in whole.named_parameters()
    ]
    return ExpertParallelExperts(*shards, layouts, whole.act_fn, group)


def _transformers(mesh: px.Mesh, dtype: torch.dtype, implementation: str) -> nn.Module:
    experts, own = _whole(dtype, implementation), EXPERTS // mesh.ep_size
    for name, parameter in list(experts.named_parameters()):
        shard = parameter.data[mesh.rank * own : (mesh.rank + 1) * own].clone()
        setattr(experts, name, nn.Parameter(shard))
    experts.num_experts, experts._is_expert_parallel = own, True
    grid = init_device_mesh("cpu", (mesh.ep_size, 1), mesh_dim_names=("ep", "tp"))
    EpDispatchExpertsParallel().install_forward(
        experts, ep_mesh=grid["ep"], tp_mesh=grid["tp"], ep_implementation="all_to_all"
    )
    return experts


class _Titan(nn.Module):
    """torchtitan's all-to-all dispatcher around a grouped product of the dtype that is measured."""

    def __init__(self, mesh: px.Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        set_spmd_backend("default")  # whose collectives need no mesh of the whole trainer
        config = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
        self.dispatcher = AllToAllTokenDispatcher(config)
        grid = init_device_mesh("cpu", (mesh.ep_size,), mesh_dim_names=("ep",))
        self.dispatcher.wire_meshes(ep_mesh=grid["ep"])
        own = slice(*split(EXPERTS, mesh.ep_size)[mesh.rank])
        for name, parameter in _whole(dtype, "eager").named_parameters():
            setattr(self, name, nn.Parameter(parameter.data[own].clone()))

    def forward(
        self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        rows, counts, metadata = self.dispatcher.dispatch(tokens, weights, ids, counts)
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate_up = torch._grouped_mm(rows, self.gate_up_proj.mT, offs=offsets)
        gate, up = gate_up.chunk(2, dim=-1)
        rows = torch._grouped_mm(functional.silu(gate) * up, self.down_proj.mT, offs=offsets)
        return self.dispatcher.combine(rows, metadata, tokens)


class _Floor:
    """The products of balanced experts into buffers that stay, and gloo's exchange of the rows."""

    def __init__(self, dtype: torch.dtype, ranks: int) -> None:
        self.own, self.rows = EXPERTS // ranks, TOKENS * TOP_K // (EXPERTS // ranks)
        self.alone = ranks == 1

        def room(*shape: int) -> torch.Tensor:
            return torch.randn(shape).to(dtype)

        self.gate_up, self.down = room(self.own, 2 * INNER, HIDDEN), room(self.own, HIDDEN, INNER)
        self.grads = [torch.empty_like(self.gate_up), torch.empty_like(self.down)]
        self.x, self.dx = room(self.own, self.rows, HIDDEN), room(self.own, self.rows, HIDDEN)
        self.y, self.dy = torch.empty_like(self.x), room(self.own, self.rows, HIDDEN)
        self.z, self.dz = (room(self.own, self.rows, 2 * INNER) for _ in range(2))
        self.a, self.da = (room(self.own, self.rows, INNER) for _ in range(2))

    def _exchange(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        if self.alone:
            return
        as_rows = [t.view(-1, HIDDEN).view(torch.uint8) for t in (out, rows)]
        dist.all_to_all_single(*as_rows)

    @torch.no_grad()
    def step(self) -> None:
        self._exchange(self.y, self.x)
        for e in range(self.own):
            torch.mm(self.x[e], self.gate_up[e].T, out=self.z[e])
            torch.mm(self.a[e], self.down[e].T, out=self.y[e])
        self._exchange(self.y, self.x)
        self._exchange(self.dx, self.dy)
        for e in range(self.own):
            torch.mm(self.dy[e], self.down[e], out=self.da[e])
            torch.mm(self.dy[e].T, self.a[e], out=self.grads[1][e])
            torch.mm(self.dz[e], self.gate_up[e], out=self.dx[e])
            torch.mm(self.dz[e].T, self.x[e], out=self.grads[0][e])
        self._exchange(self.dx, self.dy)


class _Case:
    """One rank's tokens, choices and weights, and what every layer makes of them."""

    def __init__(self, dtype: torch.dtype, rank: int, routing: str) -> None:
        generator = torch.Generator().manual_seed(10 + rank)
        self.tokens = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
        self.grad = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
        odds = torch.ones(EXPERTS) if routing == "even" else 1.0 / torch.arange(1, EXPERTS + 1)
        self.ids = torch.multinomial(odds.expand(TOKENS, -1), TOP_K, generator=generator)
        weights = torch.rand(TOKENS, TOP_K, generator=generator) + 0.1
        self.weights = (weights / weights.sum(-1, keepdim=True)).requires_grad_()

    def step(self, layer: nn.Module) -> list[float]:
        """Seconds of forward and backward together."""
        self.tokens.grad = self.weights.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        start = time.perf_counter()
        layer(self.tokens, self.ids, self.weights).backward(self.grad)
        return [time.perf_counter() - start]

    def results(self, layer: nn.Module) -> list[torch.Tensor]:
        self.step(layer)
        with torch.no_grad():
            output = layer(self.tokens, self.ids, self.weights)
        own = [parameter.grad.float() for parameter in layer.parameters()]
        return [output.float(), self.tokens.grad.float(), self.weights.grad.float(), *own]


def _error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Rounds, growth of memory and differences of all competitors."""
    dtype, mesh = getattr(torch, request["dtype"]), px.init_mesh(ep=dist.get_world_size())
    case = _Case(dtype, mesh.rank, request["routing"])
    ours = _ours(mesh.ep, dtype)
    layers = {
        OURS: ours,
        OURS_GLOO: ours,
        GROUPED: _transformers(mesh, dtype, "grouped_mm"),
        EAGER: _transformers(mesh, dtype, "eager"),
    }
    if importlib.util.find_spec("torchtitan"):
        layers[TITAN] = _Titan(mesh, dtype)
    alone = {
        LOCAL_OURS: _ours(ops.ALONE, dtype),
        LOCAL_GROUPED: _whole(dtype, "grouped_mm"),
        LOCAL_EAGER: _whole(dtype, "eager"),
    }
    floors = {FLOOR: _Floor(dtype, mesh.ep_size), LOCAL_FLOOR: _Floor(dtype, 1)}

    def turn(name: str) -> Callable[[], list[float]]:
        def run() -> list[float]:
            px._C.set_shared_memory(name != OURS_GLOO)
            if name in floors:
                start = time.perf_counter()
                floors[name].step()
                return [time.perf_counter() - start]
            return case.step({**layers, **alone}[name])

        return run

    expected, expected_alone = case.results(ours), case.results(alone[LOCAL_OURS])
    errors = {n: _error(case.results(layers[n]), expected) for n in layers if n != OURS}
    errors |= {n: _error(case.results(alone[n]), expected_alone) for n in alone if n != LOCAL_OURS}
    turns = {name: turn(name) for name in (*layers, *alone, *floors)}
    rounds = harness.interleaved(turns, request["repetitions"], warm_up=2)
    growth = {}
    for name in layers:
        px.release_workspaces()  # what ours keeps counts as if it were allocated again
        growth[name] = harness.peak_growth(turns[name])
    profiles = {}
    if request["profile"]:
        profiles = {name: harness.profile(turns[name]).top(14) for name in (OURS, EAGER)}
    return {
        "rounds": [asdict(each) for each in rounds],
        "growth_mib": growth,
        "errors": errors,
        "profile": profiles,
        "tokens_mib": case.tokens.nbytes / 2**20,
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    harness.finish(measure(harness.arguments()))


if __name__ == "__main__":
    main()
