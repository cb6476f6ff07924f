"""CUDA kernels of the embedding, whose source runs here on a CPU, one thread of a block after the
other. They make what the op makes there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from cuda_threads import (
    C_TYPES,
    Mutant,
    call,
    exports_of,
    kernels_on_cpu,
    mutants_on_cpu,
    of_type,
    placed,
)
from reference_ops import ALL_DTYPES

FP64 = torch.float64
OPS = torch.ops.parallel_ext
SOURCE = "vocab/embedding_cuda.cu"

# The functions of vocab/embedding_cuda.h by names without types.
EXPORTS = """
#define EXPORT(name, scalar_t, wide_t)                                                           \\
  extern "C" void lookup_##name(const int64_t* ids, int64_t num_ids, int64_t vocab_start,        \\
                                int64_t num_rows, int64_t row_bytes, const void* rows,           \\
                                void* out) {                                                     \\
    KERNELS::lookup_rows_on_cuda({ids, num_ids, vocab_start, num_rows}, row_bytes, rows, out, 0); \\
  }                                                                                              \\
  extern "C" void sum_##name(const int64_t* order, const int64_t* first, int64_t num_sums,       \\
                             int64_t size, const scalar_t* in, scalar_t* out) {                  \\
    KERNELS::sum_segments_on_cuda({order, first, num_sums}, size, in, out, 0);                   \\
  }
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    exports = "#define KERNELS parallel_ext\n" + EXPORTS + exports_of(list(C_TYPES))
    return kernels_on_cpu(SOURCE, exports, tmp_path_factory.mktemp("kernels"))


Kernels = ctypes.CDLL | Mutant

# Each yields what it compared, and whether it was right.
Compared = Iterator[tuple[str, bool]]


def _lookups(kernels: Kernels, dtype: torch.dtype) -> Compared:
    ids = torch.tensor([3, 9, 4, -1, 8, 2**40, 3, 5])
    for width, offset in [(1, 0), (3, 0), (4, 1), (16, 0), (16, 1), (300, 0), (0, 0)]:
        rows = placed(offset, torch.randn(5, width, dtype=FP64).to(dtype))
        rows[0, 0:1] = -0.0
        rows[1, 0:1] = torch.nan
        for asked in (ids, ids[:0]):
            for num_rows in (5, 0):
                out = placed(offset, torch.full((len(asked), width), 7, dtype=dtype))
                row_bytes = width * dtype.itemsize
                function = of_type(kernels, "lookup", dtype)
                call(function, asked, len(asked), 4, num_rows, row_bytes, rows, out)
                own = (asked >= 4) & (asked < 4 + num_rows)
                expected = torch.zeros(len(asked), width, dtype=dtype)
                expected[own] = rows[asked[own] - 4]
                same = torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
                yield f"lookup {len(asked)} of {num_rows} x {width} + {offset}", same


def _sums(kernels: Kernels, dtype: torch.dtype) -> Compared:
    """The sums are made in the order of the CPU's loops, so their bits are equal."""
    for tokens, num_rows, width, offset in [
        *((40, 7, 37, 0), (40, 7, 64, 0), (40, 7, 64, 1), (90, 50, 520, 0), (0, 5, 16, 0)),
        *((9, 0, 16, 0), (9, 5, 0, 0)),
    ]:
        ids = torch.randint(0, num_rows + 9, (tokens,))
        grad = placed(offset, torch.randn(tokens, width, dtype=FP64).to(dtype))
        expected = OPS.vocab_embedding_backward(grad, ids, num_rows, 4, 6)
        row = ids - 4
        row = row.masked_fill((row < 0) | (row >= num_rows) | (ids == 6), num_rows)
        in_order, order = row.sort(stable=True)
        first = torch.searchsorted(in_order, torch.arange(num_rows + 1))
        out = placed(offset, torch.full_like(expected, torch.nan))
        call(of_type(kernels, "sum", dtype), order, first, num_rows, width, grad, out)
        yield f"sum {tokens} in {num_rows} x {width} + {offset}", torch.equal(out, expected)


def _failures(kernels: Kernels, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    made = [*_lookups(kernels, dtype), *_sums(kernels, dtype)]
    return [name for name, right in made if not right]


@ALL_DTYPES
def test_kernels_make_what_the_op_makes_on_a_cpu(kernels, dtype):
    assert _failures(kernels, dtype) == []


MUTATIONS = {
    "a row forgotten": ("row < lookup.num_rows", "row + 1 < lookup.num_rows"),
    "another shard": ("lookup.ids[token] - lookup.vocab_start", "lookup.ids[token]"),
    "another row": ("rows[row * columns + column]", "rows[token % 5 * columns + column]"),
    "no order": ("in[segments.order[i]", "in[i"),
    "a token forgotten": ("i < end;", "i < end - 1;"),
}


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mutant]:
    return mutants_on_cpu(SOURCE, EXPORTS, tmp_path_factory.mktemp("mutants"), MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert _failures(mutants[mutation], FP64) != []
