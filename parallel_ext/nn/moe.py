"""The experts of a mixture, sharded over an expert-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from parallel_ext import _C, ops
from parallel_ext.distributed.errors import DisagreementError
from parallel_ext.nn.grad_sync import PartialGradients, for_use
from parallel_ext.nn.initial_values import drawn
from parallel_ext.nn.routing import Routing
from parallel_ext.nn.sharded_module import ShardedModule, group_of_shards, shard_of
from parallel_ext.ops import ExchangePlan, Group, RoutePlan
from parallel_ext.sharding._torch_private import disable_compiler
from parallel_ext.sharding.layout import TensorLayout, shard_along, split
from parallel_ext.sharding.slices import from_each_rank

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_GRADIENTS = (
    "gradients of the experts alone",
    "gradients of the weights",
    "gradients of the tokens",
    "gradients of tokens and weights",
    "no gradients",
)


class LowRank(NamedTuple):
    """The product that an adapter adds to each expert's matrix: ``scale * lora_b lora_a``.

    Attributes:
        lora_a: [e, r, in], of this rank's experts.
        lora_b: [e, out, r].
        scale: of their product.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scale: float


class ExpertParallelExperts(ShardedModule):
    """HuggingFace's fused experts (``MixtralExperts``, for one) of which each rank holds some.

    Args:
        gate_up_proj: [e, 2 I, H], of this rank's e experts; gate before up.
        down_proj: [e, H, I].
        layouts: of ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I], sharded along dim 0
            into one range a rank, which may be empty.
        act_fn: between the two.
        group: the expert-parallel group; each of its ranks brings tokens of its own.
        tp: the tensor-parallel group, whose ranks bring the same tokens; each works on its slice.
        grad_scale: the gradients of the experts are multiplied by this.
        replicas: the ranks that hold the same experts, if their gradients are summed at the end of
            a backward; required with ``partials``, which does that.
        routing: of the router in front.

    Attributes:
        divided: says whether the tp ranks bring tokens of their own after all.

    Called with ``hidden_states`` [T, H], ``top_k_index`` [T, top_k] (int64) and ``top_k_weights``
    [T, top_k], all of this rank's own tokens, it returns [T, H] for them. ``adapters``, by the name
    of the tensor that each is on, enter the products. T may differ between ranks (but not between
    tp ranks) and be 0. Every call takes one gather of counts and two exchanges of rows in forward,
    two exchanges in backward; under tp one gather of tokens more in each. A gradient of an expert
    is the sum over the tokens of all ranks of the group, zeros for an expert without tokens.

    Raises:
        IndexError: an expert id is out of range on some rank; a RuntimeError on the others.
        DisagreementError: the ranks' hidden sizes, top_k, dtypes, needs of gradients or adapters
            differ.
    """

    joins_choices = True  # of a token that one rank has, in one row, where that saves bytes
    reads_counts = False  # of rows, on the host, where one rank has all experts

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        layouts: dict[str, TensorLayout],
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        group: Group,
        *,
        tp: Group = ops.ALONE,
        grad_scale: float = 1.0,
        replicas: Group = ops.ALONE,
        partials: PartialGradients | None = None,
        routing: Routing | None = None,
    ) -> None:
        super().__init__(layouts, group)
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up_proj, down_proj, act_fn
        self.tp, self.grad_scale = tp, grad_scale
        self.replicas, self.partials, self.routing = replicas, partials, routing
        self.divided: Callable[[], bool] | None = None
        layout = layouts["gate_up_proj"]
        self.num_experts = layout.shape[0]
        self.experts_per_rank = [stop - start for start, stop in layout.first_ranges]

    @property
    def communicates(self) -> bool:
        return max(self.group.size, self.tp.size) > 1

    @classmethod
    def from_plain(
        cls,
        plain: nn.Module,
        group: Group | dist.ProcessGroup,
        act_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> ExpertParallelExperts:
        """Shard the experts of a plain module, which every rank of a group holds, over its ranks.

        The gradient of an expert is the sum over the tokens of all ranks. Where each rank divides
        its loss by its own number of tokens, divide it by the size of the group as well.

        Args:
            plain: with ``gate_up_proj`` [E, 2 I, H], ``down_proj`` [E, H, I] and ``act_fn``, as
                HuggingFace's; the same on all ranks. It is left as it is.
            group: of consecutive ranks, each with tokens of its own.
            act_fn: the activation, if it is not ``plain.act_fn``.

        Raises:
            ValueError: ``plain`` has other parameters as well, such as biases.
        """
        others = {name for name, _ in plain.named_parameters()} - {"gate_up_proj", "down_proj"}
        if others:
            raise ValueError(
                f"experts with {', '.join(sorted(others))} are not supported; only gate_up_proj "
                "and down_proj are sharded"
            )
        group = group_of_shards(group)
        ranges = split(plain.gate_up_proj.size(0), group.size)
        layouts, shards = {}, []
        for name in ("gate_up_proj", "down_proj"):
            full = getattr(plain, name)
            layouts[name] = shard_along(name, tuple(full.shape), 0, ranges)
            shards.append(shard_of(full, layouts[name], group))
        return cls(*shards, layouts, act_fn or plain.act_fn, group)

    @classmethod
    def from_sizes(
        cls,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        group: Group | dist.ProcessGroup,
        act_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ExpertParallelExperts:
        """Build this rank's experts with the initial values of all experts in one process.

        These are HuggingFace's: ``gate_up_proj`` [E, 2 I, H] and then ``down_proj`` [E, H, I] from
        a normal distribution. Every rank of the group draws all of them, with one state of torch's
        generator, and keeps its own; on the CPU in blocks of 4 MiB, on a GPU with one copy of a
        tensor of all experts for the time of the call.

        Args:
            num_experts: E, of the whole layer.
            hidden_size: H.
            intermediate_size: I.
            group: of consecutive ranks, each with tokens of its own.
            act_fn: the activation; ``nn.SiLU()`` by default.
            std: standard deviation, HuggingFace's ``initializer_range``.
            device: of the experts, with whose generator they are drawn; on ``"meta"`` none is.
            dtype: of the experts.

        Example:
            >>> ExpertParallelExperts.from_sizes(5, 4, 3, ops.ALONE).down_proj.shape
            torch.Size([5, 4, 3])
        """
        plain, empty = nn.Module(), partial(torch.empty, device="meta", dtype=dtype)
        plain.gate_up_proj = nn.Parameter(empty(num_experts, 2 * intermediate_size, hidden_size))
        plain.down_proj = nn.Parameter(empty(num_experts, hidden_size, intermediate_size))
        init = partial(nn.init.normal_, std=std)
        own = cls.from_plain(plain, group, act_fn or nn.SiLU())
        return drawn(own, device, gate_up_proj=init, down_proj=init)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, LowRank] | None = None,
    ) -> torch.Tensor:
        self.mark.is_set = True
        adapters = adapters or {}
        if self.tp.size == 1 or (self.divided is not None and self.divided()):
            return self._own_tokens(hidden_states, top_k_index, top_k_weights, adapters)
        slices = split(hidden_states.size(0), self.tp.size)
        sizes = [stop - start for start, stop in slices]
        tokens, weights = ops.moe_take_tokens(hidden_states, top_k_weights, sizes, self.tp)
        choices = top_k_index[slice(*slices[self.tp.rank])]
        output = self._own_tokens(tokens, choices, weights, adapters)
        return ops.gather_tokens(output, sizes, self.tp, partial_gradient=False)

    def _own_tokens(
        self,
        tokens: torch.Tensor,
        choices: torch.Tensor,
        weights: torch.Tensor,
        adapters: Mapping[str, LowRank],
    ) -> torch.Tensor:
        low_ranks = [
            adapters[name].lora_a.size(1) if name in adapters else 0 for name in self.layouts
        ]
        route, plan = self._route(tokens, choices, weights, low_ranks)
        compute = self._uncompiled if plan.send else self._planned
        return compute(tokens, weights, route, plan, adapters)

    @disable_compiler
    def _uncompiled(self, *args: Any) -> torch.Tensor:
        """Run :meth:`_planned` with numbers of rows that a compiled graph would be made for."""
        return self._planned(*args)

    def _planned(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        route: RoutePlan,
        plan: ExchangePlan,
        adapters: Mapping[str, LowRank],
    ) -> torch.Tensor:
        """Return what the experts make of this rank's tokens, by a plan of the exchange."""
        rows, weights, origins = ops.moe_dispatch(tokens, weights, route, plan, self.group)
        product = partial(self._linear, route=route, plan=plan, adapters=adapters)
        rows = self._of_experts(rows, weights, product)
        # Under autocast experts compute in its dtype, and choices are summed in the tokens'.
        return ops.moe_combine(rows.to(tokens.dtype), origins, route, plan, self.group)

    def _of_experts(
        self, rows: torch.Tensor, weights: torch.Tensor, product: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Return what the experts make of their rows [M, H], each times its weight [M].

        ``product`` multiplies rows by each expert's matrix of a name.
        """
        return product(self._gated(product(rows, "gate_up_proj"), weights), "down_proj")

    def _gated(self, gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the gated activation, each row times its router's weight."""
        if isinstance(self.act_fn, nn.SiLU) or type(self.act_fn).__name__ == "SiLUActivation":
            return ops.moe_gated_silu(gate_up, weights)
        gate, up = gate_up.chunk(2, dim=-1)
        return (self.act_fn(gate) * up * weights.unsqueeze(-1)).to(gate_up.dtype)

    def _linear(
        self,
        rows: torch.Tensor,
        attribute: str,
        route: RoutePlan,
        plan: ExchangePlan,
        adapters: Mapping[str, LowRank],
    ) -> torch.Tensor:
        weight = self._matrices(attribute)
        counts = plan.rows_per_expert(self.group.rank) if plan.send else route.counts
        if attribute not in adapters:
            return ops.moe_linear(rows, weight, counts, self.grad_scale)
        lora_a, lora_b, scale = adapters[attribute]
        return ops.moe_lora_linear(
            rows, weight, lora_a, lora_b, counts, scale=scale, weight_grad_scale=self.grad_scale
        )

    def _matrices(self, attribute: str) -> torch.Tensor:
        """Return the matrix [out, in] of each expert of this rank, for a forward."""
        own, layout = getattr(self, attribute), self.layouts[attribute]
        return for_use(own, layout.name, self.replicas, self.partials)

    def _route(
        self,
        tokens: torch.Tensor,
        choices: torch.Tensor,
        weights: torch.Tensor,
        low_ranks: list[int],
    ) -> tuple[RoutePlan, ExchangePlan]:
        """Return where the rows go, and how many, as in the first forward if that was kept."""
        failure, route = None, None
        row_bytes = tokens.size(-1) * tokens.element_size() if self.joins_choices else 0
        try:
            if weights.shape != choices.shape:
                raise ValueError(
                    f"the weights of the choices have the shape {tuple(weights.shape)}, but the "
                    f"choices {tuple(choices.shape)}"
                )
            route = ops.moe_route_plan(choices, self.experts_per_rank, row_bytes, self.group.rank)
        except Exception as error:  # the others must hear of it before they wait for rows
            failure = error
        plan = self.routing.known_plan() if self.routing is not None else None
        if plan is not None and route is not None:
            return route, plan
        # Tests let the CPU take the path of a GPU.
        on_gpu = tokens.is_cuda or (tokens.is_cpu and _C.aten_path_on_cpu())
        alone = self.group.size == 1 and not self.reads_counts and not any(low_ranks)
        if on_gpu and alone and route is not None:
            plan = ExchangePlan.alone(self.num_experts)
            if self.routing is not None:
                self.routing.planned(plan, route.counts, choices.numel())
            return route, plan
        counts = choices.new_zeros(self.num_experts + self.group.size)
        if route is not None:
            counts = torch.cat([route.counts, route.rows_per_rank])
        header = [*self._header(tokens, choices, weights, failure), *low_ranks]
        plan = self._exchange_plan(counts, header, choices, failure)
        if self.routing is not None:
            rows = sum(plan.rows_per_expert(self.group.rank))
            self.routing.planned(plan, plan.choices_per_expert(), rows)
        return route, plan

    def _header(
        self,
        tokens: torch.Tensor,
        choices: torch.Tensor,
        weights: torch.Tensor,
        failure: Exception | None,
    ) -> list[int]:
        """Return as numbers whether this rank has failed, and what must be equal on all ranks."""
        dtype = _DTYPES.index(tokens.dtype) if tokens.dtype in _DTYPES else -1
        grads = 2 * tokens.requires_grad + weights.requires_grad if torch.is_grad_enabled() else 4
        return [int(failure is not None), tokens.size(-1), choices.size(-1), dtype, grads]

    def _exchange_plan(
        self,
        counts: torch.Tensor,
        header: list[int],
        choices: torch.Tensor,
        failure: Exception | None,
    ) -> ExchangePlan:
        """Gather every rank's counts, read by the host once, and return this rank's plan."""
        start = len(header) + 1
        numbers = torch.tensor([*header, choices.numel()]).to(counts.device, non_blocking=True)
        of_rank = from_each_rank(torch.cat([numbers, counts]), self.group).tolist()
        for of_peer in of_rank:  # a GPU counts no id that is out of range
            of_peer[0] |= sum(of_peer[start : start + self.num_experts]) != of_peer[start - 1]
        if failure is None and of_rank[self.group.rank][0]:
            failure = _out_of_range(choices, self.num_experts)
        self._check([message[: start - 1] for message in of_rank], failure)
        counts_of_rank = [message[start:] for message in of_rank]
        return ExchangePlan.of(counts_of_rank, self.experts_per_rank, self.group.rank)

    def _check(self, headers: Sequence[Sequence[int]], failure: Exception | None) -> None:
        name = self.layouts["gate_up_proj"].name.rpartition(".")[0]
        if failure is not None:
            raise failure
        failed = [str(rank) for rank, header in enumerate(headers) if header[0]]
        if failed:
            raise RuntimeError(
                f"{name}: ep rank {', '.join(failed)} could not route its tokens; its own error "
                "says why"
            )
        if any(header != headers[0] for header in headers):
            words = (
                f"ep rank {rank}: hidden size {hidden}, top_k {top_k}, "
                f"{_DTYPES[dtype] if dtype >= 0 else 'another dtype'}, "
                f"{_GRADIENTS[grads]}, adapters of rank {' and '.join(map(str, low_ranks))}"
                for rank, (_, hidden, top_k, dtype, grads, *low_ranks) in enumerate(headers)
            )
            raise DisagreementError(
                f"{name}: the ranks must agree, but are given {'; '.join(words)}"
            )


def _out_of_range(choices: torch.Tensor, num_experts: int) -> IndexError:
    """Name the first choice that is no expert's id."""
    token, number = ((choices < 0) | (choices >= num_experts)).nonzero()[0].tolist()
    return IndexError(
        f"choice {number} of token {token} is expert {int(choices[token, number])}, outside of "
        f"[0, {num_experts})"
    )
