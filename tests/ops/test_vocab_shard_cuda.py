"""CUDA kernels of the cross entropy, whose source runs here on a CPU, one thread of a block after
the other. They make what the op makes there, by its loops and by ATen calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cuda_threads import Mutant, call, of_type, placed
from reference_loss import IGNORED, special_logits
from reference_ops import ALL_DTYPES, TOLERANCE, aten_path, relative_error

FP64 = torch.float64
OPS = torch.ops.parallel_ext

SOURCE = "vocab/shard_cuda.cu"

# The functions of vocab/shard_cuda.h by names without types.
EXPORTS = """
#define EXPORT(name, scalar_t, wide_t)                                                            \\
  static parallel_ext::ShardOnCuda<scalar_t> shard_##name(                                        \\
      const scalar_t* logits, const int64_t* labels, const wide_t* weight, int64_t num_tokens,    \\
      int64_t size, int64_t stride, int64_t vocab_start, double scale, double cap) {              \\
    return {logits, labels,      weight,         num_tokens, size, stride, vocab_start,           \\
            wide_t(scale), wide_t(cap)};                                                          \\
  }                                                                                               \\
  extern "C" void record_##name(const scalar_t* logits, const int64_t* labels,                    \\
                                const wide_t* weight, int64_t num_tokens, int64_t size,           \\
                                int64_t stride, int64_t vocab_start, double scale, double cap,    \\
                                int64_t smooth, int64_t moment, int64_t id, wide_t* record) {     \\
    KERNELS::vocab_stats_on_cuda(                                                            \\
        shard_##name(logits, labels, weight, num_tokens, size, stride, vocab_start, scale, cap),  \\
        parallel_ext::StatsRows(smooth, moment, id), record, 0);                                 \\
  }                                                                                               \\
  extern "C" void gradient_##name(const scalar_t* logits, const int64_t* labels,                  \\
                                  const wide_t* weight, int64_t num_tokens, int64_t size,         \\
                                  int64_t stride, int64_t vocab_start, double scale, double cap,  \\
                                  const wide_t* normalizer, const wide_t* factors,                \\
                                  scalar_t* grad_logits, int64_t grad_stride) {                   \\
    KERNELS::vocab_gradient_on_cuda(                                                         \\
        shard_##name(logits, labels, weight, num_tokens, size, stride, vocab_start, scale, cap),  \\
        normalizer, factors, grad_logits, grad_stride, 0);                                        \\
  }
"""


Kernels = ctypes.CDLL | Mutant

# Each yields what it compared, and whether it was right.
Compared = Iterator[tuple[str, bool]]


class Case(NamedTuple):
    """A shard of logits and what is asked of it."""

    name: str
    logits: torch.Tensor  # [T, size]
    labels: torch.Tensor
    vocab_size: int
    vocab_start: int = 0
    weight: torch.Tensor | None = None  # [vocab_size]
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    statistics: bool = True  # entropy and arg-max
    grad_offset: int = 0  # of the gradient, behind an address that all packs fit
    grad_more: int = 0  # of its rows, how much further apart than they are long

    @property
    def vocab_stop(self) -> int:
        return self.vocab_start + self.logits.size(1)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.logits.dtype, torch.float32)

    def options(self) -> list[Any]:
        """The last arguments of the ops."""
        ids = [self.vocab_size, self.vocab_start, self.vocab_stop]
        numbers = [self.smoothing, self.z_loss, self.softcap, self.scale]
        return [self.weight, *ids, IGNORED, "none", *numbers]

    def shard(self) -> list[Any]:
        """The arguments that both kernels begin with. The caller holds on to the tensors."""
        own = self.weight
        if own is not None:
            own = own[self.vocab_start : self.vocab_stop].to(self.wide).contiguous()
        sizes = [*self.logits.shape, self.logits.stride(0), self.vocab_start]
        return [self.logits, self.labels, own, *sizes, self.scale, self.softcap or 0.0]


def _labels(num_tokens: int, vocab_size: int) -> torch.Tensor:
    """Of every shard and no shard, both ends of the vocabulary among them."""
    labels = torch.randint(0, vocab_size, (num_tokens,))
    ends = torch.tensor([0, vocab_size - 1, IGNORED])[:num_tokens]
    labels[: len(ends)] = ends
    return labels


def _plain_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Rows of all lengths and places. The maximum comes first, last and in the middle."""
    for tokens, size, offset, more, grad in [
        *((0, 5, 0, 0, (0, 0)), (3, 0, 0, 0, (0, 0)), (5, 1, 0, 0, (0, 0)), (3, 2, 1, 0, (1, 0))),
        *((5, 7, 3, 0, (3, 0)), (5, 9, 0, 0, (0, 0)), (4, 16, 0, 0, (0, 0)), (4, 37, 5, 4, (5, 4))),
        *((4, 41, 1, 0, (0, 0)), (3, 64, 0, 1, (0, 0)), (4, 523, 0, 0, (0, 0))),
        *((3, 1200, 7, 9, (7, 9)), (3, 1200, 2, 8, (2, 16))),
    ]:
        logits = 5 * torch.randn(tokens, size, dtype=FP64)
        for row, peak in enumerate((0, size - 1, size // 2)):
            if row < tokens and size > 0:
                logits[row, peak] += 100
        yield Case(
            f"{tokens} x {size} + {offset}, {more} apart, gradient {grad}",
            placed(offset, logits.to(dtype), more),
            _labels(tokens, 3 * size + 9),
            *(3 * size + 9, size + 4),
            grad_offset=grad[0],
            grad_more=grad[1],
        )


def _option_cases(dtype: torch.dtype) -> Iterator[Case]:
    size, vocab_size = 83, 100
    weight = torch.arange(vocab_size, dtype=FP64).add(2).remainder(5) * 0.7
    options: list[dict[str, Any]] = [
        {"smoothing": 0.1},
        {"weight": weight},
        {"weight": weight, "smoothing": 0.3},
        {"z_loss": 0.01, "statistics": False},
        {"softcap": 5.0},
        {"scale": -0.3},
        {"weight": weight, "smoothing": 0.2, "z_loss": 0.01, "softcap": 4.0, "scale": 1.7},
    ]
    for each in options:
        logits = placed(3, (3 * torch.randn(5, size, dtype=FP64)).to(dtype), 2)
        yield Case(f"{sorted(each)}", logits, _labels(5, vocab_size), vocab_size, 9, **each)
        # In one place after the other the maximum rises far above what came before.
        steps = logits.clone()
        steps[:, ::7] = (
            torch.arange(0, size, 7).mul(-4 if each.get("scale", 1) < 0 else 4).to(dtype)
        )
        yield Case(f"{sorted(each)} rising", steps, _labels(5, vocab_size), vocab_size, 9, **each)


def _special_cases(dtype: torch.dtype) -> Iterator[Case]:
    logits, labels = special_logits(dtype)
    wide = torch.cat([logits, torch.full((len(logits), 40), -torch.inf, dtype=dtype)], 1)
    ties = torch.zeros(6, 200, dtype=dtype)
    ties[0, [3, 70, 150]] = 1
    ties[1] = -torch.inf
    ties[2, 150:] = -torch.inf
    ties[3, [60, 190]] = torch.nan
    ties[4, [60, 61, 190]] = torch.inf
    ties[5, 17:] = torch.nan
    for each in ({}, {"smoothing": 0.1}, {"softcap": 3.0}):
        yield Case(f"special, {sorted(each)}", logits, labels, 10, **each)
        yield Case(f"-inf behind, {sorted(each)}", wide, labels, 50, **each)
        yield Case(f"ties, {sorted(each)}", ties, _labels(6, 200), 200, **each)


def _forward(case: Case) -> list[torch.Tensor]:
    """What the op makes of each token: loss, log-sum-exp, entropy, arg-max and normalizer."""
    return OPS.vocab_cross_entropy_forward(
        *(case.logits, case.labels, [True, case.statistics, case.statistics], 1, ""),
        *case.options(),
    )


def _record(kernels: Kernels, case: Case) -> dict[str, torch.Tensor]:
    """The record that the kernel makes, in fp64."""
    names = ["max", "sum", "target"]
    names += ["smooth", "weight"] if case.smoothing > 0 else []
    names += ["moment", "id"] if case.statistics else []
    record = torch.full((len(names) + 1, len(case.labels)), 77.0, dtype=case.wide)
    asked = [int(case.smoothing > 0), *[int(case.statistics)] * 2]
    shard = case.shard()
    call(of_type(kernels, "record", case.logits.dtype), *shard, *asked, record)
    assert (record[-1] == 77).all(), f"{case.name}: written behind the record"
    rows = {name: row.double() for name, row in zip(names, record, strict=False)}
    if case.statistics:
        rows["id"] = record[len(names) - 1].view(torch.int64 if case.wide == FP64 else torch.int32)
    return rows


def _own(case: Case) -> torch.Tensor:
    return (case.vocab_start <= case.labels) & (case.labels < case.vocab_stop)


def _records(kernels: Kernels, case: Case) -> Compared:
    """The loss and the statistics that follow from the record, by both paths of the op."""
    rows, again = _record(kernels, case), _record(kernels, case)
    for name, row in rows.items():
        yield (
            f"{case.name}: {name} again",
            torch.equal(row.nan_to_num(7), again[name].nan_to_num(7)),
        )
    log_sum = rows["sum"].log()
    ignored = case.labels == IGNORED
    per_class = torch.ones(case.vocab_size, dtype=FP64) if case.weight is None else case.weight
    log_sum_exp = rows["max"] + log_sum.masked_fill(rows["max"] == torch.inf, 0)
    loss = (rows["max"] - rows["target"]) + log_sum
    loss = per_class[case.labels.clamp(min=0)] * loss
    if case.smoothing > 0:
        smooth = rows["weight"] * log_sum - rows["smooth"]
        loss = (1 - case.smoothing) * loss + case.smoothing / case.vocab_size * smooth
    loss = loss + case.z_loss * log_sum_exp.square() if case.z_loss > 0 else loss
    for aten in (False, True):
        with aten_path(aten):
            expected = _forward(case)
        bound = TOLERANCE[case.wide]
        name = f"{case.name}, {'ATen' if aten else 'loops'}"
        yield f"{name}: max", relative_error(rows["max"], expected[4][0]) <= bound
        # Of nothing but -inf the log of the sum is -inf.
        yield f"{name}: log of sum", relative_error(log_sum.exp(), expected[4][1].exp()) <= bound
        yield f"{name}: loss", relative_error(loss.masked_fill(ignored, 0), expected[0]) <= bound
        yield f"{name}: log-sum-exp", relative_error(log_sum_exp, expected[1]) <= bound
        if case.statistics:
            entropy = log_sum - rows["moment"] / rows["sum"]
            # Of a sharp peak it is 0, the difference of numbers that are not.
            same = torch.allclose(entropy, expected[2].double(), bound, bound, equal_nan=True)
            yield f"{name}: entropy", same
            yield f"{name}: arg-max", torch.equal(rows["id"].long(), expected[3])


def _factors(case: Case, grads: list[torch.Tensor], normalizer: torch.Tensor) -> torch.Tensor:
    """Rows of GradientRows for gradients of loss, log-sum-exp and entropy."""
    grad_loss, grad_log_sum_exp, grad_entropy = grads
    normal = normalizer.double()
    per_class = torch.ones(case.vocab_size, dtype=FP64) if case.weight is None else case.weight
    grad_loss = grad_loss.masked_fill(case.labels == IGNORED, 0)
    label = grad_loss * per_class[case.labels.clamp(min=0)] * (1 - case.smoothing)
    column = grad_loss * case.smoothing / case.vocab_size
    log_sum_exp = normal[0] + normal[1]
    probability = label + column * per_class.sum() + grad_log_sum_exp
    probability = probability + (2 * case.z_loss * grad_loss * log_sum_exp).masked_fill(
        (grad_loss == 0) | (case.z_loss == 0), 0
    )
    if case.statistics:
        probability = probability - (grad_entropy * normal[2]).masked_fill(grad_entropy == 0, 0)
    return torch.stack([probability, column, label, -grad_entropy]).to(case.wide)


def _gradients(kernels: Kernels, case: Case) -> Compared:
    """Apart from the logits and in their place. The second token has no gradient."""
    grads = [2 * torch.rand(len(case.labels), dtype=FP64) - 1 for _ in range(3)]
    for grad in grads:
        grad[1:2] = 0
    if not case.statistics:
        grads[2].zero_()
    normalizer = _forward(case)[4].contiguous()
    factors = _factors(case, grads, normalizer).contiguous()
    dtype, size = case.logits.dtype, case.logits.size(1)
    apart = placed(case.grad_offset, torch.full_like(case.logits, 7), case.grad_more)
    in_place = placed(case.grad_offset, case.logits, case.grad_more)
    for at, made in (("apart", apart), ("in place", in_place)):
        shard = (case if at == "apart" else case._replace(logits=made)).shard()
        function = of_type(kernels, "gradient", dtype)
        call(function, *shard, normalizer, factors, made, made.stride(0))
    same = torch.equal(apart.nan_to_num(7), in_place.nan_to_num(7))
    yield f"{case.name}: in place", same
    if size > 0 and len(case.labels) > 1:
        yield f"{case.name}: zeros", torch.equal(apart[1], torch.zeros_like(apart[1]))
    bound = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, TOLERANCE[dtype])
    wide = [grad.to(case.wide) for grad in grads]
    for aten in (False, True):
        with aten_path(aten):
            expected = OPS.vocab_cross_entropy_backward(
                *(wide[0], wide[1], wide[2] if case.statistics else None, case.logits),
                *(case.labels, normalizer, *case.options()),
            )
        for row, (actual, right) in enumerate(zip(apart, expected, strict=True)):
            name = f"{case.name}, {'ATen' if aten else 'loops'}: gradient of {row}"
            yield name, relative_error(actual, right) <= bound


def _failures(kernels: Kernels, dtype: torch.dtype) -> Iterator[str]:
    torch.manual_seed(0)
    for case in (*_plain_cases(dtype), *_option_cases(dtype), *_special_cases(dtype)):
        for compare in (_records, _gradients):
            yield from (name for name, right in compare(kernels, case) if not right)
    if kernels.take_failed_checks() > 0:
        yield "a check, a barrier or a pack"


@ALL_DTYPES
def test_kernels_make_what_the_op_makes_on_a_cpu(kernels, dtype):
    assert [*_failures(kernels, dtype)] == []


def test_rows_may_lie_more_than_2_to_the_31_numbers_apart(kernels):
    stride, size = 2**31 + 3, 21
    room = torch.empty(stride + size, dtype=torch.bfloat16)  # of which hardly anything is touched
    near = torch.randn(2, size).bfloat16()
    results = []
    for logits in (room.as_strided([2, size], [stride, 1]).copy_(near), near):
        case = Case("far", logits, torch.tensor([3, 20]), size, smoothing=0.1)
        record = _record(kernels, case)
        factors, normalizer = torch.ones(4, 2), torch.zeros(2, 2)
        gradient = kernels.gradient_bfloat16
        call(gradient, *case.shard(), normalizer, factors, logits, logits.stride(0))
        results.append([*record.values(), logits])
    assert all(map(torch.equal, *results))


MUTATIONS = {
    "numbers behind the packs forgotten": ("tail + thread; column < columns", "tail; column < 0"),
    "the next pack too late": ("row + later)", "row + own)"),
    "no id of a NaN": ("if (rows.id >= 0) part.id = column + i;", ""),
    "no barrier between the halves": ("__syncthreads();\n      if", "if"),
    "another shard's rows": (
        "token * shard.stride;\n      for_row",
        "token * shard.size;\n      for_row",
    ),
    "a maximum that does not rise the base": ("(other.max > other.base)", "(false)"),
    "the last of equal numbers": (
        "z[i] == max ? column + i",
        "z[size - 1 - i] == max ? column + i",
    ),
    "0 log 0": ("x == kLowest<wide_t> ? 0 : exponential[i] * x", "exponential[i] * x"),
    "a row of zeros that is not": ("= factor.all_zero()", "= false"),
    "packs that lie otherwise": ("from_logits | from_stride", "0 * (from_logits | from_stride)"),
    "an empty shard's id": ("shard.size == 0 ? kLastId", "shard.size < 0 ? kLastId"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert next(_failures(mutants[mutation], FP64), None) is not None
