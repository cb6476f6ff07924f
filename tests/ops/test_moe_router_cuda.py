"""CUDA kernels of a mixture's router, whose source runs here on a CPU, one thread of a block after
the other. They make what the op makes there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from cuda_threads import Mutant, call, of_type
from reference_ops import ALL_DTYPES, TOLERANCE, relative_error

from parallel_ext.ops import moe_router

FP64 = torch.float64
SOURCE = "moe/router_cuda.cu"

# The functions of moe/router_cuda.h by names without types.
EXPORTS = """
#define EXPORT(name, scalar_t, wide_t)                                                           \\
  extern "C" void route_##name(int64_t tokens, int64_t num_experts, int64_t top_k,               \\
                               int64_t normalized, const scalar_t* logits, const int64_t* given, \\
                               wide_t* weights, int64_t* ids) {                                  \\
    KERNELS::router_on_cuda({tokens, num_experts, top_k, normalized != 0}, logits, given,        \\
                            weights, ids, 0);                                                    \\
  }                                                                                              \\
  extern "C" void backward_##name(int64_t tokens, int64_t num_experts, int64_t top_k,            \\
                                  int64_t normalized, const wide_t* grad, const scalar_t* logits, \\
                                  const int64_t* ids, scalar_t* grad_logits) {                   \\
    KERNELS::router_backward_on_cuda({tokens, num_experts, top_k, normalized != 0}, grad,        \\
                                     logits, ids, grad_logits, 0);                               \\
  }
"""
Kernels = ctypes.CDLL | Mutant


def _logits(tokens: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of which the second has equal numbers, the third none but these, the last two NaN."""
    logits = (3 * torch.randn(tokens, num_experts, dtype=FP64)).to(dtype)
    logits[1:2] = logits[1:2].round()
    logits[2:3] = 0
    if tokens > 5:
        logits[-2, -1] = float("inf")
        logits[-1, 0] = float("nan")
    return logits


def _failures(kernels: Kernels, dtype: torch.dtype) -> Iterator[str]:
    """What differs from the op."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    allowed = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, TOLERANCE[dtype])
    for tokens, num_experts, top_k in [
        *((9, 8, 2), (7, 100, 8), (6, 33, 33), (3, 1, 1), (11, 70, 3), (0, 8, 2)),
    ]:
        logits = _logits(tokens, num_experts, dtype).requires_grad_()
        forced = torch.randint(num_experts, (tokens, top_k))  # some twice
        grad = torch.randn(tokens, top_k, dtype=wide)
        for normalized in (True, False):
            for given in (None, forced):
                weights, ids = moe_router(logits, top_k, normalized, given)
                (gradient,) = torch.autograd.grad(weights, logits, grad)
                sizes = (tokens, num_experts, top_k, int(normalized))
                name = f"{sizes}, {'chosen' if given is None else 'given'}"
                made = [torch.full_like(each, -7) for each in (weights, ids, gradient)]
                call(of_type(kernels, "route", dtype), *sizes, logits, given, *made[:2])
                if not torch.equal(made[1], ids):
                    yield f"ids of {name}"
                if relative_error(made[0], weights) > TOLERANCE[wide]:
                    yield f"weights of {name}"
                call(of_type(kernels, "backward", dtype), *sizes, grad, logits, ids, made[2])
                if relative_error(made[2], gradient) > allowed:
                    yield f"gradient of {name}"


@ALL_DTYPES
def test_kernels_make_what_the_op_makes_on_a_cpu(kernels, dtype):
    assert [*_failures(kernels, dtype)] == []
    assert kernels.take_failed_checks() == 0


@pytest.mark.parametrize("expert", [-1, 3, 2**40])
def test_an_expert_that_is_not_there_fails_a_check(kernels, expert):
    logits, given = torch.randn(1, 3, dtype=FP64), torch.tensor([[expert]])
    weights, ids = torch.full((1, 1), -7.0, dtype=FP64), torch.full((1, 1), -7)
    call(kernels.route_float64, 1, 3, 1, 1, logits, given, weights, ids)
    assert kernels.take_failed_checks() > 0
    assert (weights.item(), ids.item()) == (-7, -7)
    gradient = torch.full((1, 3), -7.0, dtype=FP64)
    call(kernels.backward_float64, 1, 3, 1, 1, weights, logits, given, gradient)
    assert kernels.take_failed_checks() > 0
    assert (gradient == -7).all()


MUTATIONS = {
    "the last of equal ones": ("&& id < other.id", "&& id > other.id"),
    "NaN is not chosen": ("probability == probability ? probability : 0", "probability"),
    "a choice twice": ("last.before(own) && own", "own"),
    "given ids are not read": ("{0, given[at]}", "{0, i}"),
    "a gradient without the mean": ("(grad[i] - mean) * scale", "grad[i] * scale"),
    "experts forgotten": (
        "sizes.num_experts; expert += kWarp",
        "sizes.num_experts; expert += 2 * kWarp",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert next(_failures(mutants[mutation], FP64), None) is not None
