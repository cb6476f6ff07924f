"""The cross entropy that owns its logits: backward writes their gradient over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_loss import OPTIONS_ON_RANKS, labels_of, options_named
from reference_memory import allocated
from reference_ops import BOTH_PATHS, TOLERANCE, aten_path, on_ranks, own_range

from parallel_ext import release_workspaces
from parallel_ext.ops import Group, LossOptions, vocab_cross_entropy


def _are_equal(group: Group, name: str) -> dict[str, bool]:
    return {
        f"{dtype}, V={vocab_size}": torch.equal(*_gradients(group, name, vocab_size, dtype, stride))
        for dtype in TOLERANCE
        for vocab_size, stride in ((1, 0), (5, 0), (65, 3), (9001, 0))
    }


def _gradients(
    group: Group, name: str, vocab_size: int, dtype: torch.dtype, stride: int
) -> list[torch.Tensor]:
    """Of the factor that makes the logits, without and with ``consume_logits``."""
    options = {**options_named(name, vocab_size), "reduction": "none"}
    labels, (start, stop) = labels_of(vocab_size), own_range(vocab_size, group)
    values = 3 * torch.randn(len(labels), vocab_size + stride)[:, start : stop + stride]
    found = []
    for consume in (False, True):
        factor = values.to(dtype).requires_grad_()
        loss = vocab_cross_entropy(
            (2 * factor)[:, : stop - start],
            labels,
            vocab_size,
            (start, stop),
            consume_logits=consume,
            group=group,
            options=LossOptions(**options),
        )
        loss.backward(torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view_as(loss))
        found.append(factor.grad)
    return found


@OPTIONS_ON_RANKS
def test_each_option_has_the_same_bits_as_the_form_that_keeps_its_logits(name, size, aten):
    for found in on_ranks(size, _are_equal, name, aten=aten):
        assert all(found.values()), found


def _logits_and_loss(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(4, 7, requires_grad=True) * 2
    labels = torch.tensor([0, 3, 6, -100])
    return logits, vocab_cross_entropy(
        logits, labels, 7, (0, 7), LossOptions(**options), consume_logits=True
    )


def test_the_gradient_lies_where_the_logits_were():
    logits, loss = _logits_and_loss()
    loss.backward()
    with torch.no_grad():
        assert logits.sum(1).abs().max() < 1e-6  # a softmax less a one
        assert torch.equal(logits[3], torch.zeros(7))


def test_logits_are_kept_without_a_backward():
    logits, _ = _logits_and_loss()
    kept = logits.detach().clone()
    with torch.no_grad():
        vocab_cross_entropy(logits, torch.zeros(4).long(), 7, (0, 7), consume_logits=True)
    assert torch.equal(logits, kept)


def test_a_second_backward_says_why_not():
    _, loss = _logits_and_loss()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="consume_logits=True allows, so it cannot run again"):
        loss.backward()


def test_another_user_of_the_logits_gets_torchs_error_for_tensors_modified_in_place():
    logits, loss = _logits_and_loss()
    other = logits.exp().sum() + logits.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize(
    "of", [lambda leaf: leaf, lambda leaf: leaf.view(4, 7), lambda leaf: leaf[:, :7]]
)
def test_a_leaf_or_a_view_of_one_is_refused_which_the_user_keeps(of):
    logits = of(torch.randn(4, 7, requires_grad=True))
    with pytest.raises(ValueError, match="would write a gradient over a leaf"):
        vocab_cross_entropy(logits, torch.zeros(4).long(), 7, (0, 7), consume_logits=True)


@pytest.mark.parametrize(
    "shape", [lambda x: x.T.contiguous().T, lambda x: x[:1].expand(4, 7)], ids=["columns", "rows"]
)
def test_logits_that_no_gradient_fits_over_are_refused(shape):
    logits = shape(torch.randn(4, 7, requires_grad=True) * 2)
    with pytest.raises(ValueError, match="columns one apart and rows that do not overlap"):
        vocab_cross_entropy(logits, torch.zeros(4).long(), 7, (0, 7), consume_logits=True)


def test_memory_is_only_what_a_token_has():
    logits = torch.randn(4096, 1024, requires_grad=True) * 1
    labels = torch.zeros(4096, dtype=torch.int64)

    def backward() -> None:
        loss = vocab_cross_entropy(logits, labels, 1024, (0, 1024), consume_logits=True)
        torch.autograd.grad(loss, logits)

    release_workspaces()
    assert allocated(backward) < 1  # of logits of 16 MiB


@BOTH_PATHS
def test_compiled_it_equals_eager(aten):
    labels = labels_of(7)

    def loss_of(factor: torch.Tensor) -> torch.Tensor:
        return 3 * vocab_cross_entropy(2 * factor, labels, 7, (0, 7), consume_logits=True)

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    factor = torch.randn(len(labels), 7, requires_grad=True)
    results = []
    with aten_path(aten):
        for function in (loss_of, compiled):
            loss = function(factor)
            results.append((loss, *torch.autograd.grad(loss, factor)))
    assert all(map(torch.equal, *results))


def test_a_second_derivative_is_refused_by_name():
    logits, loss = _logits_and_loss()
    with pytest.raises(NotImplementedError, match="^vocab_cross_entropy: second derivatives"):
        torch.autograd.grad(loss, logits, create_graph=True)
