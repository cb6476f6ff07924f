"""Hidden states enter a region without a copy, and their gradient is summed all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_ops import on_ranks

from parallel_ext.nn.region import entered
from parallel_ext.ops import Group


def _gradients(group: Group, unchanged: bool) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Whether there is no copy, and gradients of a function of which each rank has an addend."""
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    inside = entered(x, group, unchanged)
    (grad,) = torch.autograd.grad(
        (inside**3).sum() * (group.rank + 1), x, create_graph=True, retain_graph=True
    )
    (second,) = torch.autograd.grad(grad.sum(), x)
    return inside.data_ptr() == x.data_ptr(), grad.detach(), second


@pytest.mark.parametrize("unchanged", [False, True])
def test_the_gradient_is_summed_over_the_ranks(unchanged: bool) -> None:
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    for shares_memory, grad, second in on_ranks(2, _gradients, unchanged):
        assert shares_memory == unchanged
        torch.testing.assert_close(grad, (1 + 2) * 3 * x**2)
        torch.testing.assert_close(second, (1 + 2) * 6 * x)


class _Cut(torch.autograd.Function):
    """What lets no gradient through, as ops do whose outputs get none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def _cut(group: Group, unchanged: bool) -> bool:
    x = torch.ones(2, 3, requires_grad=True)
    _Cut.apply(entered(x, group, unchanged)).sum().backward()
    return x.grad is None


@pytest.mark.parametrize("unchanged", [False, True])
def test_no_gradient_stays_none(unchanged: bool) -> None:
    assert on_ranks(2, _cut, unchanged) == [True, True]


def _without_gradient(group: Group) -> list[bool]:
    x = torch.ones(2, 3)
    found = [entered(x, group) is x]
    x.requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found.append(entered(x, group) is x)
    return found


def test_there_is_no_copy_where_there_is_no_gradient() -> None:
    assert on_ranks(2, _without_gradient) == [[True] * 3] * 2


def _changed(group: Group, unchanged: bool) -> str:
    x = torch.ones(2, 3, requires_grad=True) * 1
    try:
        entered(x, group, unchanged).mul_(2)
    except RuntimeError as error:
        return str(error)
    return f"kept {bool((x == 1).all())}"


def test_a_change_in_place_is_refused_or_does_not_reach_the_input() -> None:
    assert on_ranks(2, _changed, False) == ["kept True"] * 2
    for error in on_ranks(2, _changed, True):
        assert "is a view and is being modified inplace" in error
