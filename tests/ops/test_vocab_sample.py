"""The next token of logits that are cut over the ranks: that of torch, numpy and HuggingFace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from philox import philox
from reference_ops import (
    ALL_SIZES,
    BOTH_PATHS,
    assert_refused,
    counted,
    on_ranks,
    own_range,
    threads,
)
from transformers.generation import logits_process

from parallel_ext.ops import ALONE, Group, vocab_argmax, vocab_sample

INFINITY, NAN = float("inf"), float("nan")
DRAWN_BY = {"seed": (5 << 32) + 3, "step": 2}


def _own(logits: torch.Tensor, group: Group) -> tuple[torch.Tensor, int, tuple[int, int]]:
    """The first arguments of the ops; the columns of a rank lie in longer rows."""
    vocab_size = logits.shape[1]
    start, stop = own_range(vocab_size, group)
    return logits[:, start:stop], vocab_size, (start, stop)


def _argmax(group: Group, logits: torch.Tensor) -> torch.Tensor:
    return vocab_argmax(*_own(logits, group), group=group)


def _sample(group: Group, logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    return vocab_sample(*_own(logits, group), **{**DRAWN_BY, **options}, group=group)


ROWS = {
    "one": [[3.0]],
    "two equal ones": [[0.0, 2.0, 1.0, 2.0, -1.0]],
    "all equal": [[1.0] * 5, [-INFINITY] * 5, [INFINITY] * 5],
    "zeros": [[-0.0, 0.0, -0.0]],
    "NaN": [[1.0, NAN, INFINITY, NAN, 0.0], [NAN] * 5],
    "infinite": [[0.0, -INFINITY, INFINITY, 1.0, INFINITY]],
    "no row": torch.empty(0, 5).tolist(),
}


@ALL_SIZES
@pytest.mark.parametrize("rows", ROWS)
def test_argmax_is_that_of_torch(rows: str, size: int) -> None:
    logits = torch.tensor(ROWS[rows]).reshape(-1, len((ROWS[rows] or [[0] * 5])[0]))
    for dtype in (torch.float64, torch.bfloat16):
        for ids in on_ranks(size, _argmax, logits.to(dtype)):
            assert torch.equal(ids, logits.argmax(1))


def _scores(vocab_size: int, rows: int, spread: float = 3.0) -> torch.Tensor:
    """Random logits, among them no equal ones, in fp32; some ids are out of the question."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = spread * torch.randn(rows, vocab_size, generator=generator)
    logits[::3, :: max(2, vocab_size // 2)] = -INFINITY
    return logits


def _noise(rows: int, vocab_size: int, seed: int, step: int) -> np.ndarray:
    """The Gumbel noise of all ids as csrc/vocab/sample.h says."""
    counter = np.zeros((rows, -(-vocab_size // 2), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])
    counter[..., 1] = np.arange(rows)[:, None]
    counter[..., 2:] = step, 1
    words = philox(counter, seed).reshape(rows, -1, 2)[:, :vocab_size]
    bits = (words[..., 0] << np.uint64(20)) | (words[..., 1] >> np.uint64(12))
    return -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-52))


def _filtered(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """What HuggingFace's processors leave of the logits, in fp64."""
    scores = logits.double() / temperature
    if top_k:
        scores = logits_process.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = logits_process.TopPLogitsWarper(top_p)(None, scores)
    return logits_process.MinPLogitsWarper(min_p)(None, scores)


FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 4, "temperature": 1.7},
    "top_k of 1": {"top_k": 1},
    "top_k of more than there are": {"top_k": 10**6},
    "top_p": {"top_p": 0.7, "temperature": 2.0},
    "top_p of almost all": {"top_p": 0.999, "temperature": 5.0},
    "top_p of 0": {"top_p": 0.0},
    "min_p": {"min_p": 0.05},
    "min_p of 1": {"min_p": 1.0},
    "top_k, top_p": {"top_k": 7, "top_p": 0.8, "temperature": 1.5},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 4.0},
    "top_p, min_p": {"top_p": 0.9, "min_p": 0.02, "temperature": 4.0},
}


@BOTH_PATHS
@ALL_SIZES
def test_draws_are_the_same_on_any_ranks_and_filtered_as_by_huggingface(
    size: int, aten: bool
) -> None:
    for vocab_size in (1, 5, 103):
        logits = _scores(vocab_size, 40)
        if vocab_size == 1:
            logits.zero_()
        noise = _noise(40, vocab_size, **DRAWN_BY)
        for name, options in FILTERS.items():
            expected = (_filtered(logits, **options).numpy() + noise).argmax(1)
            for ids in on_ranks(size, _sample, logits, options, aten=aten):
                assert ids.tolist() == expected.tolist(), (name, vocab_size)


def test_draws_of_a_large_vocabulary_do_not_depend_on_threads_or_kernels() -> None:
    logits = _scores(20001, 2, spread=1.0)
    noise = _noise(2, 20001, **DRAWN_BY)
    for options in ({}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}):
        expected = (_filtered(logits, **options).numpy() + noise).argmax(1).tolist()
        for count in (1, 3):
            with threads(count):
                assert _sample(ALONE, logits, options).tolist() == expected, options
        assert on_ranks(1, _sample, logits, options, aten=True)[0].tolist() == expected, options


def test_seed_step_row_and_id_each_change_the_draw() -> None:
    logits = torch.zeros(50, 64)
    draws = {
        text: _sample(ALONE, logits, options)
        for text, options in {
            "as it is": {},
            "seed": {"seed": (5 << 32) + 4},
            "upper half of the seed": {"seed": (6 << 32) + 3},
            "step": {"step": 3},
        }.items()
    }
    for text, ids in draws.items():
        assert len(ids.unique()) > 25, text  # each row, and each id, has noise of its own
        others = [other for name, other in draws.items() if name != text]
        assert all((ids != other).sum() > 40 for other in others), text


@pytest.mark.parametrize("name", ["none", "top_k", "top_p", "min_p", "top_k, top_p"])
def test_draws_follow_the_distribution(name: str) -> None:
    rows, options = 20000, FILTERS[name]
    logits = torch.linspace(-2.0, 1.0, 12)[torch.randperm(12)].expand(rows, 12)
    ids = _sample(ALONE, logits, options)
    expected = rows * _filtered(logits[:1], **options).softmax(1)[0]
    counts = ids.bincount(minlength=12)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert chi_square < 40  # of at most 11 degrees of freedom: one time in 30000


@ALL_SIZES
def test_ids_as_probable_as_the_last_one_kept_stay(size: int) -> None:
    """Whichever rank holds them: a filter must not know where the vocabulary is cut."""
    logits = torch.tensor([2.0, 1.0, -0.0, 1.0, 0.0, 0.0, 1.0]).expand(400, 7)
    for options, kept in (
        ({"top_k": 2}, {0, 1, 3, 6}),
        ({"top_k": 5}, set(range(7))),
        ({"top_p": 0.5}, {0, 1, 3, 6}),
        ({"top_p": 0.95}, set(range(7))),
        ({"top_k": 2, "top_p": 0.9}, {0, 1, 3, 6}),
        ({"top_k": 2, "top_p": 0.4}, {0}),  # 0.475 of what the ties of top_k leave
        ({"top_k": 2, "top_p": 0.55}, {0, 1, 3, 6}),
        ({"min_p": 0.36}, {0, 1, 3, 6}),
    ):
        for ids in on_ranks(size, _sample, logits, options):
            assert set(ids.tolist()) == kept, options


@BOTH_PATHS
@pytest.mark.parametrize("size", [1, 3])
def test_rows_without_a_distribution_raise(size: int, aten: bool) -> None:
    rows = [[0.0, 1.0, 2.0], [0.0, NAN, 1.0], [INFINITY, 0.0, 1.0], [-INFINITY] * 3]
    for name, options in FILTERS.items():
        for ids in on_ranks(size, _sample, torch.tensor(rows), options, aten=aten):
            assert ids[0] >= 0, name
            assert ids[1:].tolist() == [-1] * 3, name


def _bytes_sent(group: Group, options: dict[str, Any] | None) -> tuple[int, int]:
    logits = _scores(103, 3)
    _, counts = counted(
        lambda: _argmax(group, logits) if options is None else _sample(group, logits, options)
    )
    return counts.pop("all_gather", 0), counts.pop("all_gather_bytes", 0)


def test_messages_are_few_and_small_and_do_not_grow_with_the_vocabulary() -> None:
    of_row = {
        None: (1, 16),
        "none": (1, 16),
        "min_p": (2, 16 + 4),
        "top_k": (2, 16 + 4 * 5),
        "all": (2, 16 + 4 * 10),
        "top_p": (6, 16 + 4 + 4 * 256 * 8),
    }
    for name, (count, size) in of_row.items():
        for sent in on_ranks(2, _bytes_sent, FILTERS.get(name)):
            assert sent == (count, 3 * size), name
    assert on_ranks(1, _bytes_sent, FILTERS["top_p"]) == [(0, 0)]


def _of_little_temperature(group: Group, temperature: float, filters: dict[str, Any]) -> Any:
    """Rows whose largest is large, small or below zero, beside the next number of fp32."""
    largest = torch.tensor([[3.4e38], [1e-45], [-2e38], [1.0]])
    logits = largest.repeat(1, 5)
    logits[:, [0, 1, 2, 4]] = torch.nextafter(largest, torch.tensor(-INFINITY))
    return _sample(group, logits, {"temperature": temperature, **filters}).tolist()


@BOTH_PATHS
def test_the_least_temperatures_draw_the_largest_logit(aten) -> None:
    for temperature in (5e-324, 1e-300, 1e-100):
        for filters in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
            for ids in on_ranks(2, _of_little_temperature, temperature, filters, aten=aten):
                assert ids == [3] * 4, (temperature, filters)


def _refusal(**options: Any) -> Any:
    return lambda group: _sample(group, torch.zeros(2, 5), options)


def _gathered(group: Group) -> torch.Tensor:
    return vocab_argmax(torch.zeros(2, 5), 5, own_range(5, group), group=group)


REFUSALS = {
    "temperature of 0": (_refusal(temperature=0.0), "ValueError: temperature must be a finite"),
    "negative top_k": (_refusal(top_k=-1), "ValueError: top_k must be at least 1, or 0"),
    "top_p above 1": (_refusal(top_p=1.5), "ValueError: top_p must be in [0, 1], got 1.5"),
    "NaN for min_p": (_refusal(min_p=NAN), "ValueError: min_p must be in [0, 1], got nan"),
    "gathered logits": (_gathered, "ValueError: logits hold 5 of the vocabulary"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    assert_refused(__name__, case)
