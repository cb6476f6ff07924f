"""The router of a mixture of experts: which experts a token gets, the same when recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from parallel_ext.nn.recomputation import once, watch_checkpoints
from parallel_ext.ops import ExchangePlan

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""(scores [T, E], top_k) -> ids of the chosen experts [T, top_k], int64."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(input [..., K], weight [F, K]) -> [..., F], as ``nn.functional.linear``."""

Route = Callable[
    [nn.Module, torch.Tensor, Choose, Product], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
"""(router, hidden states [..., H], choose, product) -> logits [T, E], weights and expert ids
[T, top_k]."""


class OfAllTokens(Protocol):
    """The tokens of all tp ranks, of which one may have only some."""

    def divided(self) -> bool:
        """Return whether a rank has only some in the forward that runs."""

    def shape_of_all(self) -> tuple[int, int]:
        """Return the number of sequences, and of tokens in each."""

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of [B, S, ...]."""


class _Choice:
    """The experts that one forward has chosen."""

    def __init__(self, expert_ids: torch.Tensor) -> None:
        self.expert_ids = expert_ids
        self.plan: ExchangePlan | None = None  # of the same forward, once it is known


class Routing:
    """The choice of experts of one layer: of equal scores the lower id, the same when recomputed.

    Args:
        route: what the router's class computes, with choice and product left to its arguments.
        product: of the router's weight.

    Attributes:
        choice: that of the forward that is running, until its rows have a plan.
        select: chooses by the scores; ``force_routing`` puts another rule here.
        leaf: number of the leaf that is running, in its batch; None outside of leaves.
        observer: gets the choices for each expert, as numbers or as a tensor on a GPU, and the
            number of rows of this rank's own experts.
        own: says which tokens of all tp ranks a forward has; None where it has all.
    """

    def __init__(self, route: Route, product: Product = nn.functional.linear) -> None:
        self.route, self.product = route, product
        watch_checkpoints()
        self.choice: _Choice | None = None
        self.select: Choose = top_k_lowest
        self.leaf: int | None = None
        self.observer: Callable[[Sequence[int] | torch.Tensor, int], None] | None = None
        self.own: OfAllTokens | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Routing:
        copy = Routing(self.route, self.product)
        copy.select, copy.own = self.select, self.own
        return copy

    @property
    def forced(self) -> bool:
        """Return whether something else than the scores chooses the experts."""
        return self.select is not top_k_lowest

    def forward(
        self, router: nn.Module, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stand for the router's own forward."""
        return self.route(router, hidden_states, self._choose, self.product)

    def _choose(self, scores: torch.Tensor, top_k: int) -> torch.Tensor:
        self.choice = once(self, lambda: _Choice(self._selected(scores, top_k)))
        return self.choice.expert_ids

    def _selected(self, scores: torch.Tensor, top_k: int) -> torch.Tensor:
        if not self.forced:
            return self.select(scores, top_k)
        part = {} if self.leaf is None else {"part": self.leaf}  # whichever dp rank runs it
        if self.own is None or not self.own.divided():
            return self.select(scores, top_k, **part)
        rows, tokens = self.own.shape_of_all()  # a rule looks at their number alone
        of_all = self.select(scores.new_zeros(rows * tokens, scores.size(-1)), top_k, **part)
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


def top_k_lowest(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the indices of the largest scores, largest first; of equal ones the lower first.

    Args:
        scores: [T, E].
        top_k: how many.

    Returns:
        [T, top_k], int64.

    Example:
        >>> top_k_lowest(torch.tensor([[0.2, 0.3, 0.3, 0.2]]), 3)
        tensor([[1, 2, 0]])
    """
    left, chosen = scores.detach().clone(), []
    for _ in range(top_k):
        if chosen:
            left.scatter_(-1, chosen[-1], float("-inf"))
        chosen.append(left.argmax(-1, keepdim=True))  # the first of equal ones
    return torch.cat(chosen, -1)
