"""CUDA kernels of the embedding, whose source runs here on a CPU, one thread of a block after the
other. They make what the op makes there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from cuda_threads import Mutant, call, of_type, placed
from reference_ops import ALL_DTYPES, TOLERANCE, relative_error

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
  extern "C" void rows_##name(const int64_t* ids, int64_t num_ids, int64_t vocab_start,          \\
                              int64_t num_rows, int64_t padding, int32_t* rows) {                \\
    KERNELS::find_rows_on_cuda({ids, num_ids, vocab_start, num_rows}, padding, rows, 0);         \\
  }                                                                                              \\
  extern "C" void sum_##name(const int32_t* rows, const int64_t* order, int64_t num_ids,         \\
                             int64_t num_rows, int64_t size, const scalar_t* in, wide_t* parts,  \\
                             scalar_t* out) {                                                    \\
    KERNELS::sum_rows_of_ids_on_cuda({rows, order, num_ids, num_rows}, size, in, parts, out, 0); \\
  }
"""


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


def _sum_by_chunks(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One after the other, 64 at a time, then the sums of these."""
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(rows.size(1), dtype=wide)
    for chunk in rows.to(wide).split(64):
        total += sum(chunk, torch.zeros_like(total))
    return total.to(dtype)


def _sums(kernels: Kernels, dtype: torch.dtype) -> Compared:
    for tokens, num_rows, width, offset in [
        *((40, 7, 37, 0), (40, 7, 64, 0), (40, 7, 64, 1), (90, 50, 520, 0), (0, 5, 16, 0)),
        *((9, 0, 16, 0), (9, 5, 0, 0), (700, 3, 8, 0), (64, 1, 8, 0), (130, 2, 8, 0)),
    ]:
        ids = torch.randint(0, num_rows + 9, (tokens,))
        ids[: tokens // 2] = 4  # a row of several chunks
        if num_rows <= 2:  # the first row ends with a chunk, or one place behind it
            ids = 4 + torch.arange(tokens) // 65
        grad = placed(offset, torch.randn(tokens, width, dtype=FP64).to(dtype))
        rows = torch.full((tokens,), -7, dtype=torch.int32)
        call(of_type(kernels, "rows", dtype), ids, tokens, 4, num_rows, 6, rows)
        row = ids - 4
        row = row.masked_fill((row < 0) | (row >= num_rows) | (ids == 6), num_rows)
        name = f"{tokens} in {num_rows} x {width} + {offset}"
        yield f"rows of {name}", torch.equal(rows, row.int())
        in_order, order = row.int().sort(stable=True)
        parts = torch.full((2 * (tokens // 64 + 1), width), torch.nan, dtype=FP64)
        parts = parts.to(torch.promote_types(dtype, torch.float32))
        out = placed(offset, torch.zeros(num_rows, width, dtype=dtype))
        sums = of_type(kernels, "sum", dtype)
        call(sums, in_order, order, tokens, num_rows, width, grad, parts, out)
        expected = [_sum_by_chunks(grad[row == each], dtype) for each in range(num_rows)]
        same = torch.equal(out, torch.stack(expected)) if expected else True
        of_op = OPS.vocab_embedding_backward(grad, ids, num_rows, 4, 6)
        close = relative_error(out, of_op) <= TOLERANCE[dtype] if out.numel() else True
        yield f"sum {name}", same and close


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
    "padding summed": ("row == padding_row ?", "false ?"),
    "a chunk forgotten": ("if (!goes_on(sorted, chunk, count)) break;", "break;"),
    "a chunk of a row that ends with it": ("if (!goes_on(sorted, first, count)) return;", ""),
    "chunks that begin anywhere": ("if (before % SortedRows::kChunk != 0) return;", ""),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices_broken_kernels(mutants, mutation):
    assert _failures(mutants[mutation], FP64) != []
