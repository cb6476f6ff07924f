"""What holds for every registered op: samples exist, opcheck passes, it sends what it should.

A new op needs an entry in :func:`opcheck_samples`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from reference_ops import BOTH_PATHS, aten_path, counted_both_ways, on_ranks, own_range
from torch.autograd import forward_ad

from parallel_ext.ops import (
    ALONE,
    ExchangePlan,
    Group,
    column_linear,
    moe_dispatch,
    moe_route_plan,
)
from parallel_ext.sharding.layout import split

NAMESPACE = "parallel_ext::"
REGISTERED = sorted(
    {
        name.removeprefix(NAMESPACE).split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(NAMESPACE)
    }
)
IGNORED = -100


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that require a gradient, where the dtype can."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def _plain(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def _detached(tensors: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(each if each is None else each.detach() for each in tensors)


def opcheck_samples(group: Group) -> dict[str, list[tuple]]:
    """op -> arguments of its calls, for this rank of the group; the first call is a usual one."""
    of_group = (group.size, group.name)
    bf16 = torch.bfloat16
    start, stop = own_range(5, group)
    own = stop - start
    sizes = [last - first for first, last in split(5, group.size)]
    tokens, two = ([last - first for first, last in split(n, group.size)] for n in (3, 2))
    ids, labels = torch.tensor([[0, 4, 2], [4, 4, 0]]), torch.tensor([0, 4, IGNORED, 2])
    choices = torch.tensor([[0, 4], [4, 2], [1, 0], [4, 3]])
    route = moe_route_plan(choices, sizes, 4096, group.rank)
    # Every rank has the same tokens, but sends itself rows of its own.
    messages = []
    for rank in range(group.size):
        of_rank = moe_route_plan(choices, sizes, 4096, rank)
        messages.append([*of_rank.counts.tolist(), *of_rank.rows_per_rank.tolist()])
    plan = (*ExchangePlan.of(messages, sizes, group.rank), group.rank, *of_group)
    maps = route[2:]
    origins = moe_dispatch(_plain(4, 3), _plain(4, 2), route, ExchangePlan(*plan[:3]), group)[2]
    brought = origins.numel()
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0])
    plain, none = (0.0, 0.0, None, 1.0), [False] * 3
    smooth = (0.1, 1e-3, 5.0, 0.7)
    # The options of the loss, after the class weight.
    kinds = {kind: (5, start, stop, IGNORED, kind, *plain) for kind in ("mean", "sum", "none")}
    smooth_mean = (5, start, stop, IGNORED, "mean", *smooth)
    smooth_none = (5, start, stop, IGNORED, "none", *smooth)
    whole_on_one_rank = (5, *((0, 5) if group.rank == 0 else (5, 5)), IGNORED, "mean", *smooth)
    # Blocks of 4 features a rank, one or two a rank.
    blocks, last_of_blocks = [0, 4], (group.size, *of_group)
    of_blocks = tuple(_values(4, 3) for _ in range(3))
    bf16_blocks = tuple(_values(4, 3, dtype=bf16) for _ in range(3))
    of_scale = (_plain(2, 4, 3), _plain(2, 4, 3), _plain(3), blocks)
    two_and_none = [0, 1, 1, 4, 0, 3, 3, 4, 0, 0, 0, 0]
    last_of_two = (2 * group.size, *of_group)
    in_blocks = ([0, 1, 1, own], 2 * group.size)

    def of_head(r: int) -> tuple[torch.Tensor, ...]:
        return _values(4, 3), _values(own, 3), _values(4, r), _values(own, r)

    bf16_head = tuple(_plain(*size, dtype=bf16) for size in ((4, 3), (own, 3), (4, 2), (own, 2)))
    width_of_whole = 5 if group.rank == 0 else 0
    losses = [  # tensors, what is wanted, options
        *(((_values(4, own), labels), none, (None, *options)) for options in kinds.values()),
        ((_values(4, own + 3)[:, :own], labels), none, (weight, *kinds["mean"])),
        ((_values(4, own, dtype=bf16), labels), [True, False, True], (None, *kinds["sum"])),
        ((_values(0, own), labels[:0]), [True] * 3, (weight.double(), *kinds["none"])),
        ((_values(4, width_of_whole), labels), [True] * 3, (weight, *whole_on_one_rank)),
    ]
    heads = [  # trained for each reduction, frozen, all statistics, no token
        *(
            ((_values(4, 3), _values(own, 3), _values(own), labels), none, (None, *options))
            for options in kinds.values()
        ),
        ((_values(4, 3), _plain(own, 3), None, labels), none, (weight, *kinds["mean"])),
        ((_values(4, 3), _plain(own, 3), None, labels), [True] * 3, (None, *smooth_mean)),
        ((_values(4, 3, dtype=bf16), _values(own, 3, dtype=bf16), None, labels), none)
        + ((weight, *smooth_mean),),
        ((_values(0, 3), _values(own, 3), None, labels[:0]), none, (None, *kinds["sum"])),
    ]
    all_but_bias, frozen = [True, True, False], [True, False, False]
    needs = [[True] * 3, none, frozen, all_but_bias, frozen, all_but_bias, none]
    mean_loss, sum_loss = (None, *kinds["mean"]), (None, *kinds["sum"])
    weighted = (weight, *smooth_none)
    per_token = (_plain(8)[::2], _plain(4), _plain(1).expand(4))
    return {
        "reduce_from_region": [
            (_values(3, 4), *of_group),
            (_values(2, 4, 3).transpose(0, 2), *of_group),
            (_values(0, 4), *of_group),
        ],
        "copy_to_region": [
            (_values(3, 4), *of_group),
            (_values(4).expand(3, 4), *of_group),
            (_values(0, 4), *of_group),
        ],
        "gather_from_region": [
            (_values(3, own), sizes, group.rank, *of_group),
            (_values(own, 3).T, sizes, group.rank, *of_group),
            (torch.ones(2, 0), [0] * group.size, group.rank, *of_group),
            (torch.arange(own), sizes, group.rank, *of_group),
        ],
        "take_tokens": [
            (_values(2, 5, 3), sizes, group.rank, *of_group),
            (_values(3, 5, dtype=bf16).T, [5, *[0] * (group.size - 1)], group.rank, *of_group),
            (_values(0, 5, 3), sizes, group.rank, *of_group),
        ],
        "gather_tokens": [
            (_values(2, own, 3), sizes, group.rank, True, *of_group),
            (_values(3, own, dtype=bf16).T, sizes, group.rank, False, *of_group),
            (_values(2, 0, 3), [0] * group.size, group.rank, True, *of_group),
        ],
        "sum_tokens": [
            (_values(2, 5, 3), sizes, group.rank, *of_group),
            (_values(3, 5, dtype=bf16).T, sizes, group.rank, *of_group),
            (_values(0, 5, 3), sizes, group.rank, *of_group),
        ],
        "column_linear": [
            (_values(3, 4), _values(own, 4), _values(own), own, *of_group),
            (_values(2, 3, 4), _values(own, 4), None, 8, *of_group),
            (_values(4), _values(own, 4), None, own, *of_group),
            (_values(0, 4), _values(0, 4), None, 8, *of_group),
        ],
        "column_linear_backward": [
            (_plain(3, own), _plain(3, 4), _plain(own, 4), [True, True, True], *of_group),
            (_plain(2, 3, 8)[..., :own], _plain(2, 3, 4), _plain(own, 4), [1, 0, 0], *of_group),
            (_plain(0, own), _plain(0, 4), _plain(own, 4), [False, True, False], *of_group),
        ],
        "column_linears": [
            (
                *(_values(3, 4), _values(own, 4), _values(2, 4), _values(0, 4)),
                *(_values(own), None, None, *of_group),
            ),
            (
                *(_values(2, 3, 4, dtype=bf16), _plain(own, 4, dtype=bf16)),
                *(_values(3, 4, dtype=bf16), _values(own, 4, dtype=bf16)),
                *(None, _values(3, dtype=bf16), _plain(own, dtype=bf16), *of_group),
            ),
            (
                *(_plain(0, 4), _values(own, 4), _values(0, 4), _values(2, 4)),
                *(None, None, None, *of_group),
            ),
            (_values(4), *(_values(2, 4) for _ in range(3)), None, None, None, *of_group),
        ],
        "column_linears_backward": [
            (
                *(_plain(3, own), _plain(3, 2), _plain(3, 0), _plain(3, 4), _plain(own, 4)),
                *(_plain(2, 4), _plain(0, 4), [1, 1, 1, 0, 1, 0, 0], *of_group),
            ),
            (
                *(_plain(2, 3, 8)[..., :own], _plain(2).expand(2, 3, 2), _plain(2, 3, 1)),
                *(_plain(2, 3, 4), _plain(own, 4), _plain(2, 4), _plain(1, 4)),
                *([False, False, True, True, False, True, True], *of_group),
            ),
            (
                *(_plain(0, own), _plain(0, 2), _plain(0, 3), _plain(0, 4), _plain(own, 4)),
                *(_plain(2, 4), _plain(3, 4), [True] * 7, *of_group),
            ),
        ],
        "row_linear": [
            (_values(3, own), _values(4, own), _values(4), *of_group),
            (_values(own, 3, 2).mT.transpose(0, 2), _values(4, own), None, *of_group),
            (_values(2, 0), _values(4, 0), None, *of_group),
        ],
        "seeded_dropout": [
            (_values(2, 3, 4), 0.4, [123456789, 7, 5, 37]),
            (_values(0, 4), 0.0, []),
            (_values(5, dtype=bf16), 1.0, [1, 2, 3, 4]),
        ],
        "seeded_dropout_backward": [(_plain(2, 3, 4), 0.4, [123456789, 7, 5, 37])],
        "lora_linear": [
            (_values(3, own), _values(4, own), _values(2, own), _values(4, 2), _values(4), 0.5)
            + (0.0, [], *of_group),
            (_values(2, 3, 4), _values(own, 4), _values(2, 4), _values(own, 2), None, 0.5)
            + (0.4, [123456789, 7, 5, 37], 1, ""),
            (_values(0, 4), _plain(own, 4), _values(2, 4), _values(own, 2), None, 2.0)
            + (0.4, [123456789, 7, 5, 37], 1, ""),
        ],
        "lora_linear_forward": [
            (_plain(3, own), _plain(4, own), _plain(2, own), _plain(4, 2), _plain(4), 0.5)
            + (0.4, [123456789, 7, 5, 37], *of_group),
            (_plain(2, 3, 4), _plain(own, 4), _plain(2, 4), _plain(own, 2), None, 0.5)
            + (0.0, [], 1, ""),
        ],
        "lora_linear_backward": [
            (_plain(3, own), _plain(3, 4), _plain(own, 4), _plain(2, 4), _plain(own, 2))
            + (_plain(2, 3), 0.5, 0.0, [], [True] * 5),
            (_plain(2, 3, own), _plain(2, 3, 4), _plain(own, 4), _plain(2, 4), _plain(own, 2))
            + (_plain(2, 6), 0.5, 0.4, [123456789, 7, 5, 37], [True, False, True, False, False]),
        ],
        "vocab_embedding": [
            (ids, _values(own, 2), 5, start, None, sizes, *of_group),
            (ids.T, _values(own, 2, dtype=bf16), 5, start, 4, [], *of_group),
            (ids[:0], _values(own, 2), 5, start, None, sizes, *of_group),
        ],
        "vocab_embedding_backward": [
            (_plain(2, 3, 7), ids, own, start, None),
            (_plain(7).expand(2, 3, 7), ids, own, start, 4),
            (_plain(2, 3, 7), ids, 0, 5, None),
        ],
        "vocab_embedding_of_tokens": [
            (ids, _values(own, 2), 5, start, None, sizes, tokens, group.rank, *of_group),
            (ids.T, _values(own, 2, dtype=bf16), 5, start, 4, [], two, group.rank, *of_group),
            (ids[:0], _values(own, 2), 5, start, None, sizes, tokens, group.rank, *of_group),
        ],
        "vocab_embedding_of_tokens_backward": [
            (_plain(2, tokens[group.rank], 7), ids, own, 5, start, None, sizes, tokens)
            + (group.rank, *of_group),
            (_plain(7).expand(3, two[group.rank], 7), ids.T, own, 5, start, 4, [], two)
            + (group.rank, *of_group),
        ],
        "vocab_cross_entropy": [
            (*tensors, wanted, False, *of_group, *options) for tensors, wanted, options in losses
        ],
        "vocab_cross_entropy_forward": [
            (*_detached(tensors), wanted, *of_group, *options)
            for tensors, wanted, options in losses
        ],
        "vocab_cross_entropy_backward": [
            (_plain(), None, None, _plain(4, own), labels, _plain(2, 4), *mean_loss),
            (*per_token, _plain(4, own + 3)[:, :own], labels, _plain(3, 4), *weighted),
            (None, _plain(4), None, _plain(own, 4).T, labels, _plain(2, 4), *sum_loss),
            (_plain(), None, None, _plain(4, 4, 8)[:, :1, 0], labels, _plain(2, 4), None)
            + (5, start, start + 1, IGNORED, "sum", *plain),
        ],
        "vocab_cross_entropy_backward_": [
            (_plain(), None, None, _plain(4, own), labels, _plain(2, 4), *mean_loss),
            (*per_token, _plain(4, own + 3)[:, :own], labels, _plain(3, 4), *weighted),
        ],
        "linear_vocab_cross_entropy": [
            *(
                (*tensors, wanted, [], group.rank, *of_group, *options)
                for tensors, wanted, options in heads
            ),
            (_values(2, two[group.rank], 3), _values(own, 3), _values(own), labels, [True] * 3)
            + (two, group.rank, *of_group, None, *smooth_mean),
            (_values(2, two[group.rank], 3), _plain(own, 3), None, labels, none)
            + (two, group.rank, *of_group, None, *kinds["none"]),
        ],
        "linear_vocab_cross_entropy_forward": [
            (*_detached(tensors), wanted, needed, *of_group, *options)
            for (tensors, wanted, options), needed in zip(heads, needs, strict=True)
        ],
        "linear_vocab_cross_entropy_backward": [
            (_plain(), None, None, _plain(4, 3), _plain(own, 3), _plain(own), labels)
            + (_plain(2, 4), [True] * 3, *mean_loss),
            (*per_token, _plain(4, 3), _plain(own, 3), None, labels, _plain(3, 4))
            + ([False, True, False], *weighted),
            (None, _plain(4), None, _plain(4, 3, dtype=bf16), _plain(own, 3, dtype=bf16), None)
            + (labels, _plain(2, 4), [True, False, False], *sum_loss),
        ],
        "linear_vocab_cross_entropy_frozen_backward": [
            (*per_token[:2], _plain(4, 3), _plain(own, 3), labels, _plain(2, 4), weight)
            + (5, start, stop, IGNORED, "none", 0.1, 1e-3, None, 0.7),
            (_plain(), None, _plain(4, 3), _plain(0, 3), labels, _plain(2, 4), None)
            + (5, 5, 5, IGNORED, "mean", *plain),
        ],
        "vocab_argmax": [
            (_plain(4, own), 5, start, stop, *of_group),
            (_values(own, 4, dtype=bf16).T, 5, start, stop, *of_group),
            (_plain(0, own), 5, start, stop, *of_group),
            (_plain(4, width_of_whole), *whole_on_one_rank[:3], *of_group),
        ],
        "vocab_sample": [
            (_plain(4, own), 5, start, stop, 1.0, 0, 1.0, 0.0, 7, 0, *of_group),
            (_values(own, 4, dtype=bf16).T, 5, start, stop, 0.7, 3, 0.9, 0.1, 2**62, 3, *of_group),
            (_plain(4, own + 3)[:, :own], 5, start, stop, 2.0, 0, 0.5, 0.0, 7, 2**33, *of_group),
            (_plain(0, own), 5, start, stop, 1.0, 0, 0.5, 0.1, 7, 0, *of_group),
            (_plain(4, width_of_whole), *whole_on_one_rank[:3], 1.0, 4, 1.0, 0.2, 7, 0, *of_group),
        ],
        "moe_router": [
            (_values(5, 6), None, 2, True),
            (_values(6, 4, dtype=bf16).T, None, 3, False),
            (_values(4, 5), choices, 2, True),
            (_values(0, 6), None, 6, True),
        ],
        "moe_router_backward": [
            (_plain(4, 2), _plain(4, 5), choices, True),
            (_plain(1).expand(4, 2), _plain(5, 4, dtype=bf16).T, choices, False),
        ],
        "moe_route_plan": [
            (choices, sizes, 4096, group.rank),
            (choices[:0], [1], 0, 0),
            (choices.T, sizes, 0, group.rank),
        ],
        "moe_dispatch": [
            (_values(4, 3), _values(4, 2), *maps, *plan),
            (_values(3, 4, dtype=bf16).T, _plain(2, 4).T, *maps, *plan),
        ],
        "moe_dispatch_backward": [
            (_plain(brought, 3), _plain(brought), maps[0], maps[1], origins, torch.float32)
            + ([True, True], *plan),
            (_plain(3, brought).T, _plain(1).expand(brought), maps[0], maps[1], origins, bf16)
            + ([True, False], *plan),
        ],
        "moe_combine": [
            (_values(brought, 3), origins, maps[0], maps[2], *plan),
            (_values(3, brought, dtype=bf16).T, origins, maps[0], maps[2], *plan),
        ],
        "moe_combine_backward": [
            (_plain(4, 3), origins, maps[2], *plan),
            (_plain(3).expand(4, 3), origins, maps[2], *plan),
        ],
        "moe_gated_silu": [
            (_values(5, 6), _values(5)),
            (_values(6, 5, dtype=bf16).T, _plain(10)[::2]),
            (_values(0, 6), _values(0)),
        ],
        "moe_gated_silu_backward": [
            (_plain(5, 3), _plain(5, 6), _plain(5)),
            (_plain(3).expand(5, 3), _plain(6, 5).T, _plain(10)[::2]),
        ],
        "moe_linear": [
            (_values(5, 3), _values(3, 2, 3), [2, 0, 3]),
            (_values(3, 5).T, _values(3, 4, 2).transpose(0, 2), [5, 0]),
            (_values(0, 3), _values(2, 2, 3), [0, 0], 0.5),
        ],
        "moe_linear_backward": [
            (_plain(5, 2), _plain(5, 3), _plain(3, 2, 3), [2, 0, 3], [True, True], 0.5),
            (_plain(2).expand(5, 2), _plain(3, 5).T, _plain(3, 2, 3), [2, 0, 3], [True, False])
            + (1.0,),
        ],
        "moe_linear_on_device": [
            (_values(5, 3), _values(3, 2, 3), torch.tensor([2, 0, 3])),
            (_values(3, 5).T, _values(3, 4, 2).transpose(0, 2), torch.tensor([5, 9, 0])[::2]),
            (_values(0, 3), _values(2, 2, 3), torch.tensor([0, 0]), 0.5),
        ],
        "moe_linear_on_device_backward": [
            (_plain(5, 2), _plain(5, 3), _plain(3, 2, 3), torch.tensor([2, 0, 3]), [True, True])
            + (0.5,),
            (_plain(2).expand(5, 2), _plain(3, 5).T, _plain(3, 2, 3), torch.tensor([2, 0, 3]))
            + ([True, False], 1.0),
        ],
        "moe_lora_linear": [
            (_values(5, 3), _values(3, 2, 3), _values(3, 4, 3), _values(3, 2, 4), [2, 0, 3], 0.5),
            (_values(3, 5).T, _plain(3, 4, 2).transpose(0, 2), _values(2, 1, 3))
            + (_values(4, 1, 2).permute(2, 0, 1), [5, 0], 2.0, 0.5),
            (_values(0, 3, dtype=bf16), _values(1, 2, 3, dtype=bf16), _values(1, 4, 3))
            + (_values(1, 2, 4), [0], 0.5),
        ],
        "moe_lora_linear_forward": [
            (_plain(5, 3), _plain(3, 2, 3), _plain(3, 4, 3), _plain(3, 2, 4), [2, 0, 3], 0.5),
            (_plain(5, 3).half(), _plain(1, 2, 3).half(), _plain(1, 4, 3), _plain(1, 2, 4))
            + ([5], 2.0),
        ],
        "moe_lora_linear_backward": [
            (_plain(5, 2), _plain(5, 3), _plain(3, 2, 3), _plain(3, 4, 3), _plain(3, 2, 4))
            + (_plain(5, 4), [2, 0, 3], 0.5, [True] * 4, 0.5),
            (_plain(2).expand(5, 2), _plain(3, 5).T, _plain(3, 2, 3), _plain(3, 4, 3))
            + (_plain(3, 2, 4), _plain(5, 4), [2, 0, 3], 0.5, [False, False, True, False], 1.0),
        ],
        "moe_take_tokens": [
            (_values(5, 3), _values(5, 2), sizes, group.rank, *of_group),
            (_values(3, 5, dtype=bf16).T, _plain(2, 5).T, sizes, group.rank, *of_group),
            (_values(0, 3), _values(0, 2), [0] * group.size, group.rank, *of_group),
        ],
        "block_linears": [
            (_values(2, 3), *of_blocks, blocks * 3, 1, group.size, *of_group),
            (_values(2, 1, 3), *of_blocks[:2], _values(0, 3), two_and_none, 1, *last_of_two),
            (
                _values(2, 3, dtype=bf16),
                *bf16_blocks,
                blocks * 3,
                group.size,
                group.size,
                *of_group,
            ),
            (_values(2, 3), *of_blocks, blocks * 3, group.size, group.size, *of_group),
        ],
        "block_linears_backward": [
            (
                *(_plain(2, 4), _plain(2, 4), _plain(2, 4), _plain(2, 3), *_detached(of_blocks)),
                *(blocks * 3, 1, group.size, [True] * 4, *of_group),
            ),
            (
                *(_plain(2, 4), _plain(2, 4), _plain(2, 4), _plain(2, 3), *_detached(of_blocks)),
                *(blocks * 3, 1, group.size, [False] * 4, *of_group),
            ),
        ],
        "block_row_linear": [
            (_values(2, 4), _values(3, 4), _values(3), blocks, group.size, *of_group),
            (_values(2, 1, 4), _values(3, 4), None, [0, 1, 1, 4], 2 * group.size, *of_group),
            (_values(2, 4, dtype=bf16), _values(3, 4, dtype=bf16), None, blocks, *last_of_blocks),
        ],
        "block_row_linear_backward": [
            (_plain(2, 3), _plain(2, 4), _plain(3, 4), blocks, [True] * 3),
            (_plain(2, 3), _plain(2, 4), _plain(3, 4), [0, 1, 1, 4], [True, False, False]),
        ],
        "block_bias": [
            (_values(2, 4), _values(4), blocks, 1, *last_of_blocks),
            (_values(2, 1, 4, dtype=bf16), _values(4, dtype=bf16), [0, 1, 1, 4], 1, *last_of_two),
            (_values(4, 2).T, _values(4), blocks, group.size, *last_of_blocks),
        ],
        "block_bias_backward": [
            (_plain(2, 4), _plain(4), blocks, 1, *last_of_blocks),
            (_plain(2, 4), _plain(4), blocks, group.size, *last_of_blocks),
            (_plain(0, 4), _plain(4), [0, 1, 1, 4], 1, *last_of_two),
        ],
        "block_scale": [
            (_values(2, 4, 3), _values(3), blocks, *last_of_blocks),
            (_values(4, 2, 3).transpose(0, 1), _values(3), blocks, *last_of_blocks),
            (_values(2, 4, 3, dtype=bf16), _values(3, dtype=bf16), [0, 1, 1, 4], *last_of_two),
        ],
        "block_scale_backward": [
            (*of_scale, group.size, [True] * 2, *of_group),
            (*of_scale, group.size, [False] * 2, *of_group),
        ],
        "repeat_heads": [(_values(2, 6), 3, 2), (_values(2, 1, 4, dtype=bf16), 2, 3)],
        "repeat_heads_backward": [(_plain(2, 12), 3, 2), (_plain(2, 6, dtype=bf16), 2, 3)],
        "block_experts": [
            (_values(5, 3), _values(1, 3, 2, 3), [2, 0, 3]),
            (_values(3, 5).T, _values(2, 4, 3).expand(2, 2, 4, 3), [1, 0, 0, 4]),
            (_values(0, 3, dtype=bf16), _values(2, 1, 4, 3, dtype=bf16), [0, 0]),
        ],
        "block_experts_backward": [
            (_plain(5, 2), _plain(5, 3), _plain(1, 3, 2, 3), [2, 0, 3], [True, True]),
            (_plain(2).expand(5, 2), _plain(3, 5).T, _plain(2, 1, 2, 3), [2, 3], [True, False]),
        ],
        "sum_leaves": [
            ([_plain(2, 3, dtype=bf16), _plain(2, 3, dtype=bf16)], [0, 1, 1, 1], torch.float32),
            ([_plain(2, 3), _plain(3, 2, dtype=bf16).T], [0, 2, 2, 1], bf16),
        ],
        "fixed_sigmoid": [(_values(2, 37),), (_values(0, 3),), (_values(5, dtype=bf16),)],
        "fixed_sigmoid_backward": [(_plain(2, 37), _plain(2, 37))],
        "fixed_silu": [(_values(2, 37),), (_values(0, 3),), (_values(5, dtype=bf16),)],
        "fixed_silu_backward": [(_plain(2, 37), _plain(2, 37))],
        "fixed_gelu": [(_values(2, 37),), (_values(0, 3),), (_values(5, dtype=bf16),)],
        "fixed_gelu_backward": [(_plain(2, 37), _plain(2, 37))],
        "block_linear_cross_entropy": [
            (*of_head(0), labels, *in_blocks, *of_group, None, *kinds["sum"]),
            (*of_head(2), labels, *in_blocks, *of_group, None, *smooth_mean),
        ],
        "block_linear_cross_entropy_forward": [
            (*bf16_head, labels, *in_blocks, [True] * 4, *of_group, None, *kinds["sum"]),
            (*bf16_head, labels, *in_blocks, [False] * 4, *of_group, None, *kinds["mean"]),
        ],
        "moe_take_tokens_backward": [
            (_plain(own, 3), _plain(own, 2), sizes, [True, True], group.rank, *of_group),
            (_plain(3, own).T, _plain(2).expand(own, 2), sizes, [0, 1], group.rank, *of_group),
            (_plain(own, 3), _plain(own, 2), sizes, [False, False], group.rank, *of_group),
        ],
    }


def test_every_registered_op_has_opcheck_samples():
    assert sorted(opcheck_samples(ALONE)) == REGISTERED


def _op(name: str) -> Any:
    return getattr(torch.ops.parallel_ext, name).default


COMMUNICATING = [
    name for name in REGISTERED if "group_name" in {a.name for a in _op(name)._schema.arguments}
]
IN_GRAPHS_OF_OTHERS = re.compile(".*_(forward|backward_?)")  # with sizes that are symbols


def _opcheck(group: Group, name: str, compiled: bool) -> None:
    for number, sample in enumerate(opcheck_samples(group)[name]):
        checks = ["test_schema", "test_faketensor"]
        checks += ["test_autograd_registration"] * (number == 0)
        checks += ["test_aot_dispatch_dynamic"] * (compiled and number < 4)  # which takes seconds
        torch.library.opcheck(_op(name), sample, test_utils=checks)


@pytest.mark.parametrize(
    ("name", "size"), [(n, 1) for n in REGISTERED] + [(n, 2) for n in COMMUNICATING]
)
def test_op_passes_opcheck(name, size):
    """An op that communicates is compiled in a group of two."""
    compiled = size == 2 or name not in COMMUNICATING
    on_ranks(size, _opcheck, name, compiled and not IN_GRAPHS_OF_OTHERS.fullmatch(name))


# op -> kind and bytes of the one collective of its first sample's forward, and of its backward.
COLLECTIVES: dict[str, tuple[tuple[str, int] | None, tuple[str, int] | None]] = {
    "reduce_from_region": (("all_reduce", 3 * 4 * 4), None),
    "copy_to_region": (None, ("all_reduce", 3 * 4 * 4)),
    "gather_from_region": (("all_gather", 3 * 3 * 4), None),
    "column_linear": (None, ("all_reduce", 3 * 4 * 4)),
    "column_linears": (None, ("all_reduce", 3 * 4 * 4)),
    "row_linear": (("all_reduce", 3 * 4 * 4), None),
    "lora_linear": (("all_reduce", 3 * 4 * 4), None),
    "vocab_cross_entropy": (("all_gather", (4 * 3 + 2) * 4), None),
}


def _collectives(group: Group, name: str) -> list[dict[str, int]]:
    """What the op's forward sends, and what its backward sends."""
    sample = opcheck_samples(group)[name][0]

    def first_output() -> torch.Tensor:
        output = getattr(torch.ops.parallel_ext, name)(*sample)
        return output if isinstance(output, torch.Tensor) else output[0]

    return counted_both_ways(first_output)


def _expected_counts(sent: tuple[str, int] | None) -> dict[str, int]:
    return {} if sent is None else {sent[0]: 1, f"{sent[0]}_bytes": sent[1], "in_shared_memory": 1}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_op_sends_one_message_and_a_group_of_one_nothing(name, size):
    sent = COLLECTIVES[name] if size > 1 else (None, None)
    assert on_ranks(size, _collectives, name) == [[*map(_expected_counts, sent)]] * size


class _Cut(torch.autograd.Function):
    """A number made of tensors, which get no gradient of it."""

    @staticmethod
    def forward(ctx: object, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def _leaves_with_gradient(group: Group, name: str, used: int | None) -> list[int]:
    """Numbers of the arguments that get a gradient where only one output, or none, gets one."""
    sample = opcheck_samples(group)[name][0]
    returned = getattr(torch.ops.parallel_ext, name)(*sample)
    outputs = [each for each in _as_tuple(returned) if each.requires_grad]
    if used is not None:
        outputs[used].sum().backward()
    elif outputs:
        _Cut.apply(*outputs).backward()
    leaves = [i for i, each in enumerate(sample) if isinstance(each, torch.Tensor)]
    return [i for i in leaves if sample[i].grad is not None]


def _as_tuple(returned: torch.Tensor | tuple) -> tuple:
    return returned if isinstance(returned, tuple) else (returned,)


def _trained(values: Sequence[Any]) -> list[int]:
    """Places of what requires a gradient."""
    return [i for i, each in enumerate(values) if getattr(each, "requires_grad", False)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [name for name in REGISTERED if "_backward" not in name])
def test_op_whose_outputs_get_no_gradient_gives_none(name, size):
    assert on_ranks(size, _leaves_with_gradient, name, None) == [[]] * size


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["column_linears", "block_linears"])
def test_layer_of_several_in_one_op_gets_a_gradient_only_of_its_own_output(name, size):
    for with_gradient in on_ranks(size, _leaves_with_gradient, name, 1):
        assert [i for i in with_gradient if i < 4] == [0, 2]


def _outputs_with_gradient(group: Group, name: str, argument: int) -> list[int]:
    """Numbers of the outputs that need a gradient where only one argument does."""
    sample = list(opcheck_samples(group)[name][0])
    for i, each in enumerate(sample):
        if isinstance(each, torch.Tensor):
            sample[i] = each.detach().requires_grad_(i == argument)
    outputs = getattr(torch.ops.parallel_ext, name)(*sample)
    return [i for i, each in enumerate(outputs) if each.requires_grad]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "argument"), [("column_linears", 2), ("block_linears", 2), ("moe_take_tokens", 1)]
)
def test_output_of_constants_alone_is_constant(name, argument, size):
    assert on_ranks(size, _outputs_with_gradient, name, argument) == [[1]] * size


# Sums and gathers, whose gradients are such again.
LINEAR = {
    *("copy_to_region", "gather_from_region", "reduce_from_region"),
    *("gather_tokens", "sum_tokens", "take_tokens"),
}
WITHOUT_GRADIENT = {"moe_route_plan", "sum_leaves", "vocab_argmax", "vocab_sample"}
REFUSING = [
    name
    for name in REGISTERED
    if name not in LINEAR | WITHOUT_GRADIENT and not IN_GRAPHS_OF_OTHERS.fullmatch(name)
]


DIFFERENTIABLE = sorted({*REFUSING, *LINEAR})


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# Samples whose gradients are others on purpose: of a padding id none, of some weights scaled.
NOT_THE_DERIVATIVE = {
    *(("moe_lora_linear", 1), ("vocab_embedding", 1), ("vocab_embedding_of_tokens", 1))
}
HAS_ONE_BACKWARD = "block_linear_cross_entropy"  # and gradcheck makes several of one output


@BOTH_PATHS
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != HAS_ONE_BACKWARD])
def test_op_passes_gradcheck(name, aten):
    """In fp64. What an op does on several ranks, its own tests compare with one process."""
    checked = 0
    for number, sample in enumerate(opcheck_samples(ALONE)[name]):
        places = _trained(sample)
        if not places or (name, number) in NOT_THE_DERIVATIVE:
            continue
        arguments = [each.detach().double() if _is_float(each) else each for each in sample]

        def outputs(
            *leaves: torch.Tensor, arguments: list[Any] = arguments, places: list[int] = places
        ) -> tuple[torch.Tensor, ...]:
            given = dict(zip(places, leaves, strict=True))
            found = _op(name)(*(given.get(i, each) for i, each in enumerate(arguments)))
            return tuple(each for each in _as_tuple(found) if each.requires_grad)

        leaves = [arguments[i].requires_grad_() for i in places]
        with aten_path(aten):
            assert torch.autograd.gradcheck(outputs, leaves)
            assert name not in LINEAR or torch.autograd.gradgradcheck(outputs, leaves)
        checked += 1
    assert checked


def _gradients(name: str, sample: tuple, trained: Sequence[int]) -> list[torch.Tensor | None]:
    """Gradients of the arguments at these places, where all others are frozen."""
    copies = [
        each.detach().requires_grad_(i in trained) if _is_float(each) else each
        for i, each in enumerate(sample)
    ]
    outputs = _as_tuple(_op(name)(*copies))
    sum(each.double().square().sum() for each in outputs if each.requires_grad).backward()
    return [copies[i].grad for i in trained]


def _frozen_in_turn(group: Group) -> None:
    samples = opcheck_samples(group)
    # With a frozen head the gradients are computed in another way.
    for name in (name for name in DIFFERENTIABLE if name != "linear_vocab_cross_entropy"):
        for number, sample in enumerate(samples[name]):
            trained = _trained(sample)
            if not trained:
                continue
            everything = dict(zip(trained, _gradients(name, sample, trained), strict=True))
            for count in range(1, len(trained)):
                for some in combinations(trained, count):
                    for place, ours in zip(some, _gradients(name, sample, some), strict=True):
                        theirs = everything[place]
                        assert ours is theirs or torch.equal(ours, theirs), (name, number, some)


@pytest.mark.parametrize(("size", "aten"), [(1, False), (1, True), (2, False)])
def test_what_is_frozen_changes_no_other_gradient(size, aten):
    """Not in a bit."""
    on_ranks(size, _frozen_in_turn, aten=aten)


@pytest.mark.parametrize("name", REFUSING)
def test_a_second_derivative_is_refused_by_name(name):
    refused = 0
    for sample in opcheck_samples(ALONE)[name]:
        found = [each for each in _as_tuple(_op(name)(*sample)) if each.requires_grad]
        outputs = [each.float().square().sum() for each in found]
        leaves = [sample[i] for i in _trained(sample)]
        if outputs:
            with pytest.raises(NotImplementedError, match=f"{name}: second derivatives"):
                torch.autograd.grad(outputs, leaves, create_graph=True)
            refused += 1
    assert refused


def test_a_derivative_in_forward_mode_is_refused_by_name():
    input = torch.ones(3, 4, requires_grad=True)
    output, ones = column_linear(input, torch.ones(7, 4)), torch.ones(3, 7)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="^column_linear: second derivatives"),
    ):
        torch.autograd.grad(output, input, forward_ad.make_dual(ones, ones))


def _doubled(name: str, sample: tuple, number: int, in_place: bool) -> list[torch.Tensor | None]:
    """Twice an output of an op, and the gradients of it and of the other ones."""
    leaves = [sample[i] for i in _trained(sample)]
    copies = [each * 1 if isinstance(each, torch.Tensor) else each for each in sample]
    outputs = [each for each in _as_tuple(_op(name)(*copies)) if each.requires_grad]
    own = outputs.pop(number)
    own = own.mul_(2) if in_place else 2 * own
    sums = [each.sum() for each in (own, *outputs)]
    return [own.detach(), *torch.autograd.grad(sums, leaves, allow_unused=True)]


def _changed_in_place(group: Group) -> None:
    for name, samples in opcheck_samples(group).items():
        for sample in samples if name in DIFFERENTIABLE else ():
            outputs = _as_tuple(_op(name)(*sample))
            for number in range(sum(each.requires_grad for each in outputs)):
                plain, changed = (_doubled(name, sample, number, each) for each in (False, True))
                for ours, theirs in zip(changed, plain, strict=True):
                    assert ours is theirs or torch.equal(ours, theirs), (name, number)


@pytest.mark.parametrize(("size", "aten"), [(1, False), (1, True), (2, False)])
def test_an_output_may_be_changed_in_place(size, aten):
    """Models scale embeddings and add to losses."""
    on_ranks(size, _changed_in_place, aten=aten)


# Places of the arguments that autocast casts. Adapters keep their dtype.
CAST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("column_linear", "row_linear", "block_row_linear"), (0, 1, 2)),
    **dict.fromkeys(("moe_linear", "moe_linear_on_device", "moe_lora_linear"), (0, 1)),
    **dict.fromkeys(("block_linears", "block_linear_cross_entropy"), (0, 1, 2, 3)),
    **dict.fromkeys(("block_experts", "block_bias"), (0, 1)),
    "column_linears": (0, 1, 2, 3, 4, 5, 6),
    "linear_vocab_cross_entropy": (0, 1, 2),
    "lora_linear": (0, 1, 4),
}


def test_the_ops_that_autocast_casts_are_those_that_multiply():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for device in ("CPU", "CUDA"):
        assert {n for n in REGISTERED if has_kernel(NAMESPACE + n, f"Autocast{device}")} == {*CAST}


def _with_gradients(returned: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and the gradients of their squares."""
    outputs = _as_tuple(returned)
    sums = [each.double().square().sum() for each in outputs if each.requires_grad]
    return [*outputs, *(torch.autograd.grad(sum(sums), leaves) if sums else ())]


@pytest.mark.parametrize("name", sorted(CAST))
def test_under_autocast_an_op_has_the_bits_of_one_on_cast_tensors(name):
    for sample in opcheck_samples(ALONE)[name]:
        leaves = [sample[i] for i in _trained(sample)]
        lower = list(sample)
        for place in CAST[name]:
            lower[place] = sample[place] if sample[place] is None else sample[place].bfloat16()
        with torch.autocast("cpu", torch.bfloat16):
            returned = _op(name)(*sample)
        found = _with_gradients(returned, leaves)
        expected = _with_gradients(_op(name)(*lower), leaves)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
