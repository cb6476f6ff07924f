"""A linear layer with its low-rank adapter, cut by output features (column) or input (row)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from philox import kept, philox, scale
from reference_ops import (
    ALL_DTYPES,
    ALL_SIZES,
    BOTH_PATHS,
    MUTATIONS,
    NOTICED,
    TOLERANCE,
    assert_within,
    aten_path,
    doubles,
    grad_outputs,
    on_ranks,
    relative_error,
    threads,
    with_gradients,
    worst,
)
from torch.nn import functional

from parallel_ext.ops import ALONE, Dropout, Group, copy_to_region, lora_linear
from parallel_ext.sharding.layout import split

FP64 = torch.float64
SCALE = 0.75
TOKENS = [(), (4,), (2, 3), (0,)]  # leading dimensions of the input
KINDS = pytest.mark.parametrize("kind", ["column", "row"])
NAMES = ["output", "input", "weight", "lora_a", "lora_b", "bias"]


DROPOUT = Dropout(p=0.3, key=0x123456789ABCDEF, step=7, token=5, feature=37)


def _plain(
    x: torch.Tensor,
    w: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """What peft's Linear computes with the same dtype everywhere."""
    dropped = x
    if dropout is not None:
        tokens = x.numel() // x.shape[-1] if x.numel() else 0
        mask = kept(tokens, x.shape[-1], *dropout).view(x.shape)
        dropped = x * mask * scale(dropout.p)
    return (
        functional.linear(x, w, bias) + functional.linear(functional.linear(dropped, a), b) * SCALE
    )


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
    group: Group,
    kind: str,
    tensors: list[torch.Tensor],
    grad: torch.Tensor,
    mutation: str = "none",
    dropout: Dropout | None = None,
) -> dict[str, float]:
    """Output and gradients of this rank's part against its part of the whole layer's."""
    expected = with_gradients(lambda *args: _plain(*args, dropout), doubles(tensors), grad.double())
    op_group, rank = MUTATIONS[mutation](group)
    x, w, a, b, bias = tensors
    cut, mine = (
        slice(*split(w.size(0 if kind == "column" else 1), group.size)[r])
        for r in (rank, group.rank)
    )
    if kind == "column":

        def layer(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, *rest: torch.Tensor):
            # The sums that the replicated input and factor get from their surroundings.
            x, a = copy_to_region(x, op_group), copy_to_region(a, op_group)
            return lora_linear(x, w, a, *rest, scale=SCALE, dropout=dropout)

        local = [x, w[cut], a, b[cut], bias[cut]]
        shares: list = [(..., mine), ..., mine, ..., mine, mine]
        grad = grad[..., cut]
    else:

        def layer(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *rest):
            part = dropout and dropout._replace(feature=dropout.feature + cut.start)
            b = copy_to_region(b, op_group)
            return lora_linear(x, w, a, b, *rest, scale=SCALE, dropout=part, group=op_group)

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
    dropout: Dropout | None = None,
) -> dict[str, float]:
    errors = {}
    for tokens in TOKENS:
        for layout, grad in grad_outputs((*tokens, sizes[1]), dtype).items():
            tensors = _tensors(tokens, sizes, dtype, factors)
            found = _errors_of_one(group, kind, tensors, grad, dropout=dropout)
            errors.update({f"tokens {tokens}, {layout}: {n}": e for n, e in found.items()})
    return errors


@ALL_SIZES
@KINDS
def test_layer_equals_the_whole_one_whatever_the_rank_and_the_cut(kind, size):
    for rank in (1, 20):
        assert_within(on_ranks(size, _errors, kind, (7, 13, rank)))


@KINDS
@pytest.mark.parametrize("features", [(2, 2, 3), (1, 5, 2), (5, 1, 2)])
def test_layer_equals_the_whole_one_when_ranks_hold_no_feature(kind, features):
    assert_within(on_ranks(3, _errors, kind, features))


@pytest.mark.parametrize("size", [1, 3])
@KINDS
@BOTH_PATHS
def test_layer_with_dropout_equals_the_whole_one(kind, aten, size):
    sizes = (150, 13, 5)  # features over more than one block of the mask
    assert_within(on_ranks(size, _errors, kind, sizes, FP64, FP64, DROPOUT, aten=aten))


@BOTH_PATHS
def test_layer_with_dropout_equals_the_whole_one_over_several_stretches_of_rows(aten):
    tensors = _tensors((40,), (20001, 3, 2), FP64, FP64)  # a stretch has 16 rows
    with aten_path(aten):
        errors = _errors_of_one(
            ALONE, "column", tensors, torch.randn(40, 3, dtype=FP64), dropout=DROPOUT
        )
    assert max(errors.values()) <= TOLERANCE[FP64], errors


@KINDS
@pytest.mark.parametrize("p", [0.0, 1e-6, 1.0])
def test_dropout_at_the_ends_of_its_range(kind, p):
    dropout = DROPOUT._replace(p=p)
    assert_within(on_ranks(2, _errors, kind, (7, 5, 2), FP64, FP64, dropout))


@KINDS
@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["no dropout", "dropout"])
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
def test_layer_is_as_accurate_as_its_base(kind, dtype, factors, dropout):
    assert_within(
        on_ranks(2, _errors, kind, (37, 13, 4), dtype, factors, dropout), 2 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["no dropout", "dropout"])
def test_gradients_in_fp16_do_not_underflow_nor_sums_overflow(dropout):
    tensors = _tensors((40,), (512, 30, 4), torch.float16, torch.float32)
    tensors[3] *= 1e-6
    grad = (torch.randn(40, 30) * 1e-2).half()
    expected = with_gradients(lambda *t: _plain(*t, dropout), doubles(tensors), grad.double())
    actual = with_gradients(lambda *t: lora_linear(*t, scale=SCALE, dropout=dropout), tensors, grad)
    for name, ours, theirs in zip(NAMES, actual, expected, strict=True):
        assert relative_error(ours, theirs) <= TOLERANCE[torch.float16], name
    many = [torch.full((4, 512), 200.0).half(), torch.zeros(8, 512).half(), torch.ones(4, 512)]
    output = lora_linear(*many, torch.full((8, 4), 1e-3))
    assert output[0, 0].item() == pytest.approx(512 * 200 * 4 * 1e-3, rel=1e-3)


@pytest.mark.parametrize("scale", [2**-6, 2**6])
def test_gradients_in_fp16_are_scaled_before_they_are_rounded(scale):
    """Of a size that fp16 holds, though not times 1 / scale."""
    factors = torch.ones(1, 4).half(), torch.ones(2, 1).half()
    tensors = [torch.ones(1, 4).half(), torch.zeros(2, 4).half(), *factors]
    grad = torch.full((1, 2), 60000.0 if scale < 1 else 2.0**-24).half()
    expected = with_gradients(lambda *t: _plain_scaled(*t, scale), doubles(tensors), grad.double())
    actual = with_gradients(lambda *t: lora_linear(*t, scale=scale), tensors, grad)
    for name, ours, theirs in zip(NAMES, actual, expected, strict=False):
        if name in ("lora_a", "lora_b"):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=0.0)


def _plain_scaled(x, w, a, b, scale):
    return x @ w.T + x @ a.T @ b.T * scale


def _mutated(group: Group, kind: str, mutation: str) -> dict[str, float]:
    tensors = _tensors((3,), (8, 8, 2), FP64, FP64)
    grad = torch.randn(3, 8, dtype=FP64)
    return _errors_of_one(group, kind, tensors, grad, mutation, DROPOUT)


@KINDS
def test_the_comparison_notices_broken_layers(kind):
    assert worst(on_ranks(2, _mutated, kind, "none"))[0] <= TOLERANCE[FP64]
    for mutation in ("no exchange", "swapped shards"):
        assert worst(on_ranks(2, _mutated, kind, mutation))[0] > NOTICED, mutation


def _mask(tokens: int, features: int, dropout: Dropout, dtype: torch.dtype = FP64) -> torch.Tensor:
    """The mask times its scale, out of a layer that lets nothing else through."""
    one = torch.eye(features, dtype=dtype)
    ones = torch.ones(tokens, features, dtype=dtype)
    return lora_linear(ones, torch.zeros_like(one), one, one, dropout=dropout)


def test_the_generator_is_philox():
    # The known answers that come with the generator's reference implementation (Random123).
    counter = np.array([[0] * 4, [0xFFFFFFFF] * 4], np.uint64)
    zero, ones = philox(counter, 0)[0], philox(counter, 2**64 - 1)[1]
    assert [hex(w) for w in zero] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    assert [hex(w) for w in ones] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


@BOTH_PATHS
@ALL_DTYPES
def test_the_mask_is_a_function_of_token_and_feature_alone(dtype, aten):
    for feature in (0, 1, 37, 127, 128, 1000):
        dropout = DROPOUT._replace(feature=feature)
        with aten_path(aten):
            mask = _mask(9, 300, dropout, dtype)
        expected = kept(9, 300, *dropout)
        assert torch.equal(mask != 0, expected), feature
        factor = torch.tensor(scale(dropout.p), dtype=FP64)
        assert torch.allclose(mask[expected].double(), factor, rtol=4e-3)


def test_the_mask_drops_as_many_as_it_should_and_changes_with_every_part_of_its_counter():
    masks = {
        name: _mask(500, 200, DROPOUT._replace(**change)) != 0
        for name, change in {
            "as it is": {},
            "key": {"key": DROPOUT.key ^ 1},
            "upper half of the key": {"key": DROPOUT.key ^ (1 << 40)},
            "step": {"step": 8},
            "token": {"token": 505},
            "feature": {"feature": 237},
        }.items()
    }
    for name, mask in masks.items():
        assert mask.double().mean().item() == pytest.approx(0.7, abs=0.006), name
        assert mask.double().mean(0).std().item() == pytest.approx((0.21 / 500) ** 0.5, rel=0.2)
        if name != "as it is":
            agreement = (mask == masks["as it is"]).double().mean().item()
            assert agreement == pytest.approx(0.58, abs=0.01), name


def test_dropout_does_not_depend_on_the_threads():
    tensors = _tensors((300,), (200, 60, 4), torch.float32, torch.float32)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(_mask(300, 200, DROPOUT))
            results.append(
                with_gradients(
                    lambda *t: lora_linear(*t, dropout=DROPOUT), tensors, torch.ones(300, 60)
                )[3]
            )
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0], results[4])
    assert torch.allclose(results[1], results[3]), "the gradient of A"


@pytest.mark.parametrize("dropout", [None, DROPOUT], ids=["no dropout", "dropout"])
def test_only_the_input_and_the_small_product_are_kept_for_backward(dropout):
    x, w, a, b, bias = _tensors((6,), (8, 9, 2), FP64, FP64)
    x, w = x.requires_grad_(), w.requires_grad_(False)
    a.requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(x, w, a, b, bias, scale=SCALE, dropout=dropout)
    places = {t.data_ptr() for t in (x, w, a, b)}
    own = [t for t in kept if t.data_ptr() not in places]
    assert [tuple(t.shape) for t in own] == [(2, 6)]
    assert len(kept) == 5
