"""The norm of gradients of which some belong to no parallel model, on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import pool
from reference import Tiny, parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel_ext as px
from parallel_ext.training.gradients import total_norm


def _norm(differing: int | None, norm_type: float) -> float:
    mesh = px.init_mesh(tp=2, timeout=60)
    try:
        beside = [torch.tensor([3.0, 4.0 + (mesh.rank == differing)])]
        return total_norm({mesh: []}, beside, norm_type, False, "f").item()
    finally:
        mesh.close()


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
def test_equal_gradients_count_once(norm_type: float, expected: float) -> None:
    assert pool(4).run(_norm, None, norm_type) == [expected] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, math.inf])
def test_large_tensors_have_the_norm_of_torch(norm_type: float, dtype: torch.dtype) -> None:
    """Those that are converted in pieces, with strides too."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(257, 511, generator=generator, dtype=torch.float64).to(dtype)
    tensors = [large, large.t(), large[:, 1:], large[:5]]
    norm = total_norm({px.init_mesh(): []}, tensors, norm_type, False, "f")
    each = torch.stack([torch.linalg.vector_norm(t.double(), norm_type) for t in tensors])
    expected = torch.linalg.vector_norm(each, norm_type)
    assert norm.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm, expected.to(norm.dtype), rtol=1e-12, atol=0)


def test_all_ranks_of_a_grid_raise_where_one_holds_another_gradient() -> None:
    """Also those of the other dp rank, which would wait for the raising ones."""
    words = "is 4.0 on ranks 0, 2, 3 and 5.0 on rank 1; average these"
    pool(4).assert_raises(_norm, 1, math.inf, error="DisagreementError", words=words)


class _Wide(TorchDispatchMode):
    """Notes down every tensor in fp64 that has more numbers than there are gradients."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.sizes.append(tensor.numel())
        return output


def test_the_norm_makes_no_copy_of_a_gradient_in_fp64() -> None:
    """On a GPU such copies are many times the traffic of the norm."""
    model = parallel(Tiny(dtype=torch.bfloat16).model(), px.init_mesh())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    numel = sum(parameter.numel() for parameter in model.parameters())
    with _Wide() as wide:
        norm = px.clip_grad_norm_(model, 1e9)
    assert norm.item() == pytest.approx(numel**0.5)
    assert 0 < max(wide.sizes) <= len(list(model.parameters())) + 1
