"""A mixture's router: on the CPU the bits of torch's operations, of equal scores the lower id."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    BOTH_PATHS,
    TOLERANCE,
    aten_path,
    data_bytes,
    grad_outputs,
    relative_error,
    threads,
)

from parallel_ext.ops import moe_router

FP64 = torch.float64
Weighted = tuple[torch.Tensor, torch.Tensor]


def top_k_lowest(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """The ids of the largest scores, the largest first: of equal ones argmax finds the first."""
    left, chosen = scores.detach().clone(), []
    for _ in range(top_k):
        chosen.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, chosen[-1], float("-inf"))
    return torch.cat(chosen, -1)


def _plain(
    logits: torch.Tensor, top_k: int, normalized: bool, ids: torch.Tensor | None = None
) -> Weighted:
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = torch.nn.functional.softmax(logits, dim=-1, dtype=wide)
    ids = top_k_lowest(probabilities, top_k) if ids is None else ids
    weights = probabilities.gather(-1, ids)
    return weights / weights.sum(dim=-1, keepdim=True) if normalized else weights, ids


def _last_of_equals(logits: torch.Tensor, top_k: int, normalized: bool, ids=None) -> Weighted:
    if ids is None:
        ids = logits.size(1) - 1 - top_k_lowest(logits.double().softmax(-1).flip(-1), top_k)
    return _plain(logits, top_k, normalized, ids)


def _in_ascending_order(logits: torch.Tensor, top_k: int, normalized: bool, ids=None) -> Weighted:
    weights, ids = _plain(logits, top_k, normalized, ids)
    return weights.flip(-1), ids.flip(-1)


def _sum_as_a_constant(logits: torch.Tensor, top_k: int, normalized: bool, ids=None) -> Weighted:
    weights, ids = _plain(logits, top_k, False, ids)
    return weights / weights.sum(-1, keepdim=True).detach() if normalized else weights, ids


def _with_gradient(
    function: Callable[..., Weighted], logits: torch.Tensor, grad: torch.Tensor, *args
) -> list[torch.Tensor]:
    leaf = logits.detach().requires_grad_()
    weights, ids = function(leaf, grad.size(1), *args)
    (gradient,) = torch.autograd.grad(weights, leaf, grad.to(weights.dtype))
    return [weights.detach(), ids, gradient]


def _logits(tokens: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of which some are equal in their row, and rows with numbers that are none."""
    logits = (3 * torch.randn(tokens, num_experts, dtype=FP64)).to(dtype)
    logits[1::4] = logits[1::4].round()
    logits[2::16] = 0
    for row, value in enumerate(("nan", "inf", "-inf", "-1e4")):
        logits[5 + row :: 32, row % num_experts] = float(value)
    logits[9::32] = float("-inf")
    logits[10::32, 1:] = float("-inf")
    return logits


SIZES = [  # tokens, experts, top_k
    *((7, 2, 1), (7, 2, 2), (33, 3, 2), (64, 8, 2), (100, 8, 8), (50, 13, 4), (1, 5, 3)),
    *((1000, 60, 4), (129, 64, 6), (40, 64, 5), (300, 128, 7), (1000, 128, 8), (37, 128, 1)),
    *((0, 8, 2), (17, 1, 1), (20, 257, 19)),
]


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and data_bytes(ours) == data_bytes(theirs)


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether finite rows are equal but for the last bits."""
    rows = theirs.isfinite().all(1)
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(ours.dtype, TOLERANCE[ours.dtype])
    return torch.allclose(ours[rows], theirs[rows], rtol=bound, atol=bound)  # some are zeros


def _differences(
    function: Callable[..., Weighted], dtype: torch.dtype, same_gradient: Any = _same_bits
) -> list[str]:
    """The calls with other bits than the plain formula's."""
    torch.manual_seed(0)
    found = []
    for tokens, num_experts, top_k in SIZES:
        logits = _logits(tokens, num_experts, dtype)
        forced = torch.randint(num_experts, (top_k, tokens)).T  # some twice
        for normalized, ids in product((True, False), (None, forced)):
            for name, grad in grad_outputs((tokens, top_k), dtype).items():
                expected = _with_gradient(_plain, logits, grad, normalized, ids)
                actual = _with_gradient(function, logits, grad, normalized, ids)
                same = [*map(_same_bits, actual[:2], expected[:2])]
                same += [same_gradient(actual[2], expected[2])]
                if not all(same):
                    given = "chosen" if ids is None else "given"
                    sizes = f"{tokens} x {num_experts}, {top_k} {given}"
                    found.append(f"{sizes}, normalized {normalized}, {name}: {same}")
    return found


@ALL_DTYPES
def test_the_bits_are_those_of_the_plain_formula(dtype):
    with threads(1):
        assert _differences(moe_router, dtype) == []


@ALL_DTYPES
def test_without_our_loops_gradients_may_differ_in_their_last_bits(dtype):
    with aten_path(True):
        assert _differences(moe_router, dtype, _near) == []


@pytest.mark.parametrize("broken", [_last_of_equals, _in_ascending_order, _sum_as_a_constant])
def test_the_comparison_notices_another_formula(broken):
    assert _differences(broken, torch.float32) != []
    assert _differences(broken, torch.float32, _near) != []


@BOTH_PATHS
@ALL_DTYPES
def test_it_is_computed_in_fp32_or_wider(dtype, aten):
    torch.manual_seed(0)
    logits, grad = torch.randn(70, 24, dtype=FP64).to(dtype), torch.randn(70, 3)
    expected = _with_gradient(_plain, logits.double(), grad, True)
    with aten_path(aten):
        weights, ids, gradient = _with_gradient(moe_router, logits, grad, True)
    wide = torch.promote_types(dtype, torch.float32)
    assert (weights.dtype, ids.dtype, gradient.dtype) == (wide, torch.int64, dtype)
    assert torch.equal(ids, expected[1])
    assert relative_error(weights, expected[0]) <= TOLERANCE[wide]
    one_rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, TOLERANCE[dtype])
    assert relative_error(gradient, expected[2]) <= one_rounding


@BOTH_PATHS
def test_of_equal_scores_the_lower_ids_are_chosen(aten):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6, [float("nan")] * 6])
    with aten_path(aten):
        assert moe_router(logits, 4)[1].tolist() == [[1, 3, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3]]


@BOTH_PATHS
def test_strided_logits_and_ids(aten):
    logits, grad = torch.randn(9, 12)[:, ::2].T, torch.randn(6, 2)
    ids = torch.randint(9, (6, 4))[:, ::2]
    for given in (None, ids):
        expected = _with_gradient(_plain, logits, grad, True, given)
        with aten_path(aten):
            actual = _with_gradient(moe_router, logits, grad, True, given)
        assert torch.equal(actual[1], expected[1])
        for ours, theirs in zip(actual, expected, strict=True):
            assert relative_error(ours, theirs) <= TOLERANCE[torch.float32]


def test_given_ids_are_copied():
    given = torch.tensor([[1, 0]])
    ids = moe_router(torch.randn(1, 3), 2, expert_ids=given)[1]
    given.zero_()
    assert ids.tolist() == [[1, 0]]


@pytest.mark.parametrize(("tokens", "num_experts"), [(3000, 60), (2, 13), (1, 13), (300, 128)])
def test_the_bits_do_not_depend_on_the_threads(tokens, num_experts):
    """Those of torch do in backward, for 13 or 60 experts."""
    logits, grad = torch.randn(tokens, num_experts), torch.randn(tokens, 4)
    found = set()
    for count in (1, 2, 3):
        with threads(count):
            results = _with_gradient(moe_router, logits, grad, True)
        found.add(b"".join(map(data_bytes, results)))
    assert len(found) == 1
