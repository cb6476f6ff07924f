"""How rows of the embedding travel: each once, from its owner, or in one sum."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    BOTH_PATHS,
    TOLERANCE,
    assert_within,
    counted,
    data_bytes,
    errors_of_embedding,
    on_ranks,
    own_range,
    relative_error,
    worst,
)

from parallel_ext import _C
from parallel_ext.ops import Group, vocab_embedding

FP64 = torch.float64
HIDDEN = 3


def _rows_of_any_bits(dtype: torch.dtype) -> torch.Tensor:
    """[7, 5] with -0.0, infinities, NaN of either sign and any payload, subnormal numbers."""
    table = torch.randint(0, 256, (7, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    table[:4] = torch.tensor([[float("nan")], [-0.0], [float("-inf")], [0.0]])
    bytes_of = table.view(torch.uint8)
    bytes_of[0, :: dtype.itemsize] = 77  # the lowest byte of the number
    bytes_of[3, :: dtype.itemsize] = 1
    return table


def _exchange(group: Group, ids: torch.Tensor, table: torch.Tensor) -> tuple[str, int]:
    """What brought the rows, whose bits must be those of the table, and the bytes of this rank."""
    start, stop = own_range(table.size(0), group)
    output, counts = counted(
        lambda: vocab_embedding(ids, table[start:stop], table.size(0), start, group=group)
    )
    assert data_bytes(output) == data_bytes(table[ids])
    (kind,) = {"swap", "all_reduce"} & counts.keys()
    assert counts[kind] == 1
    return kind, counts[f"{kind}_bytes"]


FEW_OWNERS = torch.tensor([1, 0, 1])  # of 7 ids on 4 ranks
ALL_OWNERS = torch.tensor([[0, 6, 2, 6], [6, 3, 4, 0]])


def _bits_that_arrive(group: Group, dtype: torch.dtype, shared: bool) -> list[str]:
    table = _rows_of_any_bits(dtype)
    _C.set_shared_memory(shared)
    try:
        return [_exchange(group, ids, table)[0] for ids in (ALL_OWNERS, FEW_OWNERS)]
    finally:
        _C.set_shared_memory(True)


@BOTH_PATHS
@ALL_DTYPES
@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "gloo"])
def test_every_bit_of_a_row_arrives(dtype, shared, aten):
    kinds = ["all_reduce" if aten else "swap", "all_reduce"]
    assert on_ranks(4, _bits_that_arrive, dtype, shared, aten=aten) == [kinds] * 4


def _rows_sent(group: Group) -> tuple[str, int]:
    return _exchange(group, ALL_OWNERS, torch.randn(7, HIDDEN, dtype=FP64))


def test_each_row_travels_once_from_its_owner():
    """On 3 ranks, ids 0 and 2 are of the first, 3 and 4 of the second, 6 of the last."""
    row = HIDDEN * 8
    kinds = [("swap", rows * 2 * row) for rows in (2, 2, 1)]
    assert on_ranks(3, _rows_sent) == kinds


def _uneven_shards(group: Group, sizes: list[int]) -> dict[str, float]:
    ids, table = torch.tensor([3, 0, 3, 6]), torch.randn(7, HIDDEN, dtype=FP64)
    return errors_of_embedding(group, ids, table, torch.randn(4, HIDDEN, dtype=FP64), sizes=sizes)


@BOTH_PATHS
@pytest.mark.parametrize("sizes", [[1, 6, 0], [0, 0, 7], [4, 0, 3]], ids=str)
def test_shards_may_have_any_sizes(sizes, aten):
    assert worst(on_ranks(3, _uneven_shards, sizes, aten=aten))[0] <= TOLERANCE[FP64]


def _large(group: Group, vocab_size: int) -> dict[str, float]:
    """Rows that fill the shared memory several times, gradients that the workspaces keep."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab_size, 1024, generator=generator)
    start, stop = own_range(vocab_size, group)
    leaf = table[start:stop].clone().requires_grad_()
    errors, held = {}, []
    for _ in range(3):
        ids = torch.randint(0, vocab_size, (3001,), generator=generator)
        grad = torch.randn(3001, 1024, generator=generator)
        output = vocab_embedding(ids, leaf, vocab_size, start, group=group)
        expected = torch.zeros_like(table, dtype=FP64).index_add_(0, ids, grad.double())
        held.append((output, table[ids], *torch.autograd.grad(output, leaf, grad), expected))
    for step, (output, rows, grad_rows, expected) in enumerate(held):
        errors[f"output {step}"] = float(not torch.equal(output, rows))
        errors[f"weight {step}"] = relative_error(grad_rows, expected, slice(start, stop))
    return errors


@pytest.mark.parametrize("size", [1, 2])
def test_large_tables_whose_results_are_held(size):
    assert_within(on_ranks(size, _large, 4801), TOLERANCE[torch.float32])
