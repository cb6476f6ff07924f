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
from parallel_ext.sharding.layout import TensorLayout
from parallel_ext.sharding.slices import take
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


def _norm_of_boxes(norm_type: float) -> float:
    """The norm of [0, 6) of which both ranks hold [4, 6), and each another box besides."""
    mesh = px.init_mesh(tp=2)
    held = tuple((((2 * rank, 2 * rank + 2),), ((4, 6),)) for rank in (0, 1))
    layout = TensorLayout("weight", (6,), 0, held)
    shard = take(torch.arange(6.0), layout, mesh.rank)
    return total_norm({mesh: [(shard, layout)]}, [], norm_type, False, "f").item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_of_a_shard_only_the_boxes_count_that_no_lower_rank_holds(norm_type: float) -> None:
    expected = torch.linalg.vector_norm(torch.arange(6.0), norm_type).item()
    assert pool(2).run(_norm_of_boxes, norm_type) == pytest.approx([expected] * 2)


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


def _with_gradients(invariant: px.Invariant | None = None) -> tuple[Any, dict[str, Any]]:
    """A parallel model with gradients of 2, and all functions that take their norm."""
    model = parallel(Tiny(layers=1).model(), px.init_mesh(), invariant=invariant)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    of_torch = torch.nn.utils
    return model, {
        "px": lambda *args: px.clip_grad_norm_(model, 6.0, *args),
        "torch": lambda *args: of_torch.clip_grad_norm_(model.parameters(), 6.0, *args),
        "total": lambda *args: of_torch.get_total_norm([p.grad for p in model.parameters()], *args),
    }


FUNCTIONS = pytest.mark.parametrize("function", ["px", "torch", "total"])


@FUNCTIONS
def test_a_norm_that_is_not_finite_is_refused_where_that_is_asked_for(function: str) -> None:
    model, functions = _with_gradients()
    model.lm_head.weight.grad[3, 5] = math.inf
    with pytest.raises(RuntimeError, match=r"order 2.0 is inf; pass error_if_nonfinite=False"):
        functions[function](2.0, True)
    assert all((parameter.grad >= 2).all() for parameter in model.parameters())
    assert functions[function](2.0, False) == math.inf


@FUNCTIONS
def test_a_norm_is_of_the_order_that_is_asked_for(function: str) -> None:
    numel = sum(parameter.numel() for parameter in _with_gradients()[0].parameters())
    for order, expected in ((1.0, 2 * numel), (math.inf, 2.0)):
        assert _with_gradients()[1][function](order).item() == pytest.approx(expected)
    for order in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="norm_type must be a positive number or inf"):
            _with_gradients()[1][function](order)


@FUNCTIONS
def test_an_invariant_norm_is_euclidean_or_the_largest_number(function: str) -> None:
    assert _with_gradients(px.Invariant(2))[1][function](math.inf).item() == 2.0
    with pytest.raises(ValueError, match="px.Invariant norm_type must be 2 or inf, got 1.0"):
        _with_gradients(px.Invariant(2))[1][function](1.0)
