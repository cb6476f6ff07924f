"""``force_routing``: a mixture whose experts are chosen by a rule, for benchmarks."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import nn

from parallel_ext.parallel.state import state_of


def balanced(scores: torch.Tensor, top_k: int, part: int = 0) -> torch.Tensor:
    """Give the choices to the experts in turn.

    Args:
        scores: [T, E].
        top_k: how many different experts a token gets.
        part: number of the dp rank; its choices begin where those of the ones before it, with as
            many tokens, end. Of the leaf in ``px.train_leaves``.

    Returns:
        [T, top_k], int64; every expert as often as any other, or once more.

    Example:
        >>> balanced(torch.zeros(3, 4), 2)
        tensor([[0, 1],
                [2, 3],
                [0, 1]])
    """
    tokens, num_experts = scores.shape
    first = part * tokens * top_k
    choices = torch.arange(first, first + tokens * top_k, device=scores.device)
    return (choices % num_experts).view(tokens, top_k)


def skewed(scores: torch.Tensor, top_k: int, part: int = 0) -> torch.Tensor:
    """Draw the choices by Zipf's law.

    Expert e, counted from 0, has the odds 1 / (e + 1); the further choices of a token are drawn by
    the same odds out of the experts that are left. Arguments and result are those of
    :func:`balanced`; ``part`` seeds what is drawn, which does not depend on anything else.

    Example:
        >>> counts = skewed(torch.zeros(9999, 4), 1).flatten().bincount()
        >>> counts.argsort(descending=True)  # 48, 24, 16 and 12 percent
        tensor([0, 1, 2, 3])
    """
    return _drawn(*scores.shape, top_k, part, scores.device)


@lru_cache(maxsize=4)
def _drawn(
    tokens: int, num_experts: int, top_k: int, seed: int, device: torch.device
) -> torch.Tensor:
    odds = 1.0 / torch.arange(1, num_experts + 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(odds.expand(tokens, -1), top_k, generator=generator).to(device)


_RULES = {"balanced": balanced, "skewed": skewed}


def force_routing(model: nn.Module, rule: str | None) -> None:
    """Let a rule choose the experts of every layer, in all forwards from now on.

    For measuring what an uneven load costs. Every rank calls it. The router still scores: a token's
    weights are the scores of its forced experts, normalised as those of chosen ones, and gradients
    flow to the router through them.

    Args:
        model: a parallel model with experts, wrapped or not; copies of it are forced as well.
        rule: ``"balanced"``, where every expert gets as many choices as any other, to within one
            (over the job, where the dp ranks have equally many tokens); ``"skewed"``, where they
            follow Zipf's law (:func:`skewed`); None gives the choice back to the router.

    Raises:
        ValueError: another rule, or a model without experts.
        DisagreementError: the ranks ask for different rules.

    Example:
        >>> force_routing(model, "skewed")  # doctest: +SKIP
    """
    state = state_of(model)
    state.mesh.control.barrier(f"force_routing({rule!r})")
    if not state.routings:
        raise ValueError(f"force_routing: {type(model).__name__} has no experts")
    if rule is not None and rule not in _RULES:
        raise ValueError(f"force_routing: rule is {rule!r}; pass one of {[*_RULES]} or None")
    for routing in state.routings:
        routing.rule = None if rule is None else partial(_RULES[rule], part=state.mesh.dp_rank)
