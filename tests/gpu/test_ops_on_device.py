"""Every op on the device: against the CPU's loops in fp64 on the same inputs, rounded alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_device import CPU, assert_as_in_fp64, rounded
from op_samples import REGISTERED, samples_of
from reference_ops import ALL_DTYPES, TOLERANCE, aten_path, relative_error
from test_vocab_sample import FILTERS

from parallel_ext import ops


@pytest.mark.parametrize("name", REGISTERED)
def test_an_op_is_that_of_the_cpu_in_fp64(name: str, device: torch.device) -> None:
    op = getattr(torch.ops.parallel_ext, name)
    for sample in samples_of(name, ops.ALONE):
        assert_as_in_fp64(op, sample, device)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def _embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return ops.vocab_embedding(ids, table, 1003, 0, padding_idx=5)


def _empty_embedding(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return ops.vocab_embedding(ids, table, 1003, 1003)  # a shard without rows adds zeros


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    options = ops.LossOptions(label_smoothing=0.1, z_loss=1e-3, softcap=30.0)
    return ops.vocab_cross_entropy(logits, labels, logits.shape[1], (0, logits.shape[1]), options)


def _head_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ops.linear_vocab_cross_entropy(hidden, head, labels, len(head), (0, len(head)))


def _experts(
    hidden: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor, up: torch.Tensor
) -> torch.Tensor:
    """A layer of experts of which the last gets no token."""
    sizes = [len(up)]
    route = ops.moe_route_plan(choices, sizes, 4096, 0)
    counts = route.counts.tolist()
    plan = ops.ExchangePlan.of([[*counts, *route.rows_per_rank.tolist()]], sizes, 0)
    rows, row_weights, origins = ops.moe_dispatch(hidden, weights, route, plan)
    inner = ops.moe_gated_silu(ops.moe_linear(rows, up, counts), row_weights)
    return ops.moe_combine(inner, origins, route, plan)


def _adapted(*tensors: torch.Tensor) -> torch.Tensor:
    dropout = ops.Dropout(p=0.3, key=0x123456789ABCDEF, step=7, token=2**32 - 9, feature=37)
    return ops.lora_linear(*tensors, scale=0.5, dropout=dropout)


LARGER: dict[str, tuple[Callable[..., Any], Callable[[], tuple]]] = {
    "embedding": (_embedding, lambda: (torch.arange(201).view(3, 67), drawn(1003, 37))),
    "embedding of one id": (_embedding, lambda: (torch.full((2, 300), 7), drawn(1003, 8))),
    "embedding without rows": (_empty_embedding, lambda: (torch.tensor([0, 5]), drawn(0, 4))),
    "loss of one id": (_loss, lambda: (drawn(5, 1), torch.zeros(5, dtype=torch.int64))),
    "loss": (_loss, lambda: (drawn(33, 4099), torch.randint(0, 4099, (33,)))),
    "head": (_head_loss, lambda: (drawn(70, 24), drawn(517, 24), torch.randint(0, 517, (70,)))),
    "experts": (
        _experts,
        lambda: (drawn(201, 24), drawn(201, 2), torch.rand(201, 7).topk(2)[1], drawn(8, 26, 24)),
    ),
    "column linear": (ops.column_linear, lambda: (drawn(5, 67, 33), drawn(129, 33), drawn(129))),
    "column linears": (
        lambda rows, *weights: tuple(ops.column_linears(rows, weights)),
        lambda: (drawn(5, 67, 33), drawn(129, 33), drawn(65, 33), drawn(65, 33)),
    ),
    "row linear": (ops.row_linear, lambda: (drawn(5, 67, 33), drawn(129, 33), drawn(129))),
    "adapter": (_adapted, lambda: (drawn(9, 129), drawn(31, 129), drawn(4, 129), drawn(31, 4))),
}


@ALL_DTYPES
@pytest.mark.parametrize("case", LARGER)
def test_odd_sizes_in_all_dtypes(case: str, dtype: torch.dtype, device: torch.device) -> None:
    function, make = LARGER[case]
    assert_as_in_fp64(function, rounded(make(), dtype), device)


def _mask(size: int, feature: int, device: torch.device) -> torch.Tensor:
    """Where a dropout keeps elements of the features from ``feature`` on."""
    eye, ones = torch.eye(size, device=device), torch.ones(5, size, device=device)
    dropout = ops.Dropout(p=0.3, key=0x123456789ABCDEF, step=7, token=2**32 - 5, feature=feature)
    return ops.lora_linear(ones, torch.zeros_like(eye), eye, eye, dropout=dropout).cpu() != 0


@pytest.mark.parametrize("feature", [0, 37, 127, 1000])
def test_dropout_masks_are_those_of_the_cpu(feature: int, device: torch.device) -> None:
    mask = _mask(300, feature, device)
    with aten_path(False):
        expected = _mask(300, feature, CPU)
    assert torch.equal(mask, expected)
    assert 0.6 < mask.double().mean() < 0.8


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("rows", [1, 64])
def test_drawn_tokens_are_those_of_the_cpu(
    rows: int, options: dict[str, Any], device: torch.device
) -> None:
    logits = 3 * torch.randn(rows, 1031)
    arguments = {"vocab_size": 1031, "vocab_range": (0, 1031), "seed": 2**62 + 3, "step": 5}
    ours = ops.vocab_sample(logits.to(device), **arguments, **options).cpu()
    with aten_path(False):
        expected = ops.vocab_sample(logits, **arguments, **options)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("tokens", [0, 3, 8192])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (128, 8), (600, 4)])
def test_choices_are_sorted_as_on_the_cpu(
    num_experts: int, top_k: int, tokens: int, device: torch.device
) -> None:
    choices = torch.randint(num_experts, (tokens, top_k))
    ours = ops.moe_route_plan(choices.to(device), [num_experts], 0, 0)
    with aten_path(False):
        expected = ops.moe_route_plan(choices, [num_experts], 0, 0)
    for name, answer in expected._asdict().items():
        assert torch.equal(getattr(ours, name).cpu(), answer), name


def test_rows_with_nan_and_infinity(device: torch.device) -> None:
    logits = torch.randn(4, 103)
    logits[0, 50], logits[1, [70, 71]], logits[2, 9] = torch.nan, torch.inf, -torch.inf
    on_device = logits.to(device)
    ids = ops.vocab_argmax(on_device, 103, (0, 103)).cpu()
    assert torch.equal(ids, logits.argmax(1))
    drawn = ops.vocab_sample(on_device, 103, (0, 103), seed=1, step=0).cpu()
    assert drawn.tolist()[:2] == [-1, -1]
    assert (drawn[2:] >= 0).all()
    labels = torch.arange(4)
    none = ops.LossOptions(reduction="none")
    loss = ops.vocab_cross_entropy(on_device, labels.to(device), 103, (0, 103), none).cpu()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert relative_error(loss, expected) <= TOLERANCE[torch.float32]


def test_the_comparison_notices_another_answer(device: torch.device) -> None:
    def wrong(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1.0 if rows.dtype == torch.float64 else 1.0 + 1e-4)

    with pytest.raises(AssertionError, match="answer 0"):
        assert_as_in_fp64(wrong, (torch.randn(5),), device)
    with pytest.raises(AssertionError, match="Tensor-likes are not equal"):
        assert_as_in_fp64(lambda rows: rows + torch.rand(()), (torch.randn(5),), device)
