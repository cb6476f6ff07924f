"""The embedding of a vocabulary whose rows are cut over the ranks."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    BOTH_PATHS,
    NOTICED,
    TOLERANCE,
    assert_refused,
    assert_within,
    aten_path,
    data_bytes,
    errors_of_embedding,
    grad_outputs,
    on_ranks,
    threads,
    with_gradients,
    worst,
)
from torch.nn import functional

from parallel_ext.ops import Group, vocab_embedding

FP64 = torch.float64
HIDDEN = 3


def _ids(vocab_size: int) -> dict[str, torch.Tensor]:
    """Ids of every shard, some of them several times, in all shapes and memory layouts."""
    one_dimension = torch.tensor([0, vocab_size - 1, *(vocab_size * k // 7 for k in range(7)), 0])
    return {
        "one dimension": one_dimension,
        "two dimensions": one_dimension.view(2, 5),
        "transposed": one_dimension.view(5, 2).mT,
        "stride 0": one_dimension[-3].expand(2, 2),
        "scalar": one_dimension[1],
        "no tokens": one_dimension[:0].view(0, 2),
    }


def _embedding_errors(group: Group, vocab_size: int, dtype: torch.dtype) -> dict[str, float]:
    errors = {}
    table = torch.randn(HIDDEN, vocab_size, dtype=dtype).mT  # its rows are not contiguous
    for shape, ids in _ids(vocab_size).items():
        for layout, grad in grad_outputs((*ids.shape, HIDDEN), dtype).items():
            found = errors_of_embedding(group, ids, table, grad)
            errors.update({f"{shape}, {layout}: {name}": error for name, error in found.items()})
    return errors


@BOTH_PATHS
@ALL_SIZES
@pytest.mark.parametrize("vocab_size", [1, 101])
def test_embedding_equals_unsharded_when_vocab_not_divisible(vocab_size, size, aten):
    assert_within(on_ranks(size, _embedding_errors, vocab_size, FP64, aten=aten))


@BOTH_PATHS
@ALL_DTYPES
def test_embedding_is_as_accurate_as_its_dtype(dtype, aten):
    assert_within(on_ranks(2, _embedding_errors, 65535, dtype, aten=aten), TOLERANCE[dtype])


def _no_hidden_features(group: Group) -> dict[str, float]:
    ids, nothing = torch.tensor([0, 4, 2]), torch.zeros(5, 0, dtype=FP64)
    return errors_of_embedding(group, ids, nothing, torch.zeros(3, 0, dtype=FP64))


@BOTH_PATHS
def test_embedding_without_features_is_empty(aten):
    assert worst(on_ranks(2, _no_hidden_features, aten=aten))[0] == 0


def _padding_errors(group: Group, padding_idx: int, mutation: str) -> dict[str, float]:
    """V = 128, as in torchtitan #4637: on 4 ranks, ids 5, 37 and 69 are row 5 of ranks 0, 1, 2."""
    ids = torch.tensor([[5, 37, 5, 40], [69, 8, 127, 40]])
    table, grad = torch.randn(128, HIDDEN, dtype=FP64), torch.randn(2, 4, HIDDEN, dtype=FP64)
    return errors_of_embedding(group, ids, table, grad, padding_idx=padding_idx, mutation=mutation)


@BOTH_PATHS
@ALL_SIZES
def test_padding_idx_is_global_and_takes_the_gradient_of_no_other_token(size, aten):
    for padding_idx in (5, 40):
        assert_within(on_ranks(size, _padding_errors, padding_idx, "none", aten=aten))


@pytest.mark.parametrize("mutation", ["no exchange", "swapped shards"])
def test_the_comparison_notices_a_broken_embedding(mutation):
    assert worst(on_ranks(4, _padding_errors, 5, mutation))[0] > NOTICED


def test_a_negative_padding_idx_counts_from_the_end_as_in_torch_or_is_refused():
    ids, table, grad = torch.tensor([3, 4]), torch.randn(5, HIDDEN), torch.ones(2, HIDDEN)
    expected = with_gradients(
        lambda table: functional.embedding(ids, table, padding_idx=-1), [table], grad
    )
    try:
        actual = with_gradients(
            lambda table: vocab_embedding(ids, table, 5, 0, padding_idx=-1), [table], grad
        )
    except ValueError as refusal:
        assert "padding_idx" in str(refusal)  # noqa: PT017 (refusing is one of two right answers)
    else:
        assert torch.equal(actual[1], expected[1])


@BOTH_PATHS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_frequent_id_is_summed_in_fp32(dtype, aten):
    """A sum of ones in bf16 sticks at 256, one in fp16 at 2048."""
    ids, table = torch.zeros(4096, dtype=torch.int64), torch.zeros(2, 1, dtype=dtype)
    with aten_path(aten):
        _, grad = with_gradients(
            lambda table: vocab_embedding(ids, table, 2, 0), [table], torch.ones(4096, 1)
        )
    assert grad.tolist() == [[4096.0], [0.0]]


def _special_rows(group: Group) -> dict[str, float]:
    """NaN and infinities stay in the rows of the ids that have them."""
    ids, table = torch.tensor([0, 1, 2, 3]), torch.zeros(4, HIDDEN, dtype=FP64)
    table[1], table[3, 0] = float("nan"), float("-inf")
    return errors_of_embedding(group, ids, table, table.flip(0).clone())


@BOTH_PATHS
def test_nan_and_infinity_stay_in_their_rows(aten):
    assert worst(on_ranks(2, _special_rows, aten=aten))[0] == 0


def test_the_gradient_has_the_same_bits_for_any_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2000, (5000,), generator=generator)
    grad = torch.randn(5000, HIDDEN, generator=generator)
    bits = set()
    for count in (1, 2):
        with threads(count):
            results = with_gradients(
                lambda table: vocab_embedding(ids, table, 2000, 0), [torch.ones(2000, HIDDEN)], grad
            )
            bits.add(b"".join(map(data_bytes, results)))
    assert len(bits) == 1


def _lookup(
    group: Group,
    ids: list[int],
    vocab_size: int = 65535,
    start: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    rows = torch.zeros(4, HIDDEN)
    return vocab_embedding(torch.tensor(ids), rows, vocab_size, start, sizes=sizes, group=group)


REFUSALS = {
    "id too large": (
        lambda group: _lookup(group, [7, 0, 65534, 65535, -1]),
        "IndexError: vocab_embedding: id 65535 at position 3 is outside the vocabulary [0, 65535)",
    ),
    "negative id": (
        lambda group: _lookup(group, [7, -100]),
        "IndexError: vocab_embedding: id -100 at position 1 is outside the vocabulary [0, 65535)",
    ),
    "padded rows": (
        lambda group: _lookup(group, [0], vocab_size=7, start=4),
        "ValueError: vocab_embedding: the 4 rows from 4 on are not inside the vocabulary [0, 7); "
        "pass this rank's rows and the true vocabulary size",
    ),
    "negative start": (
        lambda group: _lookup(group, [0], start=-1),
        "ValueError: vocab_embedding: the 4 rows from -1 on are not inside the vocabulary",
    ),
    "rows of no rank": (
        lambda group: _lookup(group, [0], vocab_size=9),
        "ValueError: vocab_embedding: the 4 rows from 0 on are not this rank's, of ranks whose "
        "boundaries are [0, 5, 9]; pass the rows of each rank as sizes",
    ),
    "rows of another rank": (
        lambda group: _lookup(group, [0, 7], vocab_size=8, start=4 - 4 * group.rank),
        "ValueError:  on are not this rank's, of ranks whose boundaries are [0, 4, 8]; pass the "
        "rows of each rank as sizes",
    ),
    "sizes of another vocabulary": (
        lambda group: _lookup(group, [0], vocab_size=9, sizes=[4, 4]),
        "ValueError: vocab_embedding: sizes [4, 4] are not the rows of each of 2 ranks, of 9 in "
        "all",
    ),
    "sizes of another group": (
        lambda group: _lookup(group, [0], vocab_size=9, sizes=[4, 4, 1]),
        "ValueError: vocab_embedding: sizes [4, 4, 1] are not the rows of each of 2 ranks, of 9 "
        "in all",
    ),
    "group size": (
        lambda group: _lookup(group._replace(size=3), [0], vocab_size=12),
        "ValueError: has 2 ranks, but group_size is 3",
    ),
}


@BOTH_PATHS
@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case, aten):
    assert_refused(__name__, case, aten)
