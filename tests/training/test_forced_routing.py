"""A forced routing is the rule's, the same for one process, and its gradients are exact."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from ranks import pool
from reference import Tiny, difference, gradients_of, mesh_of, parallel, shard_differences, worst
from reference_mixtral import Layout, TinyMixtral, batches, job_loss, spread
from torch import nn

import parallel_ext as px
from parallel_ext.training.forced_routing import balanced, skewed

TINY = TinyMixtral(num_experts=5, skew="zipf")
RULES = {"balanced": balanced, "skewed": skewed}


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"), [(7, 5, 2), (1, 8, 3), (64, 8, 2), (3, 4, 4), (0, 2, 1)]
)
@pytest.mark.parametrize("rule", RULES)
def test_a_token_gets_different_experts(
    rule: str, tokens: int, num_experts: int, top_k: int
) -> None:
    ids = RULES[rule](torch.zeros(tokens, num_experts), top_k)
    assert ids.shape == (tokens, top_k)
    assert ids.dtype == torch.int64
    assert all(len({*row}) == top_k and min(row) >= 0 for row in ids.tolist())
    assert torch.equal(ids, RULES[rule](torch.ones(tokens, num_experts), top_k))
    counts = ids.flatten().bincount(minlength=num_experts)
    assert len(counts) == num_experts
    assert rule == "skewed" or counts.max() - counts.min() <= 1


def test_skewed_choices_follow_zipf() -> None:
    tokens, num_experts = 40_000, 6
    ids = skewed(torch.zeros(tokens, num_experts), 2)
    odds = 1 / torch.arange(1, num_experts + 1).double()
    first = odds / odds.sum()
    pairs = first[:, None] * odds / (odds.sum() - odds)[:, None]  # without replacement
    pairs.fill_diagonal_(0)
    found = torch.zeros(num_experts, num_experts).double()
    found.index_put_((ids[:, 0], ids[:, 1]), torch.ones(tokens).double(), accumulate=True)
    deviation = (pairs * (1 - pairs) / tokens).sqrt()
    assert ((found / tokens - pairs).abs() <= 4 * deviation).all()


def _forced_router(gate: nn.Module, rule: str, dp: int, hidden: torch.Tensor) -> Any:
    """The router of a single process on the batches of all dp ranks, one after the other."""
    scores = nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
    scores = (scores + gate.skew).softmax(-1)
    each = [RULES[rule](one, gate.top_k, rank) for rank, one in enumerate(scores.chunk(dp))]
    ids = torch.cat(each)
    weights = scores.gather(-1, ids)
    return None, weights / weights.sum(-1, keepdim=True), ids


def _forced(layout: Layout, rule: str, recomputed: bool) -> tuple[dict[str, float], Any]:
    """Differences from the single process, and the choices for each expert."""
    reference, model, mesh = spread(TINY, layout)
    for layer in reference.model.layers:
        layer.mlp.gate.forward = partial(_forced_router, layer.mlp.gate, rule, layout.dp)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    px.force_routing(model, rule)
    whole, own = batches(TINY, layout.dp)
    expected = reference(**whole).loss
    expected.backward()
    with px.RoutingMetrics(model) as metrics:
        loss = model(**own[mesh.dp_rank]).loss
        loss.backward()
        metrics.step(0)
    differences = shard_differences(model, gradients_of(reference), True)
    return {"loss": difference(job_loss(loss, mesh), expected), **differences}, metrics.choices


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("layout", "recomputed"),
    [(Layout(2, 1, 2), True), (Layout(1, 2, 2), False), (Layout(2, 2, 4), False)],
    ids=str,
)
def test_training_equals_a_single_process_with_the_same_rule(
    layout: Layout, recomputed: bool, rule: str
) -> None:
    for differences, choices in pool(layout.world).run(_forced, layout, rule, recomputed):
        error, name = worst(differences)
        assert error <= 1e-10, name
        for counts in choices:
            assert sum(counts) == 2 * 7 * 2 * layout.dp  # rows, tokens, choices
            assert rule == "skewed" or max(counts) - min(counts) <= 1


def test_the_choice_goes_back_to_the_router() -> None:
    model = parallel(TINY.model(), px.init_mesh())
    own = batches(TINY, 1)[1][0]
    losses = []
    for rule in (None, "balanced", "skewed", None):
        px.force_routing(model, rule)
        losses.append(model(**own).loss.item())
        assert copy.deepcopy(model)(**own).loss.item() == losses[-1]
    assert losses[0] == losses[3]
    assert len({*losses}) == 3


def _model() -> Any:
    return parallel(TINY.model(), Layout(1, 2, 2).mesh())


def _compared() -> None:
    model = _model()
    px.force_routing(model, "balanced")
    px.check_gradients(model, batches(TINY, 1)[1][0])


MISUSES = {
    "a rule that is not known": (
        lambda: px.force_routing(_model(), "even"),
        "rule is 'even'; pass one of ['balanced', 'skewed'] or None",
    ),
    "a model without experts": (
        lambda: px.force_routing(parallel(Tiny().model(), mesh_of(tp=2)), "skewed"),
        "force_routing: LlamaForCausalLM has no experts",
    ),
    "unequal rules": (
        lambda: px.force_routing(_model(), ("balanced", None)[mesh_of().tp_rank]),
        "rank 0: force_routing('balanced'); rank 1: force_routing(None)",
    ),
    "a comparison with one process": (_compared, "call px.force_routing(model, None) first"),
}


def _misused(case: str) -> None:
    MISUSES[case][0]()


@pytest.mark.parametrize("case", MISUSES)
def test_misuse_is_one_error_on_all_ranks(case: str) -> None:
    pool(2).assert_raises(_misused, case, words=MISUSES[case][1])
