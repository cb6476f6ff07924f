"""CUDA kernels that draw tokens, whose source runs here on a CPU, one thread of a block after the
other. They make what the ops make there by their loops."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_threads import Mutant, call, of_type, placed
from reference_ops import ALL_DTYPES
from test_vocab_sample import FILTERS

from parallel_ext.ops import vocab_argmax, vocab_sample

FP64, INFINITY, NAN = torch.float64, float("inf"), float("nan")
SOURCE = "vocab/sample_cuda.cu"
DIGITS = 256

# The functions of vocab/sample_cuda.h by names without types.
EXPORTS = """
#define LOGITS(scalar_t) \\
  const scalar_t *logits, int64_t rows, int64_t size, int64_t stride, int64_t start, int64_t parts
#define OWN {logits, rows, size, stride, start, parts}
#define EXPORT(name, scalar_t, wide_t)                                                            \\
  extern "C" void argmax_##name(LOGITS(scalar_t), parallel_ext::Candidate* candidates) {          \\
    KERNELS::argmax_on_cuda(parallel_ext::LogitsOnCuda<scalar_t> OWN, candidates, 0);             \\
  }                                                                                               \\
  extern "C" void best_##name(const parallel_ext::Candidate* candidates, int64_t count,           \\
                              int64_t rows, int64_t only_finite, parallel_ext::Candidate* best,   \\
                              int64_t* ids) {                                                     \\
    KERNELS::best_on_cuda(candidates, count, rows, only_finite != 0, best, ids, 0);               \\
  }                                                                                               \\
  extern "C" void sums_##name(LOGITS(float), const parallel_ext::Candidate* max,                  \\
                              double temperature, double scale,                                   \\
                              const parallel_ext::DigitSearch* least,                             \\
                              const parallel_ext::DigitSearch* search, int64_t shift,             \\
                              int64_t* sums) {                                                    \\
    KERNELS::digit_sums_on_cuda(OWN, {max, temperature, scale, least, search, shift}, sums, 0);   \\
  }                                                                                               \\
  extern "C" void next_##name(const int64_t* sums, int64_t count, int64_t rows, int64_t first,    \\
                              int64_t top_k, double top_p, parallel_ext::DigitSearch* search) {   \\
    KERNELS::next_digit_on_cuda(sums, count, rows, {first != 0, top_k, top_p}, search, 0);        \\
  }                                                                                               \\
  extern "C" void draw_##name(LOGITS(float), double temperature,                                  \\
                              const parallel_ext::DigitSearch* lowest,                            \\
                              const parallel_ext::Candidate* max, double by_min_p, int64_t seed,  \\
                              int64_t step, parallel_ext::Candidate* candidates) {                \\
    KERNELS::draw_on_cuda(OWN, {temperature, lowest, max, by_min_p, uint64_t(seed),               \\
                          uint32_t(step)}, candidates, 0);                                        \\
  }
"""
Kernels = ctypes.CDLL | Mutant


class Shards:
    """Logits that are cut over ranks, each of which has `parts` blocks for a row."""

    def __init__(
        self, kernels: Kernels, logits: torch.Tensor, cuts: tuple[int, ...], parts: int
    ) -> None:
        self.kernels, self.rows = kernels, logits.shape[0]
        self.own, edges = [], [0, *cuts, logits.shape[1]]
        for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
            shard = placed(number, logits[:, start:stop], more=3)
            sizes = (self.rows, stop - start, shard.stride(0) if self.rows else 1)
            self.own.append((shard, *sizes, start, parts))
        self.parts = parts

    def pairs(self, *sizes: int) -> torch.Tensor:
        return torch.full((*sizes, self.rows, 2), -7)

    def best(self, parts: list[torch.Tensor], only_finite: bool) -> torch.Tensor:
        """The best of each rank's, then of all: each row's score, and its id behind that."""
        best, ids = self.pairs(len(parts)), torch.full((self.rows,), -7)
        for each, own in zip(parts, best, strict=True):
            call(self.kernels.best_float64, each, self.parts, self.rows, 0, own, None)
        own = self.pairs()
        args = (best, len(parts), self.rows, int(only_finite), own, ids)
        call(self.kernels.best_float64, *args)
        return torch.stack([own[:, 0], ids], 1)

    def largest(self, dtype: torch.dtype = FP64) -> torch.Tensor:
        parts = [self.pairs(self.parts) for _ in self.own]
        for (shard, *own), each in zip(self.own, parts, strict=True):
            logits = placed(1, shard.to(dtype), more=3)
            call(of_type(self.kernels, "argmax", dtype), logits, *own, each)
        return self.best(parts, only_finite=False)

    def order(
        self, digit: tuple[Any, ...], least: torch.Tensor | None, top_k: int, top_p: float
    ) -> torch.Tensor:
        search = self.pairs()
        for shift in (24, 16, 8, 0):
            sums = torch.zeros(len(self.own), self.rows, DIGITS, dtype=torch.int64)
            for own, each in zip(self.own, sums, strict=True):
                call(self.kernels.sums_float64, *own, *digit, least, search, shift, each)
            first = int(shift == 24)
            args = (sums, len(self.own), self.rows, first, top_k, top_p, search)
            call(self.kernels.next_float64, *args)
        return search

    def draw(
        self,
        seed: int,
        step: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> torch.Tensor:
        """What vocab_sample_by_kernels of vocab/sample_on_cuda.cpp does."""
        vocab_size = sum(own[2] for own in self.own)
        scale = 2.0 ** (61 - math.ceil(math.log2(vocab_size)))
        max, lowest = self.largest(), None
        if 0 < top_k < vocab_size:
            lowest = self.order((None, temperature, scale), None, top_k, 1.0)
        if top_p < 1:
            lowest = self.order((max, temperature, scale), lowest, 0, top_p)
        below = (max, temperature * math.log(min_p)) if min_p > 0 else (None, 0.0)
        parts = [self.pairs(self.parts) for _ in self.own]
        for own, each in zip(self.own, parts, strict=True):
            call(self.kernels.draw_float64, *own, temperature, lowest, *below, seed, step, each)
        return self.best(parts, only_finite=True)[:, 1]


def _logits(rows: int, vocab_size: int) -> torch.Tensor:
    """Rows of which some have equal numbers, one only these, and the last not only finite ones."""
    logits = 3 * torch.randn(rows, vocab_size)
    logits[1:2] = logits[1:2].round()
    logits[2:3] = -0.0
    if rows > 5:
        logits[3, ::2] = -INFINITY
        logits[4, vocab_size // 2] = INFINITY
        logits[5, [0, -1]] = NAN
        logits[6] = -INFINITY
    return logits


# Vocabulary, rows, where the ranks' shards are cut, blocks of a row.
SHARDS = [
    *((1, 2, (), 1), (7, 7, (), 2), (7, 3, (3, 3), 1), (1031, 7, (), 3), (1031, 3, (1, 514), 2)),
    *((2500, 2, (), 1), (5, 0, (), 1)),
]


def _wrong_argmax(kernels: Kernels, dtype: torch.dtype) -> Iterator[str]:
    torch.manual_seed(0)
    for vocab_size, rows, cuts, parts in SHARDS:
        logits = _logits(rows, vocab_size).to(dtype)
        expected = vocab_argmax(logits, vocab_size, (0, vocab_size))
        ids = Shards(kernels, logits, cuts, parts).largest(dtype)[:, 1]
        if not torch.equal(ids, expected):
            yield f"argmax of {vocab_size} at {cuts}"


def _wrong_draws(kernels: Kernels, seeds: int = 1) -> Iterator[str]:
    torch.manual_seed(0)
    for vocab_size, rows, cuts, parts in SHARDS:
        logits = _logits(rows, vocab_size)
        shards = Shards(kernels, logits, cuts, parts)
        for name, options in FILTERS.items():
            for seed in range(seeds):
                own = {"seed": 2**62 + 3 + seed, "step": 2**32 - 1, **options}
                expected = vocab_sample(logits, vocab_size, (0, vocab_size), **own)
                if shards.draw(**own).tolist() != expected.tolist():
                    yield f"{name}, {vocab_size} at {cuts}"


def _wrong_sums(kernels: Kernels) -> Iterator[str]:
    """Against masses by torch, which differ in the last place of exp."""
    torch.manual_seed(0)
    logits, scale, temperature = 9 * torch.randn(3, 30001), 2.0**46, 1.7
    logits[0] = 4 + torch.rand(30001)  # of the same first digit: their sums are the largest
    order = logits.view(torch.int32).long()
    order = torch.where(order < 0, ~order & 0xFFFFFFFF, order + 2**31)
    shards = Shards(kernels, logits, (), 1)
    max, search = shards.largest(), shards.pairs()
    mass = ((logits.double() - logits.amax(1, keepdim=True)) / temperature).exp() * scale
    least, prefix = shards.pairs(), order[:, :1]
    least[:, 0] = order.double().quantile(0.3, 1).long()
    for shift in (24, 16, 8, 0):
        above = prefix >> (shift + 8)
        search[:, 0] = above.squeeze(1)
        counts = ((order >> (shift + 8)) == above) & (order >= least[:, :1])
        for name, of_max, values in [
            ("masses", max, (mass + 0.5).floor().long()),
            ("counts", None, torch.ones_like(order)),
        ]:
            sums, expected = torch.zeros(2, 3, DIGITS, dtype=torch.int64)
            digit = (order >> shift) & (DIGITS - 1)
            expected.scatter_add_(1, digit, values.masked_fill(~counts, 0))
            args = (of_max, temperature, scale, least, search, shift, sums)
            call(kernels.sums_float64, *shards.own[0], *args)
            allowed = 0 if of_max is None else expected * 2.0**-40 + 2
            if ((sums - expected).abs() > allowed).any():
                yield f"{name} of the digit at {shift}"


@ALL_DTYPES
def test_argmax_is_that_of_the_op(kernels, dtype):
    assert [*_wrong_argmax(kernels, dtype)] == []
    assert kernels.take_failed_checks() == 0


def test_sums_are_those_of_the_masses(kernels):
    assert [*_wrong_sums(kernels)] == []
    assert kernels.take_failed_checks() == 0


def test_draws_are_those_of_the_op(kernels):
    assert [*_wrong_draws(kernels, seeds=2)] == []
    assert kernels.take_failed_checks() == 0


def _wrong(kernels: Kernels) -> Iterator[str]:
    yield from _wrong_argmax(kernels, FP64)
    yield from _wrong_draws(kernels)
    yield from _wrong_sums(kernels)


MUTATIONS = {
    "the last of equal ones": ("id < best.id", "id > best.id"),
    "NaN is no more than others": ("nan != best_nan ? nan : ", ""),
    "threads that tell it too early": (
        "    __syncthreads();\n    if (threadIdx.x < half)",
        "if (1)",
    ),
    "numbers forgotten": ("first += kAtOnce * kBlockThreads", "first += 8 * kBlockThreads"),
    "ids of what is not finite": ("only_finite && !finite ? -1 :", ""),
    "lower orders than the least": (" || order < least)", ")"),
    "a piece of the masses too few": (
        "i < kPieces; ++i) {\n          uint32_t*",
        "i < 1; ++i) {\n          uint32_t*",
    ),
    "copies that are not added": ("copy < kCopies; ++copy", "copy < 1; ++copy"),
    "rounds that overflow": ("(32 - kPieceBits);", "(34 - kPieceBits);"),
    "digits of one rank": ("rank < count; ++rank", "rank < 1; ++rank"),
    "all of the share": ("std::min(std::max<int64_t>(part, 1), total)", "total"),
    "pairs that start with the shard": (
        "pair = start / 2 + number",
        "pair = (start + 1) / 2 + number",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert next(_wrong(mutants[mutation]), None) is not None
