"""A linear layer with its low-rank adapter, cut by output features (column) or input (row)."""

from __future__ import annotations

import pytest
import torch
from reference_ops import (
    ALL_SIZES,
    MUTATIONS,
    NOTICED,
    TOLERANCE,
    assert_refused,
    doubles,
    grad_outputs,
    on_ranks,
    own_range,
    relative_error,
    share_of,
    with_gradients,
    worst,
)
from torch.nn import functional

from parallel_ext import _C
from parallel_ext.layout import split
from parallel_ext.ops import ALONE, Group, copy_to_tp, gather_from_tp, lora_linear

FP64 = torch.float64
SCALE = 0.75
TOKENS = [(), (4,), (2, 3), (0,)]  # leading dimensions of the input
KINDS = pytest.mark.parametrize("kind", ["column", "row"])
NAMES = ["output", "input", "weight", "lora_a", "lora_b", "bias"]


def _plain(
    x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """What peft's Linear computes with the same dtype everywhere."""
    return functional.linear(x, w, bias) + functional.linear(functional.linear(x, a), b) * SCALE


def _tensors(
    tokens: tuple[int, ...], sizes: tuple[int, int, int], dtype: torch.dtype, factors: torch.dtype
) -> list[torch.Tensor]:
    """Input, weight, lora_a, lora_b, bias of in_features, out_features and rank ``sizes``."""
    inner, outer, rank = sizes
    x = torch.randn(*tokens, inner, dtype=dtype)
    if len(tokens) == 2:
        x = torch.randn(tokens[1], tokens[0], inner, dtype=dtype).transpose(0, 1)
    w, bias = torch.randn(outer, inner, dtype=dtype), torch.randn(outer, dtype=dtype)
    return [
        x,
        w,
        torch.randn(rank, inner, dtype=factors),
        torch.randn(outer, rank, dtype=factors),
        bias,
    ]


def _errors_of_one(
    group: Group, kind: str, tensors: list[torch.Tensor], grad: torch.Tensor, mutation: str = "none"
) -> dict[str, float]:
    """Output and gradients of this rank's part against its part of the whole layer's."""
    expected = with_gradients(lambda *args: _plain(*args), doubles(tensors), grad.double())
    op_group, rank = MUTATIONS[mutation](group)
    x, w, a, b, bias = tensors
    cut, mine = (
        slice(*split(w.size(0 if kind == "column" else 1), group.size)[r])
        for r in (rank, group.rank)
    )
    if kind == "column":

        def layer(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, *rest: torch.Tensor):
            # The sums that the replicated input and factor get from their surroundings.
            x, a = copy_to_tp(x, op_group), copy_to_tp(a, op_group)
            return lora_linear(x, w, a, *rest, scale=SCALE)

        local = [x, w[cut], a, b[cut], bias[cut]]
        shares: list = [(..., mine), ..., mine, ..., mine, mine]
        grad = grad[..., cut]
    else:

        def layer(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest):
            return lora_linear(x, w, a, copy_to_tp(b, op_group), *rest, scale=SCALE, group=op_group)

        local = [x[..., cut], w[:, cut], a[:, cut], b, bias]
        shares = [..., (..., mine), (..., mine), (..., mine), ..., ...]
    actual = with_gradients(layer, local, grad)
    results = zip(NAMES, actual, expected, shares, strict=True)
    return {name: relative_error(got, wanted, share) for name, got, wanted, share in results}


def _errors(
    group: Group,
    kind: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype = FP64,
    factors: torch.dtype = FP64,
) -> dict[str, float]:
    errors = {}
    for tokens in TOKENS:
        for layout, grad in grad_outputs((*tokens, sizes[1]), dtype).items():
            found = _errors_of_one(group, kind, _tensors(tokens, sizes, dtype, factors), grad)
            errors.update({f"tokens {tokens}, {layout}: {n}": e for n, e in found.items()})
    return errors


@ALL_SIZES
@KINDS
@pytest.mark.parametrize("rank", [1, 5, 20], ids="rank {}".format)
def test_layer_equals_the_whole_one_whatever_the_rank_and_the_cut(kind, rank, size):
    error, case = worst(on_ranks(size, _errors, kind, (7, 13, rank)))
    assert error <= TOLERANCE[FP64], case


@KINDS
@pytest.mark.parametrize("features", [(2, 2, 3), (1, 5, 2), (5, 1, 2)])
def test_layer_equals_the_whole_one_when_ranks_hold_no_feature(kind, features):
    error, case = worst(on_ranks(3, _errors, kind, features))
    assert error <= TOLERANCE[FP64], case


@KINDS
@pytest.mark.parametrize(
    ("dtype", "factors"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),  # peft's default over a bf16 base
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_layer_is_as_accurate_as_its_base(kind, dtype, factors):
    error, case = worst(on_ranks(2, _errors, kind, (37, 13, 4), dtype, factors))
    assert error <= 2 * TOLERANCE[dtype], case


def _mutated(group: Group, kind: str, mutation: str) -> dict[str, float]:
    tensors = _tensors((3,), (8, 8, 2), FP64, FP64)
    return _errors_of_one(group, kind, tensors, torch.randn(3, 8, dtype=FP64), mutation)


@KINDS
def test_the_comparison_notices_broken_layers(kind):
    assert worst(on_ranks(2, _mutated, kind, "none"))[0] <= TOLERANCE[FP64]
    for mutation in ("no exchange", "swapped shards"):
        assert worst(on_ranks(2, _mutated, kind, mutation))[0] > NOTICED, mutation


def _gradcheck(group: Group, kind: str) -> None:
    sizes = [stop - start for start, stop in split(3, group.size)]

    def column(x, w, a, b, bias):
        cut = (share_of(each, 0, group) for each in (w, b, bias))
        w, b, bias = cut
        x, a = copy_to_tp(x, group), copy_to_tp(a, group)
        return gather_from_tp(lora_linear(x, w, a, b, bias, scale=SCALE), sizes, group)

    def row(x, w, a, b, bias):
        x, w, a = (share_of(each, each.dim() - 1, group) for each in (x, w, a))
        return lora_linear(x, w, a, copy_to_tp(b, group), bias, scale=SCALE, group=group)

    shapes = ((2, 2, 3), (3, 3), (2, 3), (3, 2), (3,))
    assert torch.autograd.gradcheck(
        column if kind == "column" else row,
        [torch.randn(*shape, dtype=FP64, requires_grad=True) for shape in shapes],
    )


@pytest.mark.parametrize("size", [1, 2])
@KINDS
def test_layer_passes_gradcheck(kind, size):
    on_ranks(size, _gradcheck, kind)


@pytest.mark.parametrize("frozen", range(5), ids=NAMES[1:].__getitem__)
def test_a_frozen_tensor_gets_no_gradient_and_changes_no_other(frozen):
    tensors = _tensors((3,), (4, 5, 2), FP64, FP64)
    everything = with_gradients(lambda *t: lora_linear(*t), tensors, torch.ones(3, 5))[1:]
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index != frozen)
    lora_linear(*tensors).sum().backward()
    for index, tensor in enumerate(tensors):
        if index == frozen:
            assert tensor.grad is None
        else:
            assert relative_error(tensor.grad, everything[index]) <= TOLERANCE[FP64]


def test_only_the_input_and_the_small_product_are_kept_for_backward():
    x, w, a, b, bias = _tensors((6,), (8, 9, 2), FP64, FP64)
    x, w = x.requires_grad_(), w.requires_grad_(False)
    a.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(x, w, a, b, bias, scale=SCALE)
    places = {t.data_ptr() for t in (x, w, a, b)}
    own = [t for t in kept if t.data_ptr() not in places]
    assert [tuple(t.shape) for t in own] == [(6, 2)]
    assert len(kept) == 5


def _bytes_sent(group: Group, kind: str) -> list[dict[str, int]]:
    """The collectives of a forward and a backward."""
    start, stop = own_range(8, group)
    own = stop - start
    x, w, a, b, bias = _tensors((3,), (own, 5, 2) if kind == "row" else (8, own, 2), FP64, FP64)
    counts = []
    _C.reset_collective_counts()
    output = lora_linear(x, w, a.requires_grad_(), b, bias, group=group if kind == "row" else ALONE)
    counts.append(_C.collective_counts())
    _C.reset_collective_counts()
    output.sum().backward()
    return [*counts, _C.collective_counts()]


def test_the_adapter_adds_no_collective_to_that_of_the_base():
    one_sum = {"all_reduce": 1, "all_reduce_bytes": 3 * 5 * 8, "in_shared_memory": 1}
    assert on_ranks(2, _bytes_sent, "row") == [[one_sum, {}]] * 2
    assert on_ranks(2, _bytes_sent, "column") == [[{}, {}]] * 2


def test_autocast_computes_in_the_lower_precision_and_keeps_fp32_gradients():
    tensors = [t.requires_grad_() for t in _tensors((3,), (8, 5, 2), torch.float32, torch.float32)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = lora_linear(*tensors, scale=SCALE)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    expected = doubles([t.detach() for t in tensors])
    truth = with_gradients(_plain, expected, 2 * _plain(*expected))
    for tensor, wanted in zip(tensors, truth[1:], strict=True):
        assert tensor.grad.dtype == torch.float32
        assert relative_error(tensor.grad, wanted) <= 2 * TOLERANCE[torch.bfloat16]


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


REFUSALS = {
    "input of another width": (
        lambda group: lora_linear(_ones(2, 3), _ones(4, 5), _ones(2, 5), _ones(4, 2), group=group),
        "ValueError",
        "lora_linear: input of shape [2, 3] does not fit the local weight of shape [4, 5]",
    ),
    "A of the whole layer on a shard": (
        lambda group: lora_linear(_ones(2, 3), _ones(4, 3), _ones(2, 6), _ones(4, 2), group=group),
        "ValueError",
        "lora_linear: lora_a of shape [2, 6] does not fit the local weight of shape [4, 3]; "
        "its last dimension must be 3",
    ),
    "B of the whole layer on a shard": (
        lambda group: lora_linear(_ones(2, 3), _ones(4, 3), _ones(2, 3), _ones(8, 2), group=group),
        "ValueError",
        "lora_linear: lora_b of shape [8, 2] does not fit lora_a of shape [2, 3] and the local "
        "weight of shape [4, 3]; it must be [4, 2]",
    ),
    "factors of two dtypes": (
        lambda group: lora_linear(
            _ones(2, 3), _ones(4, 3), _ones(2, 3), _ones(4, 2, dtype=FP64), group=group
        ),
        "TypeError",
        "lora_linear: lora_b is Double but lora_a is Float; cast one of them",
    ),
    "integer factor": (
        lambda group: lora_linear(
            _ones(2, 3), _ones(4, 3), _ones(2, 3, dtype=torch.int64), _ones(4, 2), group=group
        ),
        "TypeError",
        "lora_linear: lora_a must be floating point, got Long",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case):
    assert_refused(__name__, case)
