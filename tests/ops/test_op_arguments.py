"""What the ops refuse in words that name op and argument: wrapping sums, wrong shapes, no tensors.

Internal backward ops are called as anybody can call them, through ``torch.ops``.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_samples import REGISTERED, op_of, samples_of
from reference_ops import BOTH_PATHS, assert_all_raise
from test_every_op import PUBLIC
from torch.utils._pytree import tree_flatten, tree_unflatten

from parallel_ext import ops
from parallel_ext.ops import ExchangePlan

INTERNAL = torch.ops.parallel_ext
ONES, INTS = torch.ones, torch.zeros(4, dtype=torch.int64)

# Of an op what its error says, and how the arguments of its usual call are changed for that.
CHANGES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "moe_route_plan": [
        ("ValueError: the sum of experts_per_rank", {"experts_per_rank": [2**62] * 4 + [5]}),
        (
            "ValueError: are 1048577 experts; there must be 1 to 1048576",
            {"experts_per_rank": [2**20 + 1]},
        ),
        ("ValueError: experts_per_rank [0, 0] are 0 experts", {"experts_per_rank": [0, 0]}),
        ("ValueError: [3, -1] has a negative number", {"experts_per_rank": [3, -1]}),
        (
            "IndexError: choice 1 of token 0 is expert 4, outside of [0, 4)",
            {"experts_per_rank": [2, 2]},
        ),
        (
            "IndexError: choice 0 of token 0 is expert -1, outside of [0, 5)",
            {"expert_ids": torch.tensor([[-1, 1]])},
        ),
        ("ValueError: row_bytes must be in [0, 2147483648], got 46116860184", {"row_bytes": 2**62}),
        ("ValueError: rank 1 is not one of 1", {"rank": 1}),
    ],
    "moe_router": [
        ("ValueError: top_k must be in [1, 6] for logits of 6 experts, got 7", {"top_k": 7}),
        ("ValueError: top_k must be in [1, 6] for logits of 6 experts, got 0", {"top_k": 0}),
        (
            "ValueError: expert_ids must have the shape [5, 2], got [2, 2]",
            {"expert_ids": INTS.view(2, 2)},
        ),
        (
            "IndexError: choice 0 of token 0 is expert 6, outside of [0, 6)",
            {"expert_ids": torch.full((5, 2), 6)},
        ),
    ],
    "moe_router_backward": [
        (
            "ValueError: grad_weights must have the shape [5, 2], got [3, 2]",
            {"grad_weights": ONES(3, 2)},
        ),
        (
            "TypeError: grad_weights must be Float for logits in Float, got Double",
            {"grad_weights": ONES(5, 2).double()},
        ),
        (
            "IndexError: choice 0 of token 0 is expert 6, outside of [0, 6)",
            {"expert_ids": torch.full((5, 2), 6)},
        ),
    ],
    "moe_take_tokens": [
        (
            "ValueError: the sum of sizes",
            {"sizes": [2**63 - 1] * 2, "group_size": 2, "group_name": "x"},
        ),
        ("ValueError: 3 sizes were given for a group of 1 ranks", {"sizes": [1, 1, 3]}),
        ("ValueError: the sizes [4] add up to 4, but there are 5 tokens", {"sizes": [4]}),
        ("ValueError: sizes [-1] has a negative number", {"sizes": [-1]}),
        ("ValueError: rank 2 is not in [0, 1)", {"rank": 2}),
        (
            "ValueError: input of shape [5, 3] and weights of shape [4, 2] are not of the same",
            {"weights": ONES(4, 2)},
        ),
    ],
    "moe_dispatch": [
        (
            "ValueError: input of shape [5, 3], weights of shape [4, 2] and rows_of_choices of "
            "shape [4, 2] are not of the same tokens and choices",
            {"input": ONES(5, 3)},
        ),
        (
            "IndexError: rows_of_choices has 8 at 0, outside of [0, 8)",
            {"rows_of_choices": torch.full((4, 2), 8)},
        ),
        (
            "IndexError: tokens has -1 at 0, outside of [0, 4)",
            {"tokens": torch.full((8,), -1)},
        ),
        ("ValueError: 2 numbers in send are not one for each of the 5 experts", {"send": [8, 8]}),
        (
            "ValueError: the counts to send are of 9 choices, but rows_of_choices has the shape",
            {"send": [2, 2, 1, 1, 3, 9], "receive": [2, 2, 1, 1, 3, 9]},
        ),
        (
            "ValueError: send [4, -1, 1, 1, 3, 8] has a negative number",
            {"send": [4, -1, 1, 1, 3, 8]},
        ),
        (
            "ValueError: rank 0 sends itself 7 rows for 8 choices",
            {"send": [2, 1, 1, 1, 3, 7], "receive": [2, 1, 1, 1, 3, 7]},
        ),
    ],
    "moe_dispatch_backward": [
        ("ValueError: 0 rows, but the counts say 8", {"grad_rows": ONES(0, 3)}),
        ("ValueError: grad_weights must have the shape [8], got [1]", {"grad_weights": ONES(1)}),
        (
            "TypeError: grad_weights must be Float for grad_rows in Float, got Double",
            {"grad_weights": ONES(8).double()},
        ),
        (
            "IndexError: rows_of_choices has 1000000 at 0",
            {"rows_of_choices": torch.full((4, 2), 10**6)},
        ),
        ("IndexError: origins has -5 at", {"origins": torch.full((8,), -5)}),
    ],
    "moe_combine": [
        (
            "ValueError: 8 rows, but the counts say 1000000003",
            {"receive": [10**9, 0, 1, 0, 2, 8]},
        ),
        ("ValueError: the sum of receive", {"receive": [2**62] * 4 + [4, 4]}),
        (
            "ValueError: rank 0 sends itself [2, 1, 1, 1, 3] in 8 rows, but receives",
            {"receive": [1, 2, 1, 1, 3, 8]},
        ),
        ("ValueError: 4 rows, but the counts say 8", {"rows": ONES(4, 3)}),
    ],
    "moe_combine_backward": [("IndexError: tokens has 2 at", {"grad_output": ONES(1, 3)})],
    "moe_gated_silu": [
        ("ValueError: gate_up of shape [5, 3] has no two halves", {"gate_up": ONES(5, 3)}),
        ("ValueError: weights of shape [3] are not one for each row", {"weights": ONES(3)}),
        (
            "TypeError: weights must be Float for gate_up in Float, got Double",
            {"weights": ONES(5).double()},
        ),
    ],
    "moe_gated_silu_backward": [
        ("ValueError: weights of shape [0] are not one for each row", {"weights": ONES(0)}),
        (
            "ValueError: grad_output must have the shape [5, 6], got [5, 3]",
            {"gate_up": ONES(5, 12)},
        ),
    ],
    "moe_linear": [
        ("ValueError: the sum of counts", {"counts": [2**63 - 1, 2**63 - 1, 4]}),
        (
            "ValueError: the counts [1, 1, 1] add up to 3, but there are 5 rows",
            {"counts": [1, 1, 1]},
        ),
        (
            "ValueError: rows of shape [5, 3] do not fit weights of shape [3, 4, 5]",
            {"weight": ONES(3, 4, 5)},
        ),
        (
            "TypeError: weight is Double but rows is Float; cast one of them",
            {"weight": ONES(3, 2, 3).double()},
        ),
    ],
    "moe_linear_backward": [
        (
            "ValueError: rows of shape [5, 6] do not fit weights of shape [3, 2, 3]",
            {"rows": ONES(5, 6)},
        ),
        (
            "ValueError: grad_output must have the shape [5, 2], got [5, 4]",
            {"grad_output": ONES(5, 4)},
        ),
    ],
    "moe_lora_linear": [
        (
            "ValueError: lora_a of shape [2, 4, 3] does not fit weights of shape [3, 2, 3]; it "
            "must be [3, r, 3]",
            {"lora_a": ONES(2, 4, 3)},
        ),
        (
            "ValueError: lora_b of shape [3, 2, 5] does not fit lora_a of shape [3, 4, 3] and "
            "weights of shape [3, 2, 3]; it must be [3, 2, 4]",
            {"lora_b": ONES(3, 2, 5)},
        ),
        (
            "TypeError: lora_b is Float but lora_a is Double; cast one of them",
            {"lora_a": ONES(3, 4, 3).double()},
        ),
        (
            "ValueError: the counts [1, 2, 1] add up to 4, but there are 5 rows",
            {"counts": [1, 2, 1]},
        ),
    ],
    "moe_lora_linear_backward": [
        (
            "ValueError: lora_a_out must have the shape [5, 4], got [1, 4]",
            {"lora_a_out": ONES(1, 4)},
        ),
    ],
    "column_linear": [
        (
            "ValueError: input of shape [2, 3] does not fit the local weight of shape [5, 4]",
            {"input": ONES(2, 3)},
        ),
        ("ValueError: input of shape [] does not fit", {"input": ONES(())}),
        ("ValueError: row_stride 3 is smaller than the 5 features of a row", {"row_stride": 3}),
    ],
    "column_linear_backward": [
        (
            "ValueError: grad_output must have the shape [3, 5], got [4, 5]",
            {"grad_output": ONES(4, 5)},
        ),
    ],
    "row_linear": [
        (
            "ValueError: input of shape [2, 3] does not fit the local weight of shape [4, 5]; the "
            "last dimension must be 5",
            {"input": ONES(2, 3)},
        ),
        (
            "ValueError: bias of shape [3] does not fit the local weight of shape [4, 5]",
            {"bias": ONES(3)},
        ),
        (
            "ValueError: no live process group is named 'nowhere'",
            {"group_size": 4, "group_name": "nowhere"},
        ),
    ],
    "lora_linear": [
        (
            "ValueError: input of shape [3, 3] does not fit the local weight of shape [4, 5]",
            {"input": ONES(3, 3)},
        ),
        (
            "ValueError: lora_a of shape [2, 9] does not fit the local weight of shape [4, 5]; its "
            "last dimension must be 5",
            {"lora_a": ONES(2, 9)},
        ),
        (
            "ValueError: lora_b of shape [8, 2] does not fit lora_a of shape [2, 5] and the local "
            "weight of shape [4, 5]; it must be [4, 2]",
            {"lora_b": ONES(8, 2)},
        ),
        (
            "TypeError: lora_b is Double but lora_a is Float; cast one of them",
            {"lora_b": ONES(4, 2).double()},
        ),
        *(
            (
                f"ValueError: dropout must be in [0, 1], got {p}",
                {"dropout": p, "dropout_counter": [1, 1, 0, 0]},
            )
            for p in (1.5, float("nan"))
        ),
        *(
            (f"ValueError: {words}", {"dropout": 0.5, "dropout_counter": [1, *counter]})
            for words, counter in {
                "step 4294967296 of dropout_counter is outside [0, 2^32)": (2**32, 0, 0),
                "the tokens from 4294967295 of dropout_counter on, 3 of them, leave [0, 2^32)": (
                    *(1, 2**32 - 1, 0),
                ),
                "the tokens from 9223372036854775807": (1, 2**63 - 1, 0),
                "the features from -1 of dropout_counter on, 5 of them, leave [0, 2^35)": (
                    *(1, 0, -1),
                ),
                "the features from 34359738364 of dropout_counter on, 5 of": (1, 0, 2**35 - 4),
                "the features from 9223372036854775807": (1, 0, 2**63 - 1),
            }.items()
        ),
    ],
    "lora_linear_backward": [
        (
            "ValueError: lora_a_out must have the shape [2, 3], got [2, 1]",
            {"lora_a_out": ONES(2, 1)},
        ),
    ],
    "seeded_dropout": [
        ("ValueError: input must have a dimension of features", {"input": torch.tensor(1.0)}),
        (
            "ValueError: dropout_counter must be [key, step, token, feature], got [1, 1, 0]",
            {"dropout_counter": [1, 1, 0]},
        ),
    ],
    "vocab_embedding": [
        (
            "ValueError: the 5 rows from 9223372036854775807 on are not inside",
            {"vocab_start": 2**63 - 1},
        ),
        (
            "ValueError: no live process group is named 'nowhere'",
            {"sizes": [], "group_size": 2**31 - 1, "group_name": "nowhere"},
        ),
    ],
    "vocab_embedding_backward": [
        (
            "ValueError: grad_output of shape [2, 3] is not one row for each of ids [2, 3]",
            {"grad_output": ONES(2, 3)},
        ),
        ("ValueError: num_rows must be at least 0, got -2", {"num_rows": -2}),
    ],
    "vocab_cross_entropy_backward": [
        ("ValueError: labels of shape [4] do not fit the 9 tokens", {"logits": ONES(9, 5)}),
    ],
    "vocab_cross_entropy_backward_": [
        ("ValueError: logits hold 2 of the vocabulary", {"logits": ONES(4, 2)}),
        (
            "ValueError: columns of logits with strides [1, 4] are not one apart",
            {"logits": ONES(5, 4).T},
        ),
    ],
    "linear_vocab_cross_entropy_backward": [
        (
            "ValueError: the normalizer of 4 tokens has shape [2, 4]",
            {"normalizer": ONES(2, 1)},
        ),
    ],
    "linear_vocab_cross_entropy_frozen_backward": [
        (
            "ValueError: expected_rows must have the shape [4, 3], got [1, 3]",
            {"expected_rows": ONES(1, 3)},
        ),
        ("ValueError: a softcap leaves no expected rows", {"softcap": 30.0}),
    ],
    "sum_leaves": [
        ("ValueError: [0, 1] are not a start and a width for each of 2 values", {"nodes": [0, 1]}),
        ("ValueError: nodes [1, 2, 3, 1] are not nodes of a tree", {"nodes": [1, 2, 3, 1]}),
        ("ValueError: nodes [0, 1, 0, 1] are not nodes of a tree", {"nodes": [0, 1, 0, 1]}),
        ("ValueError: [1, 1, 2, 1] are not nodes of a tree that follow", {"nodes": [1, 1, 2, 1]}),
        ("ValueError: nodes [0, 3, 3, 3] are not nodes of a tree", {"nodes": [0, 3, 3, 3]}),
        ("ValueError: values must have the shape [2], got [3]", {"values": [ONES(2), ONES(3)]}),
        (
            "TypeError: values of float64 and of other dtypes cannot be summed together",
            {"values": [ONES(2), ONES(2).double()], "dtype": torch.float64},
        ),
    ],
    "block_experts": [
        (
            "ValueError: 1 counts are not one for each of 3 experts and 1 leaves",
            {"counts": [2]},
        ),
        (
            "ValueError: the counts [2, 1, 1] add up to 4, but there are 5 rows",
            {"counts": [2, 1, 1]},
        ),
        (
            "ValueError: there are no leaves in weight of shape [0, 3, 2, 3]",
            {"weight": ONES(0, 3, 2, 3), "counts": []},
        ),
    ],
    "block_linears": [
        ("ValueError: blocks [0, 4, 0] are not pairs of start", {"blocks": [0, 4, 0] * 3}),
        ("ValueError: [0, 4, 0, 4] are not equally many for each of 3", {"blocks": [0, 4] * 2}),
        ("ValueError: blocks [0, 5] do not cover [0, 4)", {"blocks": [0, 5] * 3}),
        (
            "ValueError: the block [2, 4) does not follow one that ends at 0",
            {"blocks": [2, 4, 0, 2] * 3, "num_blocks": 2},
        ),
        ("ValueError: copies must divide the number of blocks 1, got 0", {"copies": 0}),
        ("ValueError: rank 0 holds 4 of the 4 blocks, got 1", {"num_blocks": 4}),
        (
            "TypeError: third is Double but input is Float",
            {"third": torch.zeros(0, 3, dtype=torch.float64)},
        ),
    ],
    "block_row_linear": [
        (
            "ValueError: rank 0 holds 3 of the 3 blocks, got 2",
            {"blocks": [0, 2, 2, 4], "num_blocks": 3},
        ),
        ("ValueError: blocks [] do not cover [0, 4)", {"blocks": [], "num_blocks": 0}),
    ],
    "block_row_linear_backward": [
        ("ValueError: blocks [0, 2] do not cover [0, 4)", {"blocks": [0, 2]}),
    ],
    "block_bias": [
        (
            "ValueError: the block [0, 2) does not follow one that ends at 2",
            {"bias": ONES(2), "blocks": [0, 2, 0, 2], "num_blocks": 2},
        ),
        (
            "ValueError: copies must divide the number of blocks 3, got 2",
            {"blocks": [0, 2, 2, 4], "num_blocks": 3, "copies": 2},
        ),
        (
            "ValueError: rank 0 holds 4 of the 4 blocks, got 1",
            {"num_blocks": 4, "copies": 2},
        ),
    ],
    "block_bias_backward": [
        (
            "ValueError: grad_output of shape [2, 3] must have 4 features",
            {"grad_output": ONES(2, 3)},
        ),
        ("ValueError: copies must divide the number of blocks 1, got 0", {"copies": 0}),
        (
            "ValueError: rank 0 holds 4 of the 4 blocks, got 1",
            {"num_blocks": 4, "copies": 2},
        ),
    ],
    "block_scale": [("ValueError: rank 0 holds 4 of the 4 blocks", {"num_blocks": 4})],
    "block_scale_backward": [
        (
            "ValueError: rank 0 holds 4 of the 4 blocks",
            {"num_blocks": 4, "needed": [True, False]},
        )
    ],
    "block_linear_cross_entropy": [
        ("ValueError: reduction must be 'sum' or 'mean'", {"reduction": "none"}),
        (
            "ValueError: the block [2, 5) does not follow one that ends",
            {"blocks": [2, 5], "num_blocks": 1},
        ),
        ("ValueError: rank 0 holds 4 of the 4 blocks, got 2", {"num_blocks": 4}),
    ],
    "vocab_sample": [
        (
            "ValueError: vocab_size must be at least 1, got 0",
            {"logits": ONES(4, 0), "vocab_size": 0, "vocab_stop": 0, "top_k": 0, "top_p": 0.5},
        ),
    ],
    "repeat_heads": [
        ("ValueError: input of shape [2, 6] is not of heads of 3, each", {"times": 2**62}),
        ("ValueError: input of shape [2, 6] is not of heads of 4", {"head_dim": 4}),
    ],
    "repeat_heads_backward": [
        (
            "ValueError: grad_output of shape [2, 12] is not of heads of 4294967296",
            {"head_dim": 2**32, "times": 2**32},
        ),
        ("ValueError: grad_output of shape [2, 12] is not of heads of 5", {"head_dim": 5}),
    ],
}


def _assert_refused(call: Callable[[], Any], name: str, words: str) -> None:
    """At once: nothing is computed first, and no memory is asked for."""
    error, _, text = words.partition(": ")
    before = time.process_time()
    with pytest.raises((ValueError, TypeError, IndexError)) as raised:
        call()
    assert type(raised.value).__name__ == error
    assert str(raised.value).startswith(name)
    assert "parallel_ext::" not in str(raised.value)
    assert text in str(raised.value)
    assert time.process_time() - before < 2


@pytest.mark.parametrize(
    ("name", "words", "change"),
    [(name, *each) for name, changes in CHANGES.items() for each in changes],
)
def test_changed_arguments_are_refused_by_the_name_of_the_op(name, words, change):
    op = getattr(INTERNAL, name).default
    names = [each.name for each in op._schema.arguments]
    usual = dict(zip(names, samples_of(name, ops.ALONE)[0], strict=False))
    assert change.keys() <= usual.keys()
    arguments = {**usual, **change}
    public = name.partition("_backward")[0].removesuffix("_frozen")
    _assert_refused(lambda: op(*arguments.values()), public, words)


# What only Python or Meta kernels meet: call, and the error's type and a part of its text.
REFUSALS = {
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
    "a loss of blocks in fp16": (
        lambda: ops.block_linear_cross_entropy(
            *(ONES(1, 2).half(), ONES(4, 2).half(), torch.zeros(1, dtype=torch.int64)),
            *(ops.Blocks(((0, 4),), 1), 4, (0, 4), ops.LossOptions()),
        ),
        "TypeError: block_linear_cross_entropy: gradients before the loss scale do not fit fp16",
    ),
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
    "no range": (
        lambda: ops.linear_vocab_cross_entropy(ONES(4, 5), ONES(3, 5), INTS, 3, None),
        "TypeError: linear_vocab_cross_entropy: vocab_range must be (start, stop), got None",
    ),
    "no dropout": (
        lambda: ops.seeded_dropout(ONES(2), None),
        "TypeError: seeded_dropout: dropout must be a Dropout, got None",
    ),
    "an argmax of ids that int32 does not hold": (
        lambda: ops.vocab_cross_entropy_statistics(
            *(ONES(4, 5), INTS, 2**31, (0, 2**31)), argmax=True
        ),
        "ValueError: argmax is for at most 2147483647 ids, got 2147483648",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_arguments_are_refused_in_words_and_at_once(case):
    call, words = REFUSALS[case]
    _assert_refused(call, "", words)


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
    known_as = re.sub("_of_tokens$|_on_device$", "", name)
    op, by = getattr(INTERNAL, name), f"^({known_as}|gather_tokens): "
    for sample in samples_of(name, ops.ALONE):
        leaves, form = tree_flatten(list(sample))  # also the tensors of lists
        leaves = [each.detach() if isinstance(each, torch.Tensor) else each for each in leaves]
        tensors = [place for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        for place in tensors:
            before, value, behind = leaves[:place], leaves[place], leaves[place + 1 :]
            others = _others(value, place == tensors[0], name == "gather_from_region")
            for words, other in others.items():
                arguments = tree_unflatten([*before, other, *behind], form)
                with pytest.raises((TypeError, ValueError), match=f"{by}.*({words})"):
                    op(*arguments)
            try:
                op(*tree_unflatten([*before, value.unsqueeze(0), *behind], form))
            except ValueError as error:
                assert re.match(f"{by}.*(dimensions|shape)", str(error))  # noqa: PT017 (or it is taken)


OF_A_RANK = [
    name
    for name in REGISTERED
    if {"rank", "group_name"} <= {each.name for each in op_of(name)._schema.arguments}
    and name != "linear_vocab_cross_entropy"  # which gathers tokens by another of them
]


def _call_as_another_rank(group: ops.Group, name: str) -> None:
    names = [each.name for each in op_of(name)._schema.arguments]
    arguments = dict(zip(names, samples_of(name, group)[0], strict=True))
    op_of(name)(*{**arguments, "rank": 1 - group.rank}.values())


@BOTH_PATHS
@pytest.mark.parametrize("name", OF_A_RANK)
def test_the_rank_of_another_process_is_refused(name, aten):
    text = " was given, but this process is rank "
    assert_all_raise(_call_as_another_rank, name, error="ValueError", text=text, aten=aten)


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
        "fixed_sigmoid",
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
