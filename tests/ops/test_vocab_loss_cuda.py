"""CUDA kernels of the loss's arithmetic on tokens, whose source runs here on a CPU. They make what
the ATen calls of the op make of the same partial statistics."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cuda_threads import Mutant, call, of_type
from reference_loss import IGNORED, special_logits
from reference_ops import TOLERANCE, aten_path

FP64 = torch.float64
OPS = torch.ops.parallel_ext

SOURCE = "vocab/loss_cuda.cu"

EXPORTS = """
#define EXPORT(name, scalar_t, wide_t)                                                           \\
  static parallel_ext::LossOnCuda loss_##name(                                                   \\
      const int64_t* labels, const double* weight, const double* totals, int64_t num_tokens,     \\
      int64_t vocab_size, double smoothing, double z_loss, int64_t reduction) {                  \\
    return {labels, weight,    totals, num_tokens, vocab_size,                                   \\
            -100,   smoothing, z_loss, reduction > 0, reduction > 1};                            \\
  }                                                                                              \\
  extern "C" void totals_##name(const int64_t* labels, const double* weight, double* totals,     \\
                                int64_t num_tokens, int64_t vocab_size, double smoothing,        \\
                                double z_loss, int64_t reduction) {                              \\
    KERNELS::loss_totals_on_cuda(loss_##name(labels, weight, totals, num_tokens, vocab_size,     \\
                                             smoothing, z_loss, reduction),                      \\
                                 totals, 0);                                                     \\
  }                                                                                              \\
  extern "C" void merge_##name(int64_t parts, int64_t num_tokens, int64_t smooth,                \\
                               int64_t statistics, const wide_t* all, wide_t* out) {             \\
    KERNELS::merge_stats_on_cuda(                                                                \\
        parts, num_tokens, parallel_ext::StatsRows(smooth, statistics, statistics), all, out, 0); \\
  }                                                                                              \\
  extern "C" void results_##name(const int64_t* labels, const double* weight, double* totals,    \\
                                 int64_t num_tokens, int64_t vocab_size, double smoothing,       \\
                                 double z_loss, int64_t reduction, int64_t parts,                \\
                                 int64_t statistics, const wide_t* all, wide_t* loss,            \\
                                 wide_t* log_sum_exp, wide_t* entropy, int64_t* id,              \\
                                 wide_t* normalizer, double* scratch) {                          \\
    KERNELS::loss_results_on_cuda(                                                               \\
        loss_##name(labels, weight, totals, num_tokens, vocab_size, smoothing, z_loss,            \\
                    reduction),                                                                  \\
        parts, parallel_ext::StatsRows(smoothing > 0, statistics, statistics), all,              \\
        parallel_ext::LossResults<wide_t>{loss, log_sum_exp, entropy, id, normalizer, scratch},  \\
        0);                                                                                      \\
  }                                                                                              \\
  extern "C" void factors_##name(const int64_t* labels, const double* weight, double* totals,    \\
                                 int64_t num_tokens, int64_t vocab_size, double smoothing,       \\
                                 double z_loss, int64_t reduction, const wide_t* loss,           \\
                                 int64_t stride, const wide_t* log_sum_exp,                      \\
                                 const wide_t* entropy, const wide_t* normalizer,                \\
                                 wide_t* factors) {                                              \\
    KERNELS::loss_factors_on_cuda<wide_t>(                                                       \\
        loss_##name(labels, weight, totals, num_tokens, vocab_size, smoothing, z_loss,            \\
                    reduction),                                                                  \\
        {{loss, stride}, {log_sum_exp, 1}, {entropy, 1}}, normalizer, factors, 0);               \\
  }
"""

DTYPES = [torch.float32, FP64]
BOTH = pytest.mark.parametrize("dtype", DTYPES, ids=str)


Kernels = ctypes.CDLL | Mutant


class Case(NamedTuple):
    """Logits in shards, and the options of their loss."""

    name: str
    logits: torch.Tensor  # [T, V]
    labels: torch.Tensor
    reduction: str
    weight: torch.Tensor | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    statistics: bool = True  # log-sum-exp, entropy and arg-max

    def tail(self, start: int, stop: int, reduction: str) -> list[Any]:
        ids = [self.logits.size(1), start, stop]
        return [self.weight, *ids, IGNORED, reduction, self.smoothing, self.z_loss, None, 1.0]


def _cases(dtype: torch.dtype) -> Iterator[Case]:
    torch.manual_seed(0)
    special, special_labels = special_logits(dtype)
    far = (special.abs() > 1e300).logical_and(special.isfinite()).any(1)  # apart: by inf in fp64
    special, special_labels = special[~far], special_labels[~far]
    for tokens, vocab_size in ((1, 5), (7, 40), (300, 33)):
        weight = torch.arange(vocab_size, dtype=FP64).add(2).remainder(5) * 0.7
        logits = (3 * torch.randn(tokens, vocab_size, dtype=FP64)).to(dtype)
        logits[:, vocab_size // 2] = logits.amax(1)  # a tie between shards
        labels = torch.randint(0, vocab_size, (tokens,))
        labels[2::5] = IGNORED
        for reduction in ("none", "sum", "mean"):
            for options in (
                {},
                {"statistics": False},
                {"weight": weight},
                {"smoothing": 0.1, "z_loss": 0.01},
                {"weight": weight, "smoothing": 0.3, "z_loss": 0.01},
            ):
                name = f"{tokens} x {vocab_size}, {reduction}, {sorted(options)}"
                yield Case(name, logits, labels, reduction, **options)
    for reduction in ("none", "mean"):
        for options in ({}, {"smoothing": 0.1}, {"z_loss": 0.01}):
            name = f"special, {reduction}, {sorted(options)}"
            yield Case(name, special, special_labels, reduction, **options)
            ignored = torch.full_like(special_labels, IGNORED)
            yield Case(f"{name}, all ignored", special, ignored, reduction, **options)
    nothing = torch.zeros(0, 5, dtype=dtype), torch.zeros(0, dtype=torch.int64)
    yield Case("no tokens", *nothing, "mean")
    weight, labels = torch.ones(special.size(1), dtype=FP64), torch.zeros_like(special_labels)
    weight[0] = 0
    options: dict[str, Any] = {"weight": weight, "smoothing": 0.1}
    yield Case("weights of 0", torch.zeros_like(special), labels, "mean", **options)


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    bound = TOLERANCE[expected.dtype if expected.is_floating_point() else FP64]
    return actual.shape == expected.shape and torch.allclose(
        actual.double(), expected.double(), bound, bound, equal_nan=True
    )


def _partial_stats(case: Case) -> torch.Tensor:
    """Those of three shards, one of them empty, [3, rows, T]: in rows that no op returns."""
    vocab_size = case.logits.size(1)
    parts = []
    for start, stop in (
        (0, vocab_size // 3),
        (vocab_size // 3,) * 2,
        (vocab_size // 3, vocab_size),
    ):
        z = case.logits[:, start:stop]
        empty = start == stop
        lowest = z.new_full((z.size(0),), -torch.inf)
        top = lowest if empty else z.amax(1)
        base = top.masked_fill(top == -torch.inf, 0)[:, None]
        own = (start <= case.labels) & (case.labels < stop)
        column = (case.labels - start).masked_fill(~own, 0)[:, None]
        target = 0 * lowest.masked_fill(lowest < 0, 0) if empty else z.gather(1, column)[:, 0]
        exponential = (z - base).exp()
        rows = [top, exponential.sum(1), target.masked_fill(~own, 0)]
        if case.smoothing > 0:
            weight = torch.ones(vocab_size, dtype=FP64) if case.weight is None else case.weight
            weight = weight[start:stop].to(z.dtype)
            rows += [((z - base) * weight).sum(1), weight.sum().expand(z.size(0))]
        if case.statistics:
            moment = (exponential * (z - base)).masked_fill(z - base == -torch.inf, 0)
            ids = lowest.long() if empty else z.argmax(1) + start
            ids = torch.full_like(ids, 0x7FFFFFFF) if empty else ids
            ids = ids.to(torch.int64 if z.dtype == FP64 else torch.int32)
            rows += [moment.sum(1), ids.view(z.dtype)]
        parts.append(torch.stack(rows))
    return torch.stack(parts)


def _compared(kernels: Kernels, case: Case) -> Iterator[tuple[str, bool]]:
    dtype, (tokens, vocab_size) = case.logits.dtype, case.logits.shape
    all_stats, is_sum = _partial_stats(case), case.reduction != "none"
    totals = torch.full((3,), 77.0, dtype=FP64)
    loss = [case.labels, case.weight, totals, tokens, vocab_size, case.smoothing, case.z_loss]
    loss += [("none", "sum", "mean").index(case.reduction)]
    call(of_type(kernels, "totals", dtype), *loss)
    wanted = case.statistics
    with aten_path(True):
        expected = OPS.vocab_cross_entropy_forward(
            *(case.logits, case.labels, [wanted] * 3, 1, ""),
            *case.tail(0, vocab_size, case.reduction),
        )
    merged = torch.full_like(all_stats[:1], 77)
    asked = [int(case.smoothing > 0), int(wanted)]
    call(of_type(kernels, "merge", dtype), 3, tokens, *asked, all_stats, merged)
    for name, stats in (("parts", all_stats), ("merged", merged)):
        scratch = torch.full((2, tokens), 77.0, dtype=FP64) if is_sum else None
        made = [torch.full_like(each, 77) for each in expected]
        given = [each if i == 0 or wanted else None for i, each in enumerate(made[:4])]
        results = [len(stats), int(wanted), stats, *given, made[4], scratch]
        call(of_type(kernels, "results", dtype), *loss, *results)
        for output, (actual, right) in enumerate(zip(made, expected, strict=True)):
            yield f"{case.name}, {name}: output {output}", _same(actual, right)
    # The factors show in the gradients of logits whose probabilities are 0 or known.
    normalizer = expected[4].contiguous()
    grads = [torch.randn(() if is_sum else (tokens,), dtype=dtype)]
    grads += [torch.randn(tokens, dtype=dtype), torch.randn(tokens, dtype=dtype)]
    if tokens > 1:
        grads[2][1] = 0
    for some in ([0], [1], [0, 1, 2] if wanted else [0, 1]):
        own = [grads[i] if i in some else None for i in range(3)]
        factors = torch.full((4, tokens), 77.0, dtype=dtype)
        stride = int(not is_sum)
        call(
            of_type(kernels, "factors", dtype), *loss, own[0], stride, *own[1:], normalizer, factors
        )
        with aten_path(True):
            gradient = OPS.vocab_cross_entropy_backward(
                *own,
                case.logits,
                case.labels,
                normalizer,
                *case.tail(0, vocab_size, case.reduction),
            )
        log_p = case.logits - normalizer[0][:, None] - normalizer[1][:, None]
        p, weight = log_p.exp(), torch.ones(vocab_size) if case.weight is None else case.weight
        p_log_p = (p * log_p).masked_fill(log_p == -torch.inf, 0)
        of_label = torch.arange(vocab_size) == case.labels[:, None]
        ours = p * factors[0][:, None]
        if 2 in some:
            ours = ours + p_log_p * factors[3][:, None]
        ours = ours - factors[1][:, None] * weight.to(dtype)
        ours = ours - factors[2][:, None] * of_label
        ours = ours.masked_fill((factors == 0).all(0)[:, None], 0)
        yield f"{case.name}: gradient by {some}", _same(ours, gradient)


def _failures(kernels: Kernels, dtype: torch.dtype) -> Iterator[str]:
    for case in _cases(dtype):
        yield from (name for name, right in _compared(kernels, case) if not right)
    if kernels.take_failed_checks() > 0:
        yield "a barrier"


@BOTH
def test_kernels_make_what_aten_makes(kernels, dtype):
    assert [*_failures(kernels, dtype)] == []


MUTATIONS = {
    "a token forgotten": ("token += step", "token += 2 * step"),
    "no barrier": ("    __syncthreads();\n    if", "    if"),
    "no NaN of weights": ("if (weight == 0) weight", "if (weight < 0) weight"),
    "a NaN that is passed": ("max > stats.max || max != max", "max > stats.max"),
    "0 * NaN": ("nothing ? 0 : std::exp(step)", "std::exp(step)"),
    "no common base": ("own * raised", "0 * raised"),
    "the highest id": ("id < stats.id ? id", "id > stats.id ? id"),
    "inf - inf": ("(stats.max == kInfinity ? 0 : log_sum)", "log_sum"),
    "z of ignored tokens": ("loss.z_loss > 0 && !ignored", "loss.z_loss > 0"),
    "another divisor": (
        "total(scratch, LossTotals::kWeight)",
        "total(scratch, LossTotals::kClasses)",
    ),
    "another token's gradient": ("token * grad.stride", "0 * grad.stride"),
    "not all classes": ("column * classes", "column"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert next(_failures(mutants[mutation], FP64), None) is not None
