"""What the ops refuse in words that name op and argument: wrapping sums, wrong shapes, no tensors.

Internal backward ops are called as anybody can call them, through ``torch.ops``.
"""

from __future__ import annotations

import inspect
import re
import time

import pytest
import torch
from test_every_op import IN_GRAPHS_OF_OTHERS, REGISTERED, opcheck_samples

from parallel_ext import ops
from parallel_ext.ops import ExchangePlan, Group, moe_route_plan

INTERNAL = torch.ops.parallel_ext
ONES, INTS = torch.ones, torch.zeros(4, dtype=torch.int64)
IDS = torch.tensor([[0, 4], [4, 2]])
ROUTE = moe_route_plan(IDS, [5], 4096, 0)
SEND = [*ROUTE.counts.tolist(), 4]
PLAN = (SEND, SEND, [5], 0, 1, "")
ORIGINS = torch.arange(4)
MAPS = (ROUTE.rows_of_choices, ROUTE.sources)
MEAN = (None, 5, 0, 5, -100, "mean", 0.0, 0.0, None, 1.0)


def _combine(receive: list[int]) -> torch.Tensor:
    plan = (SEND, receive, [5], 0, 1, "")
    return INTERNAL.moe_combine(ONES(4, 3), ORIGINS, MAPS[0], ROUTE.tokens, *plan)


def _dispatch_backward(grad_rows: torch.Tensor, **other: torch.Tensor) -> torch.Tensor:
    return INTERNAL.moe_dispatch_backward(
        grad_rows,
        other.get("grad_weights", ONES(4)),
        other.get("rows", MAPS[0]),
        MAPS[1],
        other.get("origins", ORIGINS),
        torch.float32,
        [True, True],
        *PLAN,
    )


def _far_group() -> Group:
    return Group("no such group", 2**31 - 1, 0)


# Call, and the error's type and a part of its text.
REFUSALS = {
    "experts whose sum wraps to the right one": (
        lambda: moe_route_plan(IDS, [2**62] * 4 + [5], 4096, 0),
        "ValueError: moe_route_plan: the sum of experts_per_rank",
    ),
    "more experts than are served": (
        lambda: moe_route_plan(IDS, [2**20 + 1], 4096, 0),
        "ValueError: are 1048577 experts; there must be 1 to 1048576",
    ),
    "rows longer than memory": (
        lambda: moe_route_plan(IDS, [5], 2**62, 0),
        "ValueError: moe_route_plan: row_bytes must be in [0, 2147483648], got 4611686018427387904",
    ),
    "counts of rows that are not there": (
        lambda: _combine([10**9, 0, 1, 0, 2, 4]),
        "ValueError: moe_combine: 4 rows, but the counts say 1000000003",
    ),
    "counts whose sum wraps": (
        lambda: _combine([2**62, 2**62, 2**62, 2**62, 4, 4]),
        "ValueError: moe_combine: the sum of receive",
    ),
    "a rank that sends itself other rows than it receives": (
        lambda: _combine([0, 1, 1, 0, 2, 4]),
        "ValueError: moe_combine: rank 0 sends itself [1, 0, 1, 0, 2] in 4 rows, but receives",
    ),
    "expert counts whose sum wraps": (
        lambda: ops.moe_linear(ONES(2, 3), ONES(3, 1, 3), [2**63 - 1, 2**63 - 1, 4]),
        "ValueError: moe_linear: the sum of counts",
    ),
    "sizes of tokens whose sum wraps": (
        lambda: INTERNAL.moe_take_tokens(ONES(2, 3), ONES(2, 1), [2**63 - 1] * 2, 0, 2, "x"),
        "ValueError: moe_take_tokens: the sum of sizes",
    ),
    "a start that wraps behind the vocabulary": (
        lambda: ops.vocab_embedding(INTS, ONES(5, 2), 5, 2**63 - 1),
        "ValueError: vocab_embedding: the 5 rows from 9223372036854775807 on are not inside",
    ),
    "a group of more ranks than there are": (
        lambda: ops.vocab_embedding(INTS, ONES(5, 2), 5, 0, group=_far_group()),
        "ValueError: vocab_embedding: no live process group is named 'no such group'",
    ),
    "a token too late for dropout": (
        lambda: ops.lora_linear(
            *(ONES(2, 2), ONES(3, 2), ONES(1, 2), ONES(3, 1)),
            dropout=ops.Dropout(0.5, 1, 1, token=2**63 - 1),
        ),
        "ValueError: lora_linear: the tokens from 9223372036854775807",
    ),
    # Internal ops.
    "weights of no rows": (
        lambda: INTERNAL.moe_gated_silu_backward(ONES(5, 3), ONES(5, 6), ONES(0)),
        "ValueError: moe_gated_silu_backward: weights of shape [0] are not one for each row",
    ),
    "a gradient of half of the columns": (
        lambda: INTERNAL.moe_gated_silu_backward(ONES(5, 3), ONES(5, 12), ONES(5)),
        "ValueError: moe_gated_silu_backward: grad_output must have the shape [5, 6], got [5, 3]",
    ),
    "gradients of no rows": (
        lambda: _dispatch_backward(ONES(0, 3)),
        "ValueError: moe_dispatch_backward: 0 rows, but the counts say 4",
    ),
    "gradients of other weights": (
        lambda: _dispatch_backward(ONES(4, 3), grad_weights=ONES(1)),
        "ValueError: moe_dispatch_backward: grad_weights must have the shape [4], got [1]",
    ),
    "weights of another dtype": (
        lambda: _dispatch_backward(ONES(4, 3), grad_weights=ONES(4, dtype=torch.float64)),
        "TypeError: moe_dispatch_backward: grad_weights must be Float for grad_rows in Float, got "
        "Double",
    ),
    "choices outside of the rows": (
        lambda: _dispatch_backward(ONES(4, 3), rows=torch.full((2, 2), 10**6)),
        "IndexError: moe_dispatch_backward: rows_of_choices has 1000000 at 0",
    ),
    "origins outside of the rows": (
        lambda: _dispatch_backward(ONES(4, 3), origins=torch.full((4,), -5)),
        "IndexError: moe_dispatch_backward: origins has -5 at",
    ),
    "gradients of other tokens": (
        lambda: INTERNAL.moe_combine_backward(ONES(1, 3), ORIGINS, ROUTE.tokens, *PLAN),
        "IndexError: moe_combine_backward: tokens has 1 at",
    ),
    "rows of another width": (
        lambda: INTERNAL.moe_linear_backward(
            ONES(5, 2), ONES(5, 6), ONES(3, 2, 3), [2, 1, 2], [True, True], 1.0
        ),
        "ValueError: moe_linear_backward: rows of shape [5, 6] do not fit weights of shape [3, 2, "
        "3]",
    ),
    "a gradient of another width": (
        lambda: INTERNAL.moe_linear_backward(
            ONES(5, 4), ONES(5, 3), ONES(3, 2, 3), [2, 1, 2], [True, True], 1.0
        ),
        "ValueError: moe_linear_backward: grad_output must have the shape [5, 2], got [5, 4]",
    ),
    "lora_a_out of other rows": (
        lambda: INTERNAL.moe_lora_linear_backward(
            *(ONES(5, 2), ONES(5, 3), ONES(3, 2, 3), ONES(3, 4, 3), ONES(3, 2, 4), ONES(1, 4)),
            *([2, 1, 2], 1.0, [True] * 4, 1.0),
        ),
        "ValueError: moe_lora_linear_backward: lora_a_out must have the shape [5, 4], got [1, 4]",
    ),
    "a gradient of fewer tokens": (
        lambda: INTERNAL.column_linear_backward(
            ONES(3, 4), ONES(2, 5), ONES(4, 5), [True, True, False], 1, ""
        ),
        "ValueError: column_linear_backward: grad_output must have the shape [2, 4], got [3, 4]",
    ),
    "lora_a_out of other tokens": (
        lambda: INTERNAL.lora_linear_backward(
            *(ONES(3, 4), ONES(3, 5), ONES(4, 5), ONES(2, 5), ONES(4, 2), ONES(2, 1)),
            *(1.0, 0.5, [1, 1, 0, 0], [True] * 5),
        ),
        "ValueError: lora_linear_backward: lora_a_out must have the shape [2, 3], got [2, 1]",
    ),
    "gradients of fewer ids": (
        lambda: INTERNAL.vocab_embedding_backward(ONES(2, 3), INTS, 5, 0, None),
        "ValueError: vocab_embedding_backward: grad_output of shape [2, 3] is not one row for "
        "each of ids [4]",
    ),
    "fewer than no rows": (
        lambda: INTERNAL.vocab_embedding_backward(ONES(4, 3), INTS, -2, 0, None),
        "ValueError: vocab_embedding_backward: num_rows must be at least 0, got -2",
    ),
    "labels of other logits": (
        lambda: INTERNAL.vocab_cross_entropy_backward(
            ONES(()), None, None, ONES(9, 5), INTS, ONES(2, 9), *MEAN
        ),
        "ValueError: vocab_cross_entropy: labels of shape [4] do not fit the 9 tokens",
    ),
    "logits of fewer ids": (
        lambda: INTERNAL.vocab_cross_entropy_backward_(
            ONES(()), None, None, ONES(4, 2), INTS, ONES(2, 4), *MEAN
        ),
        "ValueError: vocab_cross_entropy: logits hold 2 of the vocabulary",
    ),
    "logits in columns": (
        lambda: INTERNAL.vocab_cross_entropy_backward_(
            ONES(()), None, None, ONES(5, 4).T, INTS, ONES(2, 4), *MEAN
        ),
        "ValueError: vocab_cross_entropy: columns of logits with strides [1, 4] are not one apart",
    ),
    "a normalizer of fewer tokens": (
        lambda: INTERNAL.linear_vocab_cross_entropy_backward(
            *(ONES(()), None, None, ONES(4, 3), ONES(5, 3), None, INTS, ONES(2, 1)),
            *([True] * 3, *MEAN),
        ),
        "ValueError: linear_vocab_cross_entropy: the normalizer of 4 tokens has shape [2, 4]",
    ),
    "expected rows of other tokens": (
        lambda: INTERNAL.linear_vocab_cross_entropy_frozen_backward(
            ONES(()), None, ONES(1, 3), ONES(5, 3), INTS, ONES(2, 4), *MEAN
        ),
        "ValueError: linear_vocab_cross_entropy: expected_rows must have the shape [4, 3], got "
        "[1, 3]",
    ),
    # What is no tensor.
    "no weight": (
        lambda: ops.row_linear(ONES(1, 2), None),
        "TypeError: row_linear: weight must be a tensor, got None",
    ),
    "no weight of columns": (
        lambda: ops.column_linear(ONES(1, 2), None),
        "TypeError: column_linear: weight must be a tensor, got None",
    ),
    "no ids": (
        lambda: ops.vocab_embedding(None, ONES(5, 2), 5, 0),
        "TypeError: vocab_embedding: ids must be a tensor, got None",
    ),
    "no labels": (
        lambda: ops.vocab_cross_entropy(ONES(4, 5), None, 5, (0, 5)),
        "TypeError: vocab_cross_entropy: labels must be a tensor, got None",
    ),
    "no logits": (
        lambda: ops.moe_router(None, 1),
        "TypeError: moe_router: logits must be a tensor, got None",
    ),
    "no weights of choices": (
        lambda: ops.moe_gated_silu(ONES(2, 4), None),
        "TypeError: moe_gated_silu: weights must be a tensor, got None",
    ),
    "no reduction": (
        lambda: ops.vocab_cross_entropy(
            ONES(4, 5), INTS, 5, (0, 5), ops.LossOptions(reduction=None)
        ),
        "TypeError: vocab_cross_entropy: reduction must be 'none', 'sum' or 'mean', got None",
    ),
    "leaves without a node": (
        lambda: ops.sum_leaves([ONES(2), ONES(2)], [(0, 1)], torch.float32),
        "ValueError: sum_leaves: nodes [0, 1] are not a start and a width for each of 2 values",
    ),
    "no node of a tree": (
        lambda: ops.sum_leaves([ONES(2), ONES(2)], [(1, 2), (3, 1)], torch.float32),
        "ValueError: sum_leaves: nodes [1, 2, 3, 1] are not nodes of a tree",
    ),
    "a node twice": (
        lambda: ops.sum_leaves([ONES(2), ONES(2)], [(0, 1), (0, 1)], torch.float32),
        "ValueError: sum_leaves: nodes [0, 1, 0, 1] are not nodes of a tree",
    ),
    "nodes of two halves": (
        lambda: ops.sum_leaves([ONES(2), ONES(2)], [(1, 1), (2, 1)], torch.float32),
        "ValueError: sum_leaves: nodes [1, 1, 2, 1] are not nodes of a tree that follow each other",
    ),
    "nodes of three": (
        lambda: ops.sum_leaves([ONES(2), ONES(2)], [(0, 3), (3, 3)], torch.float32),
        "ValueError: sum_leaves: nodes [0, 3, 3, 3] are not nodes of a tree",
    ),
    "leaves of several sizes": (
        lambda: ops.sum_leaves([ONES(2), ONES(3)], [(0, 1), (1, 1)], torch.float32),
        "ValueError: sum_leaves: values must have the shape [2], got [3]",
    ),
    "leaves of fp64 and fp32": (
        lambda: ops.sum_leaves([ONES(2), ONES(2).double()], [(0, 1), (1, 1)], torch.float64),
        "TypeError: sum_leaves: values of float64 and of other dtypes cannot be summed together",
    ),
    "counts of other leaves": (
        lambda: ops.block_experts(ONES(2, 3), ONES(2, 1, 4, 3), [2]),
        "ValueError: block_experts: 1 counts are not one for each of 1 experts and 2 leaves",
    ),
    "counts of other rows": (
        lambda: ops.block_experts(ONES(2, 3), ONES(1, 2, 4, 3), [2, 1]),
        "ValueError: block_experts: the counts [2, 1] add up to 3, but there are 2 rows",
    ),
    "fewer rows to itself than choices": (
        lambda: INTERNAL.moe_dispatch(
            *(
                ONES(1, 4),
                ONES(1, 2),
                torch.tensor([[0, 0]]),
                torch.arange(2),
                torch.zeros_like(INTS[:2]),
            ),
            *([2, 1], [2, 1], [1], 0, 1, ""),
        ),
        "ValueError: moe_dispatch: rank 0 sends itself 1 rows for 2 choices",
    ),
    # Plans in Python.
    "a short message": (
        lambda: ExchangePlan.of([[1, 1]], [2], 0),
        "ValueError: ExchangePlan.of: the message of rank 0 has 2 numbers instead of 3",
    ),
    "a negative number in a message": (
        lambda: ExchangePlan.of([[1, -1, 2]], [2], 0),
        "ValueError: ExchangePlan.of: the message of rank 0 has a negative number: [1, -1, 2]",
    ),
    "a message too few": (
        lambda: ExchangePlan.of([[1, 1, 1]], [1, 1], 1),
        "ValueError: ExchangePlan.of: 1 messages and rank 1 do not fit 2 ranks",
    ),
    # Blocks, dropout and losses.
    "blocks without a stop": (
        lambda: INTERNAL.block_linears(ONES(1, 2), *[ONES(4, 2)] * 3, [0, 4, 0] * 3, 1, 1, 1, ""),
        "ValueError: block_linears: blocks [0, 4, 0] are not pairs of start and stop",
    ),
    "a number without features": (
        lambda: ops.seeded_dropout(torch.tensor(1.0), ops.Dropout(p=0.5, key=1, step=1)),
        "ValueError: seeded_dropout: input must have a dimension of features",
    ),
    "experts of no leaf": (
        lambda: INTERNAL.block_experts(ONES(1, 2), ONES(0, 1, 3, 2), []),
        "ValueError: block_experts: there are no leaves in weight of shape [0, 1, 3, 2]",
    ),
    "a loss of blocks for each token": (
        lambda: ops.block_linear_cross_entropy(
            *(ONES(1, 2), ONES(4, 2), torch.zeros(1, dtype=torch.int64)),
            *(ops.Blocks(((0, 4),), 1), 4, (0, 4), ops.LossOptions(reduction="none")),
        ),
        "ValueError: block_linear_cross_entropy: reduction must be 'sum' or 'mean'",
    ),
    "a loss of blocks in fp16": (
        lambda: ops.block_linear_cross_entropy(
            *(ONES(1, 2).half(), ONES(4, 2).half(), torch.zeros(1, dtype=torch.int64)),
            *(ops.Blocks(((0, 4),), 1), 4, (0, 4), ops.LossOptions()),
        ),
        "TypeError: block_linear_cross_entropy: gradients before the loss scale do not fit fp16",
    ),
    "blocks of two weights": (
        lambda: INTERNAL.block_linears(ONES(1, 2), *[ONES(4, 2)] * 3, [0, 4] * 2, 1, 1, 1, ""),
        "ValueError: block_linears: blocks [0, 4, 0, 4] are not equally many for each of 3 weights",
    ),
    "a block behind the rows": (
        lambda: ops.block_linears(ONES(1, 2), [ONES(4, 2)], [ops.Blocks(((0, 5),), 1)]),
        "ValueError: block_linears: blocks [0, 5] do not cover [0, 4)",
    ),
    "blocks that leave rows out": (
        lambda: INTERNAL.block_row_linear_backward(
            ONES(2, 3), ONES(2, 4), ONES(3, 4), [0, 2], [True] * 3
        ),
        "ValueError: block_row_linear_backward: blocks [0, 2] do not cover [0, 4)",
    ),
    "blocks in another order": (
        lambda: ops.block_linears(ONES(1, 2), [ONES(4, 2)], [ops.Blocks(((2, 4), (0, 2)), 2)]),
        "ValueError: block_linears: the block [2, 4) does not follow one that ends at 0",
    ),
    "a block twice, without copies": (
        lambda: ops.block_bias(ONES(1, 4), ONES(2), ops.Blocks(((0, 2), (0, 2)), 2)),
        "ValueError: block_bias: the block [0, 2) does not follow one that ends at 2",
    ),
    "a loss of blocks that leave ids out": (
        lambda: ops.block_linear_cross_entropy(
            *(ONES(1, 2), ONES(4, 2), torch.zeros(1, dtype=torch.int64)),
            *(ops.Blocks(((2, 4),), 1), 4, (0, 4), ops.LossOptions()),
        ),
        "ValueError: block_linear_cross_entropy: the block [2, 4) does not follow one that ends",
    ),
    "a loss of no block": (
        lambda: ops.block_linear_cross_entropy(
            *(ONES(1, 2), ONES(4, 2), torch.zeros(1, dtype=torch.int64)),
            *(ops.Blocks((), 1), 4, (0, 4), ops.LossOptions()),
        ),
        "ValueError: block_linear_cross_entropy: blocks [] do not cover [0, 4)",
    ),
    "blocks of another rank": (
        lambda: ops.block_linear_cross_entropy(
            *(ONES(1, 2), ONES(4, 2), torch.zeros(1, dtype=torch.int64)),
            *(ops.Blocks(((0, 4),), 2), 4, (0, 4), ops.LossOptions()),
        ),
        "ValueError: block_linear_cross_entropy: rank 0 holds 2 of the 2 blocks, got 1",
    ),
    "heads of no width": (
        lambda: ops.repeat_heads(ONES(1, 4), 3, 2),
        "ValueError: repeat_heads: input of shape [1, 4] is not of heads of 3",
    ),
    "a gradient of heads that were not repeated": (
        lambda: INTERNAL.repeat_heads_backward(ONES(1, 6), 2, 2),
        "ValueError: repeat_heads_backward: grad_output of shape [1, 6] is not of heads of 2",
    ),
    "a gradient of another bias": (
        lambda: INTERNAL.block_bias_backward(ONES(2, 3), ONES(4), [0, 4], 1, 1, 1, ""),
        "ValueError: block_bias_backward: grad_output of shape [2, 3] must have 4 features",
    ),
    # What only Meta kernels meet: the others check first.
    "a scalar that is no row": (
        lambda: ops.row_linear(torch.ones((), device="meta"), ONES(3, 2, device="meta")),
        "ValueError: a tensor of 1 dimensions or more is needed, got one of 0",
    ),
    "tokens of no rank": (
        lambda: INTERNAL.take_tokens(ONES(2, 4, 3, device="meta"), [4], 7, 1, ""),
        "ValueError: take_tokens: rank 7 is not in [0, 1)",
    ),
    "no repeats": (
        lambda: INTERNAL.repeat_heads_backward(ONES(1, 6, device="meta"), 2, 0),
        "ValueError: repeat_heads_backward: times must be at least 1, got 0",
    ),
    "blocks of no copy": (
        lambda: ops.block_linears(ONES(1, 2), [ONES(4, 2)], [ops.Blocks(((0, 4),), 1)], copies=0),
        "ValueError: block_linears: copies must divide the number of blocks 1, got 0",
    ),
    "copies of a bias that leave a block over": (
        lambda: ops.block_bias(ONES(1, 4), ONES(4), ops.Blocks(((0, 2), (2, 4)), 3), copies=2),
        "ValueError: block_bias: copies must divide the number of blocks 3, got 2",
    ),
    "copies that leave a block over, in a backward": (
        lambda: torch.ops.parallel_ext.block_bias_backward(
            ONES(1, 4), ONES(4), [0, 2, 2, 4], 0, 2, 1, ""
        ),
        "ValueError: block_bias_backward: copies must divide the number of blocks 2, got 0",
    ),
    "a block in reverse": (
        lambda: ops.block_row_linear(ONES(1, 4), ONES(3, 4), ops.Blocks(((3, 1),), 1)),
        "ValueError: block_row_linear: the block [3, 1) does not follow one that ends at 0",
    ),
    "blocks of no rank": (
        lambda: ops.block_row_linear(ONES(1, 4), ONES(3, 4), ops.Blocks(((0, 2), (2, 4)), 3)),
        "ValueError: block_row_linear: rank 0 holds 3 of the 3 blocks, got 2",
    ),
    "no block": (
        lambda: ops.block_row_linear(ONES(1, 4), ONES(3, 4), ops.Blocks((), 0)),
        "ValueError: block_row_linear: blocks [] do not cover [0, 4)",
    ),
    "a counter without a feature": (
        lambda: INTERNAL.seeded_dropout(ONES(2, 2), 0.5, [1, 1, 0]),
        "ValueError: seeded_dropout: dropout_counter must be [key, step, token, feature], got "
        "[1, 1, 0]",
    ),
    "an argmax of ids that int32 does not hold": (
        lambda: ops.vocab_cross_entropy_statistics(
            *(ONES(4, 5), INTS, 2**31, (0, 2**31)), argmax=True
        ),
        "ValueError: argmax is for at most 2147483647 ids, got 2147483648",
    ),
    "expected rows of capped logits": (
        lambda: INTERNAL.linear_vocab_cross_entropy_frozen_backward(
            *(ONES(()), None, ONES(4, 3), ONES(5, 3), INTS, ONES(2, 4)), *MEAN[:8], 30.0, 1.0
        ),
        "ValueError: linear_vocab_cross_entropy: a softcap leaves no expected rows",
    ),
    "a shard of the vocabulary without its group": (
        lambda: ops.vocab_cross_entropy(ONES(4, 5), INTS, 10, (0, 5)),
        "ValueError: vocab_cross_entropy: the shard [0, 5) is not all of the vocabulary [0, 10), "
        "but the group has one rank; pass group= of those with the other ids",
    ),
    "an argmax of a shard without its group": (
        lambda: ops.vocab_argmax(ONES(4, 5), 10, (5, 10)),
        "ValueError: vocab_argmax: the shard [5, 10) is not all of the vocabulary [0, 10)",
    ),
    "a draw from a shard without its group": (
        lambda: ops.vocab_sample(ONES(4, 0), 10, (10, 10), seed=1, step=0),
        "ValueError: vocab_sample: the shard [10, 10) is not all of the vocabulary [0, 10)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_arguments_are_refused_in_words_and_at_once(case):
    call, words = REFUSALS[case]
    error, _, text = words.partition(": ")
    before = time.process_time()
    with pytest.raises((ValueError, TypeError, IndexError)) as raised:
        call()
    assert type(raised.value).__name__ == error
    assert text in str(raised.value)
    assert time.process_time() - before < 2


PUBLIC = [name for name in REGISTERED if not IN_GRAPHS_OF_OTHERS.fullmatch(name)]


def _others(value: torch.Tensor, is_first: bool, any_type: bool) -> dict[str, torch.Tensor]:
    """What a tensor may not be, by words of the error."""
    others = {"dense tensor": value.to_sparse()}
    if not any_type:
        is_float = value.is_floating_point()
        others["floating point|Long"] = value.long() if is_float else value.int()
    return others if is_first else {**others, "on meta": value.to("meta")}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_tensor_of_another_kind_is_refused_by_name(name):
    """Of another layout, type or device; another number of dimensions may also be taken."""
    op, by = getattr(INTERNAL, name), f"^({name.removesuffix('_of_tokens')}|gather_tokens).*: "
    for sample in opcheck_samples(ops.ALONE)[name]:
        sample = [each.detach() if isinstance(each, torch.Tensor) else each for each in sample]
        tensors = [place for place, each in enumerate(sample) if isinstance(each, torch.Tensor)]
        for place in tensors:
            before, value, behind = sample[:place], sample[place], sample[place + 1 :]
            others = _others(value, place == tensors[0], name == "gather_from_region")
            for words, other in others.items():
                with pytest.raises((TypeError, ValueError), match=f"{by}.*({words})"):
                    op(*before, other, *behind)
            try:
                op(*before, value.unsqueeze(0), *behind)
            except ValueError as error:
                assert re.match(f"{by}.*(dimensions|shape)", str(error))  # noqa: PT017 (or it is taken)


OPS = [name for name in ops.__all__ if name.islower()]
WITH_A_GROUP = [name for name in OPS if "group" in inspect.signature(getattr(ops, name)).parameters]


@pytest.mark.parametrize("name", WITH_A_GROUP)
def test_what_is_no_group_is_refused_by_name(name):
    op = getattr(ops, name)
    others = {
        parameter.name: None
        for parameter in inspect.signature(op).parameters.values()
        if parameter.default is parameter.empty
    }
    with pytest.raises(TypeError, match=f"^{name}: group must be a parallel_ext.ops.Group"):
        op(**{**others, "group": None})


def test_the_ops_without_a_group_are_those_of_one_rank():
    assert sorted(set(OPS) - set(WITH_A_GROUP)) == [
        "block_experts",
        "fixed_gelu",
        "fixed_silu",
        "moe_gated_silu",
        "moe_linear",
        "moe_lora_linear",
        "moe_route_plan",
        "moe_router",
        "repeat_heads",
        "seeded_dropout",
        "sum_leaves",
    ]
