"""Compiled embeddings, heads and losses on several ranks equal the eager ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import pool
from reference import difference, mesh_of
from reference_ops import aten_path
from torch.nn import functional

from parallel_ext.ops import (
    Group,
    LossOptions,
    column_linear,
    linear_vocab_cross_entropy,
    vocab_cross_entropy,
    vocab_cross_entropy_statistics,
    vocab_embedding,
)
from parallel_ext.ops.group import Range
from parallel_ext.sharding.layout import split

VOCAB_SIZE = 7
IDS, LABELS = torch.tensor([0, 6, 6, 2, 5]), torch.tensor([6, 6, -100, 0, 3])
Model = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_torch(table: torch.Tensor, inner: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    hidden = functional.embedding(IDS, table).tanh() @ inner
    return functional.cross_entropy(hidden @ head.T, LABELS, label_smoothing=0.1)


def _two_ops(
    hidden: torch.Tensor, head: torch.Tensor, ids: Range, options: LossOptions, group: Group
) -> torch.Tensor:
    logits = column_linear(hidden, head, group=group)
    return vocab_cross_entropy(logits, LABELS, VOCAB_SIZE, ids, options, group=group)


def _statistics(
    hidden: torch.Tensor, head: torch.Tensor, ids: Range, options: LossOptions, group: Group
) -> torch.Tensor:
    logits = column_linear(hidden, head, group=group)
    return vocab_cross_entropy_statistics(
        logits, LABELS, VOCAB_SIZE, ids, options, entropy=True, group=group
    ).loss


def _fused(
    hidden: torch.Tensor, head: torch.Tensor, ids: Range, options: LossOptions, group: Group
) -> torch.Tensor:
    return linear_vocab_cross_entropy(hidden, head, LABELS, VOCAB_SIZE, ids, options, group=group)


LOSSES = {"two ops": _two_ops, "statistics": _statistics, "fused": _fused}


def _model(multiple_of: int, group: Group, loss: str) -> Model:
    ranges = split(VOCAB_SIZE, group.size, multiple_of)
    ids, sizes = ranges[group.rank], [stop - start for start, stop in ranges]

    def model(table: torch.Tensor, inner: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        embedded = vocab_embedding(IDS, table, VOCAB_SIZE, ids[0], sizes=sizes, group=group)
        hidden = embedded.tanh() @ inner
        return LOSSES[loss](hidden, head, ids, LossOptions(label_smoothing=0.1), group)

    return model


def _compiled(multiple_of: int, loss: str, aten: bool) -> tuple[list[float], bool]:
    """How far the compiled model is from torch's on whole tensors, and whether eager is equal."""
    generator = torch.Generator().manual_seed(1)
    shapes = (VOCAB_SIZE, 3), (3, 3), (VOCAB_SIZE, 3)
    whole = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    group = mesh_of().tp
    rows = slice(*split(VOCAB_SIZE, group.size, multiple_of)[group.rank])
    own = [whole[0][rows].clone(), whole[1], whole[2][rows].clone()]
    for each in (*whole, *own):
        each.requires_grad_()
    eager = _model(multiple_of, group, loss)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    results = []
    with aten_path(aten):
        for model, inputs in ((_of_torch, whole), (eager, own), (compiled, own)):
            value = model(*inputs)
            results.append([value.detach(), *torch.autograd.grad(value, inputs)])
    torch._dynamo.reset()
    theirs, ours, from_graph = results
    theirs = [theirs[0], theirs[1][rows], theirs[2], theirs[3][rows]]
    return list(map(difference, from_graph, theirs)), all(map(torch.equal, from_graph, ours))


@pytest.mark.parametrize(
    ("loss", "multiple_of", "aten"),
    [("two ops", 64, True), ("statistics", 1, False), ("fused", 64, False)],
)
def test_embedding_and_head_and_loss_in_one_graph_equal_eager_and_torch(
    loss: str, multiple_of: int, aten: bool
) -> None:
    """By a multiple of 64 one rank holds all 7 rows, and the other none."""
    for errors, as_eager in pool(2).run(_compiled, multiple_of, loss, aten):
        assert max(errors) <= 1e-10
        assert as_eager
