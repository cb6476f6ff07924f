"""Calls of every op: those of users are written down here, and those inside are noted down."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from reference_ops import own_range
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_ext.ops import ExchangePlan, Group, moe_dispatch, moe_route_plan
from parallel_ext.sharding.layout import split

NAMESPACE = "parallel_ext::"
REGISTERED = sorted(
    {
        name.removeprefix(NAMESPACE).split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(NAMESPACE)
    }
)
IN_GRAPHS_OF_OTHERS = re.compile("(.*?)(_frozen)?_(forward|backward_?)")
IGNORED = -100


def op_of(name: str) -> Any:
    return getattr(torch.ops.parallel_ext, name).default


def as_tuple(returned: torch.Tensor | tuple) -> tuple:
    return returned if isinstance(returned, tuple) else (returned,)


def trained(values: Sequence[Any]) -> list[int]:
    """Places of what requires a gradient."""
    return [i for i, each in enumerate(values) if getattr(each, "requires_grad", False)]


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def with_trained(sample: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The sample with leaves, of which those at ``places`` alone require gradients."""
    return [
        each.detach().requires_grad_(i in places) if is_float(each) else each
        for i, each in enumerate(sample)
    ]


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that require a gradient, where the dtype can."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def _plain(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def samples_of_users(group: Group) -> dict[str, list[tuple]]:
    """op -> arguments of its calls, for this rank of the group; the first call is a usual one.

    Of the ops that users call; the calls of the other ones follow from these.
    """
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
    whole_on_one_rank = (5, *((0, 5) if group.rank == 0 else (5, 5)), IGNORED, "mean", *smooth)
    # Blocks of 4 features a rank, one or two a rank.
    blocks, last_of_blocks = [0, 4], (group.size, *of_group)
    of_blocks = tuple(_values(4, 3) for _ in range(3))
    bf16_blocks = tuple(_values(4, 3, dtype=bf16) for _ in range(3))
    two_and_none = [0, 1, 1, 4, 0, 3, 3, 4, 0, 0, 0, 0]
    last_of_two = (2 * group.size, *of_group)
    in_blocks = ([0, 1, 1, own], 2 * group.size)

    def of_head(r: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        return tuple(_values(*sizes, dtype=dtype) for sizes in ((4, 3), (own, 3), (4, r), (own, r)))

    of_activations = [(_values(2, 37),), (_values(37, 2, dtype=bf16).T,), (_values(0, 3),)]
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
        "lora_linear": [
            (_values(3, own), _values(4, own), _values(2, own), _values(4, 2), _values(4), 0.5)
            + (0.0, [], *of_group),
            (_values(2, 3, 4), _values(own, 4), _values(2, 4), _values(own, 2), None, 0.5)
            + (0.4, [123456789, 7, 5, 37], 1, ""),
            (_values(0, 4), _plain(own, 4), _values(2, 4), _values(own, 2), None, 2.0)
            + (0.4, [123456789, 7, 5, 37], 1, ""),
        ],
        "vocab_embedding": [
            (ids, _values(own, 2), 5, start, None, sizes, *of_group),
            (ids.T, _values(own, 2, dtype=bf16), 5, start, 4, [], *of_group),
            (ids[:0], _values(own, 2), 5, start, None, sizes, *of_group),
        ],
        "vocab_embedding_of_tokens": [
            (ids, _values(own, 2), 5, start, None, sizes, tokens, group.rank, *of_group),
            (ids.T, _values(own, 2, dtype=bf16), 5, start, 4, [], two, group.rank, *of_group),
            (ids[:0], _values(own, 2), 5, start, None, sizes, tokens, group.rank, *of_group),
        ],
        "vocab_cross_entropy": [
            (*tensors, wanted, False, *of_group, *options) for tensors, wanted, options in losses
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
        "moe_route_plan": [
            (choices, sizes, 4096, group.rank),
            (choices[:0], [1], 0, 0),
            (choices.T, sizes, 0, group.rank),
        ],
        "moe_dispatch": [
            (_values(4, 3), _values(4, 2), *maps, *plan),
            (_values(3, 4, dtype=bf16).T, _plain(2, 4).T, *maps, *plan),
        ],
        "moe_combine": [
            (_values(brought, 3), origins, maps[0], maps[2], *plan),
            (_values(3, brought, dtype=bf16).T, origins, maps[0], maps[2], *plan),
        ],
        "moe_gated_silu": [
            (_values(5, 6), _values(5)),
            (_values(6, 5, dtype=bf16).T, _plain(10)[::2]),
            (_values(0, 6), _values(0)),
        ],
        "moe_linear": [
            (_values(5, 3), _values(3, 2, 3), [2, 0, 3]),
            (_values(3, 5).T, _values(3, 4, 2).transpose(0, 2), [5, 0]),
            (_values(0, 3), _values(2, 2, 3), [0, 0], 0.5),
        ],
        "moe_linear_on_device": [
            (_values(5, 3), _values(3, 2, 3), torch.tensor([2, 0, 3])),
            (_values(3, 5).T, _values(3, 4, 2).transpose(0, 2), torch.tensor([5, 9, 0])[::2]),
            (_values(0, 3), _values(2, 2, 3), torch.tensor([0, 0]), 0.5),
        ],
        "moe_lora_linear": [
            (_values(5, 3), _values(3, 2, 3), _values(3, 4, 3), _values(3, 2, 4), [2, 0, 3], 0.5),
            (_values(3, 5).T, _plain(3, 4, 2).transpose(0, 2), _values(2, 1, 3))
            + (_values(4, 1, 2).permute(2, 0, 1), [5, 0], 2.0, 0.5),
            (_values(0, 3, dtype=bf16), _values(1, 2, 3, dtype=bf16), _values(1, 4, 3))
            + (_values(1, 2, 4), [0], 0.5),
            (_values(5, 3, dtype=torch.float16), _values(1, 2, 3, dtype=torch.float16))
            + (_values(1, 4, 3), _values(1, 2, 4), [5], 2.0),
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
        "block_row_linear": [
            (_values(2, 4), _values(3, 4), _values(3), blocks, group.size, *of_group),
            (_values(2, 1, 4), _values(3, 4), None, [0, 1, 1, 4], 2 * group.size, *of_group),
            (_values(2, 4, dtype=bf16), _values(3, 4, dtype=bf16), None, blocks, *last_of_blocks),
        ],
        "block_bias": [
            (_values(2, 4), _values(4), blocks, 1, *last_of_blocks),
            (_values(2, 1, 4, dtype=bf16), _values(4, dtype=bf16), [0, 1, 1, 4], 1, *last_of_two),
            (_values(4, 2).T, _values(4), blocks, group.size, *last_of_blocks),
        ],
        "block_scale": [
            (_values(2, 4, 3), _values(3), blocks, *last_of_blocks),
            (_values(4, 2, 3).transpose(0, 1), _values(3), blocks, *last_of_blocks),
            (_values(2, 4, 3, dtype=bf16), _values(3, dtype=bf16), [0, 1, 1, 4], *last_of_two),
        ],
        "repeat_heads": [(_values(2, 6), 3, 2), (_values(2, 1, 4, dtype=bf16), 2, 3)],
        "block_experts": [
            (_values(5, 3), _values(1, 3, 2, 3), [2, 0, 3]),
            (_values(3, 5).T, _values(2, 4, 3).expand(2, 2, 4, 3), [1, 0, 0, 4]),
            (_values(0, 3, dtype=bf16), _values(2, 1, 4, 3, dtype=bf16), [0, 0]),
        ],
        "sum_leaves": [
            ([_plain(2, 3, dtype=bf16), _plain(2, 3, dtype=bf16)], [0, 1, 1, 1], torch.float32),
            ([_plain(2, 3), _plain(3, 2, dtype=bf16).T], [0, 2, 2, 1], bf16),
        ],
        "fixed_sigmoid": of_activations,
        "fixed_silu": of_activations,
        "fixed_gelu": of_activations,
        "block_linear_cross_entropy": [
            (*of_head(0), labels, *in_blocks, *of_group, None, *kinds["sum"]),
            (*of_head(2), labels, *in_blocks, *of_group, None, *smooth_mean),
            (*of_head(2, bf16), labels, *in_blocks, *of_group, None, *kinds["mean"]),
        ],
    }


class _Inside(TorchDispatchMode):
    """Notes down the calls that ops make of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple]] = defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in args)
        self.calls[function._schema.name.removeprefix(NAMESPACE)].append(plain)
        return function(*args, **(kwargs or {}))


def _gradient(of: torch.Tensor, number: int) -> torch.Tensor:
    """In one of the memory layouts that autograd hands to a backward."""
    shape, dtype = of.shape, of.dtype
    if number % 3 == 0:
        return torch.randn(shape, dtype=dtype)
    if number % 3 == 1:
        return torch.randn((), dtype=dtype).expand(shape)
    return torch.randn(*shape, 2, dtype=dtype)[..., 0]


def _calls_inside(name: str, group: Group) -> dict[str, list[tuple]]:
    """The same of all ops in forward and backward of a user's.

    With gradients of all outputs for all arguments, of the first for the first, and of the last
    for all others.
    """
    with _Inside() as inside:
        for number, sample in enumerate(samples_of_users(group)[name]):
            places, all_of_them = trained(sample), slice(None)
            first, others, last = slice(1), slice(1, None), slice(-1, None)
            for of, wanted in ((all_of_them, all_of_them), (first, first), (last, others)):
                returned = as_tuple(op_of(name)(*with_trained(sample, places[wanted])))
                outputs = [each for each in returned if each.requires_grad][of]
                if outputs:
                    torch.autograd.backward(outputs, [_gradient(e, number) for e in outputs])
    return inside.calls


def samples_of(name: str, group: Group) -> list[tuple]:
    """Arguments of calls of any op."""
    inside = IN_GRAPHS_OF_OTHERS.fullmatch(name)
    if not inside:
        return samples_of_users(group)[name]
    calls = _calls_inside(inside[1], group)
    if name != "vocab_cross_entropy_backward_":
        return calls[name]
    # Over the logits, where a gradient fits.
    calls = calls["vocab_cross_entropy_backward"]
    return [call for call in calls if call[3].dim() == 2 and call[3].stride(1) == 1]
