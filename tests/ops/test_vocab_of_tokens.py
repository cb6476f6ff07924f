"""Embedding and fused head of ranks that keep their own tokens: nothing travels in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    BOTH_PATHS,
    MUTATIONS,
    NOTICED,
    TOLERANCE,
    assert_refused,
    assert_within,
    counted,
    data_bytes,
    errors_of_embedding,
    on_ranks,
    own_range,
    relative_error,
    sizes_of,
    worst,
)

from parallel_ext.ops import Group, LossOptions, linear_vocab_cross_entropy, vocab_embedding
from parallel_ext.sharding.layout import split

FP64 = torch.float64
VOCAB, HIDDEN, IGNORED = 7, 3, -100


def _ids(tokens: int) -> dict[str, torch.Tensor]:
    """Of one sequence and of several, in the memory layouts that users bring."""
    several = torch.randint(VOCAB, (2, tokens))
    return {
        "no sequence dimension": torch.randint(VOCAB, (tokens,)),
        "sequences": several,
        "transposed": torch.randint(VOCAB, (tokens, 3)).T,
        "one id": torch.full((2, tokens), 6),
        "no sequences": several[:0],
        "more dimensions": torch.randint(VOCAB, (2, 1, tokens)),
    }


def _embedded(group: Group, tokens: int, dtype: torch.dtype, padding: int) -> dict[str, float]:
    """Rows and gradients, from what one process computes of all tokens."""
    table, errors = torch.randn(VOCAB, HIDDEN, dtype=dtype), {}
    options = {"padding_idx": padding, "tokens": sizes_of(tokens, group)}
    for name, ids in _ids(tokens).items():
        grad = torch.randn(*ids.shape, HIDDEN, dtype=dtype)
        found = errors_of_embedding(group, ids, table, grad, **options)
        errors.update({f"{what} of {name}": error for what, error in found.items()})
    return errors


@BOTH_PATHS
@ALL_SIZES
def test_rows_and_their_gradients_are_those_of_one_process(size: int, aten: bool) -> None:
    for tokens in (0, 1, 10):
        assert_within(on_ranks(size, _embedded, tokens, FP64, 2, aten=aten))


@BOTH_PATHS
@ALL_DTYPES
def test_dtypes_err_by_their_rounding(dtype: torch.dtype, aten: bool) -> None:
    assert_within(on_ranks(3, _embedded, 10, dtype, 2, aten=aten), TOLERANCE[dtype])


def _uneven(group: Group, sizes: list[int], tokens: list[int]) -> dict[str, float]:
    ids, table = torch.randint(VOCAB, (2, sum(tokens))), torch.randn(VOCAB, HIDDEN, dtype=FP64)
    grad = torch.randn(*ids.shape, HIDDEN, dtype=FP64)
    return errors_of_embedding(group, ids, table, grad, sizes=sizes, tokens=tokens)


@BOTH_PATHS
@pytest.mark.parametrize(
    ("sizes", "tokens"), [([1, 6, 0], [0, 2, 3]), ([0, 0, 7], [4, 0, 0]), ([4, 0, 3], [1, 1, 1])]
)
def test_rows_and_tokens_may_be_of_any_ranks(
    sizes: list[int], tokens: list[int], aten: bool
) -> None:
    assert_within(on_ranks(3, _uneven, sizes, tokens, aten=aten))


def _bits(group: Group) -> list[bool]:
    """Of -0.0, NaN of any payload and subnormal numbers; and of gradients, as without tokens."""
    table = torch.randint(0, 256, (VOCAB, 5 * 2), dtype=torch.uint8).view(torch.bfloat16)
    table[:3] = torch.tensor([[float("nan")], [-0.0], [float("-inf")]])
    (start, stop), sizes = own_range(VOCAB, group), sizes_of(9, group)
    ids, own = torch.randint(VOCAB, (2, 9)), slice(*own_range(9, group))
    rows = vocab_embedding(ids, table[start:stop], VOCAB, start, tokens=sizes, group=group)
    grad, leaf = torch.randn(2, 9, 5).bfloat16(), table[start:stop].clone().requires_grad_()
    gradients = [
        torch.autograd.grad(
            vocab_embedding(ids, leaf, VOCAB, start, tokens=tokens, group=group), leaf, given
        )[0]
        for tokens, given in ((None, grad), (sizes, grad[:, own]))
    ]
    return [
        data_bytes(rows) == data_bytes(table[ids][:, own].contiguous()),
        data_bytes(gradients[0]) == data_bytes(gradients[1]),
    ]


def test_every_bit_of_a_row_arrives_and_gradients_are_summed_in_the_order_of_tokens() -> None:
    assert on_ranks(3, _bits) == [[True, True]] * 3


IDS = torch.tensor([[0, 6, 6, 2, 0], [1, 0, 5, 6, 6]])


def _sent(group: Group) -> list[dict[str, int]]:
    (start, stop), sizes = own_range(VOCAB, group), sizes_of(5, group)
    table = torch.randn(VOCAB, HIDDEN, dtype=FP64)[start:stop].requires_grad_()
    rows, forward = counted(
        lambda: vocab_embedding(IDS, table, VOCAB, start, tokens=sizes, group=group)
    )
    return [forward, counted(rows.sum().backward)[1]]


def test_a_row_goes_once_to_each_rank_that_looks_it_up_and_a_gradient_to_its_row() -> None:
    """On 2 ranks: ids 0 to 3 are of the first, which has 3 tokens of each sequence."""
    row = HIDDEN * 8
    first, second = on_ranks(2, _sent)
    assert [each["swap_bytes"] for each in first] == [2 * row, 3 * row]  # 2, 0; of 6, 6, 5
    assert [each["swap_bytes"] for each in second] == [2 * row, 2 * row]  # 6, 5; of 2, 0
    for counts in (*first, *second):
        assert counts["swap"] == 1
        assert not {"all_reduce", "all_gather"} & counts.keys()


def _headed(
    group: Group, tokens: int, trained: bool, options: dict[str, Any], broken: str = "none"
) -> dict[str, float]:
    """Loss and gradients, from those of ranks that all have the hidden states of all tokens.

    Of two backwards, of which the second makes the logits again.
    """
    own = slice(*split(tokens, group.size)[MUTATIONS[broken](group)[1]])
    hidden, labels = torch.randn(2, tokens, HIDDEN).double(), torch.randint(VOCAB, (2 * tokens,))
    head, bias = torch.randn(VOCAB, HIDDEN).double(), torch.randn(VOCAB).double()
    labels[::4] = IGNORED
    start, stop = own_range(VOCAB, group)

    def answers(input: torch.Tensor, sizes: list[int] | None) -> list[torch.Tensor]:
        leaves = [each.clone() for each in (input, head[start:stop], bias[start:stop])]
        wanted = leaves if trained else leaves[:1]
        for each in wanted:
            each.requires_grad_()
        loss = linear_vocab_cross_entropy(
            *(*leaves[:2], labels, VOCAB, (start, stop), LossOptions(**options)),
            bias=leaves[2],
            tokens=sizes,
            group=group,
        )
        grad = torch.linspace(1, 2, loss.numel(), dtype=FP64).view(loss.shape)
        backwards = [torch.autograd.grad(loss, wanted, grad, retain_graph=True) for _ in range(2)]
        return [loss.detach(), *backwards[0], *backwards[1]]

    expected = answers(hidden.flatten(0, 1), None)
    found = answers(hidden[:, own], sizes_of(tokens, group))
    for number in (1, 4 if trained else 2):
        expected[number] = expected[number].view(hidden.shape)[:, slice(*own_range(tokens, group))]
    return {
        str(n): relative_error(*pair) for n, pair in enumerate(zip(found, expected, strict=True))
    }


@BOTH_PATHS
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(("size", "tokens"), [(2, 5), (4, 3)])
@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"reduction": "mean", "softcap": 1.5}, {"reduction": "none"}],
    ids=str,
)
def test_loss_and_gradients_are_those_of_one_process(
    size: int, tokens: int, trained: bool, options: dict[str, Any], aten: bool
) -> None:
    assert_within(on_ranks(size, _headed, tokens, trained, options, aten=aten))


def _messages(group: Group, trained: bool) -> list[dict[str, int]]:
    (start, stop), sizes = own_range(VOCAB, group), sizes_of(5, group)
    hidden = torch.randn(2, sizes[group.rank], HIDDEN, requires_grad=True)
    head = torch.randn(VOCAB, HIDDEN)[start:stop].requires_grad_(trained)
    labels, given = torch.randint(VOCAB, (10,)), {"tokens": sizes, "group": group}
    loss, forward = counted(
        lambda: linear_vocab_cross_entropy(hidden, head, labels, VOCAB, (start, stop), **given)
    )
    return [forward, counted(loss.backward)[1]]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_gather_and_a_reduce_scatter_take_the_place_of_the_all_reduce(trained: bool) -> None:
    for rank, (forward, backward) in enumerate(on_ranks(2, _messages, trained)):
        own, others = (3, 2) if rank == 0 else (2, 3)
        gather, scatter = (2 * tokens * HIDDEN * 4 for tokens in (own, others))
        assert forward["swap"] == 1 + trained  # the gradient is known in the forward
        assert forward["swap_bytes"] == gather + trained * scatter
        assert backward.get("swap_bytes", 0) == (not trained) * scatter
        assert "all_reduce" not in {**forward, **backward}


def test_the_comparison_notices_swapped_tokens() -> None:
    errors = on_ranks(2, _headed, 6, True, {"reduction": "sum"}, "swapped shards")
    assert worst(errors)[0] >= NOTICED


def _embed(ids: torch.Tensor, tokens: list[int], group: Group) -> torch.Tensor:
    start, stop = own_range(VOCAB, group)
    return vocab_embedding(
        ids, torch.ones(stop - start, 2), VOCAB, start, tokens=tokens, group=group
    )


def _loss(hidden: torch.Tensor, group: Group) -> torch.Tensor:
    start, stop = own_range(VOCAB, group)
    labels, head = torch.zeros(6, dtype=torch.int64), torch.ones(stop - start, 2)
    return linear_vocab_cross_entropy(
        hidden, head, labels, VOCAB, (start, stop), tokens=[3, 3], group=group
    )


REFUSALS = {
    "other tokens": (
        lambda group: _embed(IDS, [3, 3], group),
        "ValueError: vocab_embedding: tokens [3, 3] are not those of each rank in ids of shape",
    ),
    "tokens of other ranks": (
        lambda group: _embed(IDS, [5], group),
        "ValueError: vocab_embedding: 1 sizes were given for a group of 2 ranks",
    ),
    "an unknown id": (
        lambda group: _embed(IDS + 1, [3, 2], group),
        "IndexError: vocab_embedding: id 7 at position 1 is outside the vocabulary [0, 7)",
    ),
    "flat hidden states": (
        lambda group: _loss(torch.ones(3, 2), group),
        "ValueError: linear_vocab_cross_entropy: expected 3 dimensions in input, got shape [3, 2]",
    ),
    "hidden states of all tokens": (
        lambda group: _loss(torch.ones(1, 6, 2), group),
        "ValueError: gather_tokens: shard must hold 3 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_misuse_is_refused(case: str) -> None:
    assert_refused(__name__, case)
