"""Several linear layers on one input, cut by output features, in one op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from reference_ops import (
    ALL_DTYPES,
    assert_refused,
    on_ranks,
)
from torch import ones
from torch.profiler import ProfilerActivity, profile

from parallel_ext.ops import (
    Group,
    column_linear,
    column_linears,
    copy_to_region,
)

FP64 = torch.float64
FEATURES = [(13,), (3, 0, 5), (0, 0), (640, 257, 257)]  # of one to three layers
TOKENS = [(), (130,), (2, 3), (0,), (2, 0)]  # leading dimensions of the input
Tensors = Sequence[torch.Tensor | None]
Layers = Callable[[torch.Tensor, Tensors, Tensors], Sequence[torch.Tensor]]


def _separate(group: Group) -> Layers:
    """The layers called one after the other, in a region."""

    def layers(input: torch.Tensor, weights: Tensors, biases: Tensors) -> list[torch.Tensor]:
        entered = copy_to_region(input, group)
        return [column_linear(entered, w, b) for w, b in zip(weights, biases, strict=True)]

    return layers


def _together(group: Group) -> Layers:
    return lambda *tensors: column_linears(*tensors, group=group)


def _tensors(
    tokens: tuple[int, ...], in_features: int, features: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Input, weights and biases; an input of three dimensions is not contiguous."""
    if len(tokens) == 2:
        input = torch.randn(tokens[1], tokens[0], in_features, dtype=dtype).transpose(0, 1)
    else:
        input = torch.randn(*tokens, in_features, dtype=dtype)
    weights = [torch.randn(size, in_features, dtype=dtype) for size in features]
    return input, weights, [torch.randn(size, dtype=dtype) for size in features]


def _with_gradients(
    layers: Layers, input: torch.Tensor, weights: Tensors, biases: Tensors, grads: Tensors
) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name."""
    input, *rest = (
        each if each is None else each.detach().requires_grad_()
        for each in (input, *weights, *biases)
    )
    count = len(weights)
    outputs = layers(input, rest[:count], rest[count:])
    leaves = {"input": input}
    leaves |= {f"weight {i}": each for i, each in enumerate(rest[:count])}
    leaves |= {f"bias {i}": each for i, each in enumerate(rest[count:]) if each is not None}
    found = torch.autograd.grad(
        list(outputs),
        list(leaves.values()),
        [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)],
    )
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    return named | dict(zip(leaves, found, strict=True))


def _compared(group: Group, features: Sequence[int], dtype: torch.dtype) -> dict[str, bool]:
    """Whether each output and gradient has the bits of separate layers."""
    found = {}
    for tokens, with_bias in product(TOKENS, (True, False)):
        input, weights, biases = _tensors(tokens, 193, features, dtype)
        given = biases if with_bias else [None] * len(biases)
        grads = [torch.randn(*tokens, size, 2, dtype=dtype)[..., 0] for size in features]
        ours = _with_gradients(_together(group), input, weights, given, grads)
        theirs = _with_gradients(_separate(group), input, weights, given, grads)
        assert ours.keys() == theirs.keys()
        where = f"tokens {tokens}, bias {with_bias}"
        found |= {f"{name}, {where}": torch.equal(ours[name], theirs[name]) for name in ours}
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@ALL_DTYPES
def test_the_bits_are_those_of_separate_layers(dtype: torch.dtype, size: int) -> None:
    """Each rank has features of its own, as of layers of ``size`` times as many."""
    for features in FEATURES:
        for found in on_ranks(size, _compared, features, dtype):
            assert all(found.values()), [name for name, same in found.items() if not same]


def _bits_of_another_order(group: Group) -> bool:
    input, weights, _ = _tensors((130,), 193, (640, 257, 257), torch.float32)
    grads = [torch.randn(130, len(weight)) for weight in weights]
    none = [None] * 3
    ours = _with_gradients(_together(group), input, weights, none, grads)
    backwards = _with_gradients(_together(group), input, weights[::-1], none, grads[::-1])
    return torch.equal(ours["input"], backwards["input"])


def test_the_bits_depend_on_the_order_of_the_layers() -> None:
    assert on_ranks(1, _bits_of_another_order) == [False]


def _events_of(function: Callable[[], object]) -> list[str]:
    """Products, additions and exchanges that a profiler shows, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    wanted = ("aten::mm", "aten::add_", "aten::sum", "parallel_ext::start", "parallel_ext::finish")
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [e.name.split(" ")[0] for e in events if e.name.startswith(wanted)]


PRODUCT, ADDITION, BIAS = "aten::mm", "aten::add_", "aten::sum"
START, FINISH = "parallel_ext::start_all_reduce", "parallel_ext::finish_all_reduce"
ALL = ["input", "weight 0", "weight 1", "weight 2", "bias 0", "bias 1", "bias 2"]


def _backward_of(group: Group, frozen: Sequence[str]) -> list[str]:
    """What a backward does beside frozen tensors, whose other gradients stay the same."""
    input, weights, biases = _tensors((3,), 4, (4, 2, 2), FP64)
    grads = [torch.ones(3, len(weight), dtype=FP64) for weight in weights]
    expected = _with_gradients(_together(group), input, weights, biases, grads)
    leaves = dict(zip(ALL, (input, *weights, *biases), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    outputs = column_linears(input, weights, biases, group=group)
    events = _events_of(lambda: torch.autograd.backward(outputs, grads))
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen)
        assert leaf.grad is None or torch.equal(leaf.grad, expected[name])
    return events


_GRADIENT_OF_INPUT = [PRODUCT, PRODUCT, ADDITION, PRODUCT, ADDITION, START]


@pytest.mark.parametrize(
    ("frozen", "events"),
    [
        ((), [*_GRADIENT_OF_INPUT, *[PRODUCT, BIAS] * 3, FINISH]),
        (ALL[1:], [*_GRADIENT_OF_INPUT, FINISH]),
        (ALL[:1], [PRODUCT, BIAS] * 3),
        (("weight 1", *ALL[4:]), [*_GRADIENT_OF_INPUT, PRODUCT, PRODUCT, FINISH]),
        (("weight 0", "weight 2", "bias 0"), [*_GRADIENT_OF_INPUT, PRODUCT, BIAS, BIAS, FINISH]),
    ],
    ids=["none", "layers", "input", "a weight and all biases", "two weights and a bias"],
)
def test_the_sum_starts_before_the_first_gradient_of_a_weight(
    frozen: Sequence[str], events: list[str]
) -> None:
    assert on_ranks(2, _backward_of, frozen) == [events] * 2


def test_a_group_of_one_sums_nothing() -> None:
    (events,) = on_ranks(1, _backward_of, ())
    assert START not in events
    assert events.count(PRODUCT) == 6


def _unused(group: Group) -> bool:
    """A weight whose product nothing reads has no gradient, and changes no other one."""
    input, weights, _ = _tensors((3,), 4, (4, 2), FP64)
    for each in (input, *weights):
        each.requires_grad_()
    first, _ = column_linears(input, weights, group=group)
    first.square().sum().backward()
    entered = copy_to_region(input, group)
    alone = torch.autograd.grad(column_linear(entered, weights[0]).square().sum(), input)
    return torch.equal(alone[0], input.grad) and weights[1].grad is None


@pytest.mark.parametrize("size", [1, 2])
def test_a_product_that_is_not_read_adds_nothing(size: int) -> None:
    assert on_ranks(size, _unused) == [True] * size


REFUSALS = {
    "width": (
        lambda group: column_linears(ones(2, 3), [ones(4, 5)], group=group),
        "ValueError: column_linears: input of shape [2, 3] does not fit the local weight of shape "
        "[4, 5]; the last dimension must be 5",
    ),
    "width of the second": (
        lambda group: column_linears(ones(2, 3), [ones(4, 3), ones(4, 5)], group=group),
        "ValueError: column_linears: input of shape [2, 3] does not fit the local second of shape "
        "[4, 5]",
    ),
    "bias length": (
        lambda group: column_linears(
            ones(2, 3), [ones(4, 3), ones(4, 3)], [None, ones(3)], group=group
        ),
        "ValueError: column_linears: bias of shape [3] does not fit the local second of shape "
        "[4, 3]",
    ),
    "four weights": (
        lambda group: column_linears(ones(2, 3), [ones(4, 3)] * 4, group=group),
        "ValueError: column_linears: needs one to three weights, with as many biases if any, got 4 "
        "weights and 4 biases",
    ),
    "no weight": (
        lambda group: column_linears(ones(2, 3), [], group=group),
        "ValueError: column_linears: needs one to three weights",
    ),
    "fewer biases": (
        lambda group: column_linears(ones(2, 3), [ones(4, 3)] * 2, [None], group=group),
        "ValueError: column_linears: needs one to three weights, with as many biases if any, got 2 "
        "weights and 1 biases",
    ),
    "no tensor": (
        lambda group: column_linears(ones(2, 3), [ones(4, 3), None], group=group),
        "TypeError: column_linears: second must be a tensor, got None",
    ),
    "group size": (
        lambda group: (
            column_linears(ones(2, 3).requires_grad_(), [ones(4, 3)], group=group._replace(size=4))[
                0
            ]
            .sum()
            .backward()
        ),
        "ValueError: column_linears_backward: group '",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case: str) -> None:
    assert_refused(__name__, case)
