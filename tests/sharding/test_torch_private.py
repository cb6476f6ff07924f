"""Private names of torch's autograd: each does what this package relies on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from parallel_ext.sharding._torch_private import at_end_of_backward, running_backward


def test_a_recomputation_runs_in_a_backward_and_each_backward_has_a_number() -> None:
    seen = []

    def recorded(x: torch.Tensor) -> torch.Tensor:
        seen.append(running_backward())
        return x.sin()

    for _ in range(2):
        checkpoint(
            recorded, torch.ones(3, requires_grad=True), use_reentrant=False
        ).sum().backward()
    first, in_backward, third, in_another = seen
    assert first == third == running_backward() == -1
    assert -1 < in_backward < in_another


def test_a_callback_runs_after_all_gradients_and_not_after_an_error() -> None:
    left, right = (torch.ones(3, requires_grad=True) for _ in range(2))
    found = []

    def begin(gradient: torch.Tensor) -> None:
        at_end_of_backward(lambda: found.append((left.grad, right.grad)))

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("broken")

    total = (left * 2 + right).sum()
    total.register_hook(begin)
    total.backward(retain_graph=True)
    assert [[each.tolist() for each in pair] for pair in found] == [[[2.0] * 3, [1.0] * 3]]
    left.register_hook(fail)
    with pytest.raises(ValueError, match="broken"):
        total.backward()
    assert len(found) == 1
    with pytest.raises(RuntimeError):
        at_end_of_backward(found.clear)
