"""The router of a mixture of experts: which experts a token gets, the same when recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from parallel_ext.nn.recomputation import once, watch_checkpoints
from parallel_ext.ops import ExchangePlan, moe_router

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(input [..., K], weight [F, K]) -> [..., F], as ``nn.functional.linear``."""

Scores = Callable[[torch.Tensor], torch.Tensor]
"""Logits [T, E] -> scores [T, E]."""

Route = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(router, hidden states [..., H], choose, product, what else the router is given) -> logits
[T, E], weights and expert ids [T, top_k]; ``choose`` is a :class:`Choose`. The logits are where the
class has them, which transformers records: of Llama 4 they come second, and the weights first."""

Rule = Callable[..., torch.Tensor]
"""(tensor [T, E], top_k, part=0) -> ids of the chosen experts [T, top_k], int64, by shape alone."""


class Choose(Protocol):
    """Chooses the experts of tokens: of equal scores the lower id, the same when recomputed.

    A route calls ``by_softmax`` or ``best``, once.

    Attributes:
        sigmoid, softmax: of logits, for scores; as of :class:`Numerics`.
    """

    sigmoid: Scores
    softmax: Scores

    def by_softmax(
        self, logits: torch.Tensor, top_k: int, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and ids [T, top_k] for logits [T, E], as :func:`ops.moe_router`."""

    def best(self, scores: torch.Tensor, top_k: int) -> torch.Tensor:
        """Return the ids [T, top_k] of the highest scores [T, E], which get no gradient."""


class Numerics(NamedTuple):
    """How a router's numbers are computed; torch's way without arguments.

    Attributes:
        product: of its weight.
        sigmoid, softmax: of its logits, the latter over all experts and in fp32.
    """

    product: Product = nn.functional.linear
    sigmoid: Scores = torch.sigmoid
    softmax: Scores = partial(torch.softmax, dim=-1, dtype=torch.float32)


TORCHS = Numerics()


class OfAllTokens(Protocol):
    """The tokens of all tp ranks, of which one may have only some."""

    def divided(self) -> bool:
        """Return whether each rank holds only its own tokens in the forward that runs."""

    def shape_of_all(self) -> tuple[int, int]:
        """Return the number of sequences, and of tokens in each."""

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of [B, S, ...]."""


class _Choice:
    """The experts that one forward has chosen; None until it has."""

    def __init__(self, expert_ids: torch.Tensor | None) -> None:
        self.expert_ids = expert_ids
        self.plan: ExchangePlan | None = None  # of the same forward, once it is known


class Routing:
    """The choice of experts of one layer: of equal scores the lower id, the same when recomputed.

    Args:
        route: what the router's class computes, with choice and product left to its arguments.
        numerics: how its numbers are computed.

    Attributes:
        choice: that of the forward that is running, until its rows have a plan.
        rule: what ``force_routing`` lets choose; None where the logits do.
        leaf: number of the leaf that is running, in its batch; None outside of leaves.
        observer: gets the choices for each expert, as numbers or as a tensor on a GPU, and the
            number of rows of this rank's own experts.
        own: says which tokens of all tp ranks a forward has; None where it has all.
    """

    def __init__(self, route: Route, numerics: Numerics = TORCHS) -> None:
        self.route, self.numerics = route, numerics
        self.sigmoid, self.softmax = numerics.sigmoid, numerics.softmax
        watch_checkpoints()
        self.choice: _Choice | None = None
        self.rule: Rule | None = None
        self.leaf: int | None = None
        self.observer: Callable[[Sequence[int] | torch.Tensor, int], None] | None = None
        self.own: OfAllTokens | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Routing:
        copy = Routing(self.route, self.numerics)
        copy.rule, copy.own = self.rule, self.own
        return copy

    def forward(
        self, router: nn.Module, hidden_states: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stand for the router's own forward."""
        return self.route(router, hidden_states, self, self.numerics.product, *others)

    def by_softmax(
        self, logits: torch.Tensor, top_k: int, normalized: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        choice = self._made(logits, top_k)
        weights, ids = moe_router(logits, top_k, normalized, choice.expert_ids)
        choice.expert_ids = ids
        return weights, ids

    def best(self, scores: torch.Tensor, top_k: int) -> torch.Tensor:
        choice = self._made(scores, top_k)
        if choice.expert_ids is None:
            choice.expert_ids = highest(scores.detach(), top_k)
        return choice.expert_ids

    def _made(self, scores: torch.Tensor, top_k: int) -> _Choice:
        self.choice = once(self, lambda: _Choice(self._forced_ids(scores, top_k)))
        return self.choice

    def _forced_ids(self, logits: torch.Tensor, top_k: int) -> torch.Tensor | None:
        if self.rule is None:
            return None
        part = {} if self.leaf is None else {"part": self.leaf}  # whichever dp rank runs it
        if self.own is None or not self.own.divided():
            return self.rule(logits, top_k, **part)
        rows, tokens = self.own.shape_of_all()
        of_all = self.rule(logits.new_empty(rows * tokens, logits.size(-1)), top_k, **part)
        return self.own.part(of_all.view(rows, tokens, top_k)).reshape(-1, top_k)

    def known_plan(self) -> ExchangePlan | None:
        """Return the exchange plan of the forward that is recomputed; None in a first one."""
        if self.choice is None or self.choice.plan is None:
            return None
        plan, self.choice = self.choice.plan, None
        return plan

    def planned(
        self, plan: ExchangePlan, choices_per_expert: Sequence[int] | torch.Tensor, rows: int
    ) -> None:
        """Record the exchange plan of the forward that is running.

        Args:
            plan: of this ep rank.
            choices_per_expert: [E], of this rank's tokens.
            rows: of this rank's experts.
        """
        if self.choice is not None:
            self.choice.plan, self.choice = plan, None
        if self.observer is not None:
            self.observer(choices_per_expert, rows)


def is_routed(module: nn.Module) -> bool:
    """Return whether a :class:`Routing` stands for the forward of a module, as of a router."""
    forward = getattr(vars(module).get("forward"), "func", None)
    return isinstance(getattr(forward, "__self__", None), Routing)


def fixed_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the softmax over experts of logits [T, E], in fp32 or wider.

    Its bits depend on a token's logits alone; the gradients of torch's depend on threads.
    """
    tokens, experts = logits.shape
    every = torch.arange(experts, device=logits.device).expand(tokens, experts).contiguous()
    return moe_router(logits, experts, normalized=False, expert_ids=every)[0]


def highest(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Return the places [T, number] of the highest scores [T, E] of each row, in their order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :number]


def in_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Return logits from which the weights are computed in fp32, as HuggingFace's routers do."""
    return logits.float() if logits.dtype == torch.float64 else logits
