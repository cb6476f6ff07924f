"""The share of a leaf in the load balancing loss under ``px.Invariant``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference_ops import threads

from parallel_ext import ops
from parallel_ext.nn.loss import BalanceOfLeaves

_ALONE = SimpleNamespace(dp_size=1, dp=ops.ALONE, device=torch.device("cpu"))


def _share(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one leaf that is the whole batch, and its gradient."""
    logits = logits.clone().requires_grad_()
    balance = BalanceOfLeaves(logits.size(1), top_k, _ALONE)
    balance.count([logits], None)
    balance.sum_over_dp()
    loss = balance.share([logits], None)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("num_experts", [8, 13, 60])
def test_the_bits_do_not_depend_on_the_threads(num_experts):
    """Those of torch's softmax do in backward, for 13 or 60 experts."""
    torch.manual_seed(0)
    logits, found = torch.randn(3000, num_experts), []
    for count in (1, 2, 4):
        with threads(count):
            found.append(_share(logits, 2))
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(gradient, found[0][1])


def test_of_one_leaf_it_is_the_formula_of_huggingface():
    torch.manual_seed(0)
    logits = torch.randn(50, 7, dtype=torch.float64)
    expected = logits.clone().requires_grad_()
    probabilities = expected.softmax(-1)
    chosen = torch.zeros(50, 7, dtype=torch.float64)
    chosen.scatter_(1, probabilities.topk(2, -1).indices, 1.0)
    formula = 7 * (chosen.mean(0) * probabilities.mean(0)).sum()
    formula.backward()
    loss, gradient = _share(logits, 2)
    torch.testing.assert_close(loss, formula.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected.grad, rtol=1e-9, atol=1e-15)
