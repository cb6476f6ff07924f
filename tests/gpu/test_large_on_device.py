"""Sizes whose number of elements does not fit into 32 bits."""

from __future__ import annotations

import pytest
import torch
from reference_ops import TOLERANCE, relative_error
from torch.nn import functional

from parallel_ext import ops

GIB = 2**30


@pytest.fixture(autouse=True)
def _room(cuda: torch.device) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < 24 * GIB:
        pytest.skip(f"takes 24 GiB of memory, and {free / GIB:.0f} are free")


def test_the_loss_of_more_than_2_to_the_31_logits(cuda: torch.device) -> None:
    tokens, vocab_size = 33000, 70000
    assert tokens * vocab_size > 2**31
    logits = torch.empty(tokens, vocab_size, dtype=torch.float16, device=cuda).normal_()
    labels = torch.randint(vocab_size, (tokens,), device=cuda)
    logits.requires_grad_()
    none = ops.LossOptions(reduction="none")
    loss = ops.vocab_cross_entropy(logits, labels, vocab_size, (0, vocab_size), none)
    (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    for rows in (slice(0, 3), slice(31000, 31003), slice(tokens - 3, tokens)):
        few = logits[rows].detach().double().requires_grad_()
        expected = functional.cross_entropy(few, labels[rows], reduction="none")
        (expected_grad,) = torch.autograd.grad(expected.sum(), few)
        assert relative_error(loss[rows], expected) <= TOLERANCE[torch.float16]
        assert relative_error(grad[rows], expected_grad) <= TOLERANCE[torch.float16]


def test_an_embedding_of_more_than_2_to_the_31_numbers(cuda: torch.device) -> None:
    rows, width = 530000, 4096
    assert rows * width > 2**31
    table = torch.zeros(rows, width, dtype=torch.bfloat16, device=cuda)
    ids = torch.tensor([0, 7, rows - 1, rows - 1, 525000], device=cuda)
    table[ids] = torch.randn(5, width, device=cuda).bfloat16()
    table.requires_grad_()
    output = ops.vocab_embedding(ids, table, rows, 0)
    assert torch.equal(output, table[ids])
    weights = torch.randint(-4, 5, (5, width), device=cuda).bfloat16()
    (grad,) = torch.autograd.grad(output, table, weights)
    assert torch.equal(grad[rows - 1], weights[2] + weights[3])
    assert torch.equal(grad[525000], weights[4])
    assert grad.count_nonzero() == grad[ids[[0, 1, 2, 4]]].count_nonzero()


def test_rows_of_experts_past_2_to_the_31_numbers(cuda: torch.device) -> None:
    tokens, width, num_experts = 300000, 4096, 8
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device=cuda).normal_()
    choices = torch.rand(tokens, num_experts, device=cuda).topk(2).indices
    weights = torch.full((tokens, 2), 0.5, device=cuda)
    route = ops.moe_route_plan(choices, [num_experts], 2 * tokens, 0)
    counts = route.counts.tolist()
    plan = ops.ExchangePlan.of([[*counts, *route.rows_per_rank.tolist()]], [num_experts], 0)
    rows, row_weights, origins = ops.moe_dispatch(hidden, weights, route, plan)
    assert rows.numel() > 2**31
    scaled = ops.moe_gated_silu(torch.cat([torch.full_like(rows, 20), rows], 1), row_weights)
    back = ops.moe_combine(scaled, origins, route, plan)
    expected = hidden[-4:].double() * 20  # silu(20) is 20 to rounding
    assert relative_error(back[-4:], expected) <= TOLERANCE[torch.bfloat16]
    assert relative_error(back[:4], hidden[:4].double() * 20) <= TOLERANCE[torch.bfloat16]
