"""What the op tests share: single-process answers in plain torch, comparisons, calls on ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch.nn.functional import embedding

from parallel_ext import _C
from parallel_ext.ops import ALONE, Group, vocab_embedding
from parallel_ext.sharding.layout import split

# Our error may be this large, relative to the largest element of the full tensor. In the lower
# precisions a model's single process has an error of its own against fp64 (DESIGN: at most twice
# it); an op is held against the fp64 answer to the same rounded inputs.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NOTICED = 1e-2  # an invariant that a mutation check broke must show at least this error, in fp64

ALL_SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
ALL_DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
BOTH_PATHS = pytest.mark.parametrize("aten", [False, True], ids=["cpu_loops", "aten_path"])


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op makes sums of numbers of ``dtype``, as ``wide_type`` of csrc."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# What a mutation check gives an op: the group to communicate with, and the rank whose shard to use.
MUTATIONS: dict[str, Callable[[Group], tuple[Group, int]]] = {
    "none": lambda group: (group, group.rank),
    "no exchange": lambda group: (ALONE, group.rank),
    "swapped shards": lambda group: (group, group.size - 1 - group.rank),
}


@contextmanager
def aten_path(on: bool) -> Iterator[None]:
    """Run the kernels of the other devices on the CPU."""
    before = _C.aten_path_on_cpu()
    _C.set_aten_path_on_cpu(on)
    try:
        yield
    finally:
        _C.set_aten_path_on_cpu(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _call(group: Group, function: Callable[..., Any], args: Sequence[Any], aten: bool) -> Any:
    torch.manual_seed(0)
    with aten_path(aten):
        return function(group, *args)


def _call_on_rank(function: Callable[..., Any], args: Sequence[Any], aten: bool) -> Any:
    return _call(Group.of(dist.group.WORLD), function, args, aten)


def on_ranks(size: int, function: Callable[..., Any], *args: Any, aten: bool = False) -> list[Any]:
    """``function(group, *args)`` of every rank; a group of one is this process."""
    if size == 1:
        return [_call(ALONE, function, args, aten)]
    return pool(size).run(_call_on_rank, function, args, aten)


def assert_all_raise(
    function: Callable[..., Any], *args: Any, error: str, text: str, aten: bool = False
) -> None:
    """``function(group, *args)`` raises ``error`` with ``text`` on both of two ranks."""
    pool(2).assert_raises(_call_on_rank, function, args, aten, error=error, words=text)


def _refused(group: Group, module: str, case: str) -> Any:
    return importlib.import_module(module).REFUSALS[case][0](group)


def assert_refused(module: str, case: str, aten: bool = False) -> None:
    """A case of a test module's ``REFUSALS`` raises on both of two ranks.

    ``REFUSALS`` maps the case to a call with the group, and to the error's type and a part of its
    text, as in "ValueError: row_linear: bias". The ranks find the call by the module's name, since
    a lambda does not travel.
    """
    error, _, text = importlib.import_module(module).REFUSALS[case][1].partition(": ")
    assert_all_raise(_refused, module, case, error=error, text=text, aten=aten)


def counted(function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What a call returns, and the collectives that it takes."""
    _C.reset_collective_counts()
    return function(), _C.collective_counts()


def counted_both_ways(forward: Callable[[], torch.Tensor]) -> list[dict[str, int]]:
    """The collectives of a forward, and of the backward of its sum."""
    output, of_forward = counted(forward)
    return [of_forward, counted(output.sum().backward)[1]]


def own_range(n: int, group: Group) -> tuple[int, int]:
    """This rank's range of ``n``."""
    return split(n, group.size)[group.rank]


def sizes_of(n: int, group: Group) -> list[int]:
    """How many of ``n`` each rank has."""
    return [stop - start for start, stop in split(n, group.size)]


def with_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_output: torch.Tensor,
) -> list[torch.Tensor]:
    """The output and the gradients of all inputs, whose strides are kept."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad_output.to(output.dtype))
    return [output.detach(), *gradients]


def doubles(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in fp64, for the reference."""
    return [tensor.double() for tensor in tensors]


def grad_outputs(shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gradients of an output in the memory layouts that autograd hands to a backward."""
    return {
        "contiguous": torch.randn(*shape, dtype=dtype),
        "stride 0": torch.randn((), dtype=dtype).expand(shape),
        "non-contiguous": torch.randn(*shape, 2, dtype=dtype)[..., 0],
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor, share: Any = ...) -> float:
    """max|a-b| / max|b| of a rank's ``share`` (an index) of the full ``expected``.

    Infinite where shapes, or the places of NaN and infinities, differ.
    """
    scale = (
        expected.double().nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if expected.numel() else 0.0
    )
    a, b = actual.double(), expected[share].double()
    if a.shape != b.shape:
        return float("inf")
    special = ~b.isfinite()
    if not torch.allclose(a[special], b[special], equal_nan=True):
        return float("inf")
    distance = (a - b)[~special].abs().nan_to_num(nan=float("inf"))
    return distance.max().item() / (scale or 1.0) if distance.numel() else 0.0


def worst(errors_of_ranks: Sequence[dict[str, float]]) -> tuple[float, str]:
    """The largest error of all ranks and cases, and where it was found."""
    return max(
        (error, f"rank {rank}, {case}")
        for rank, errors in enumerate(errors_of_ranks)
        for case, error in errors.items()
    )


def assert_within(
    ranks: Iterable[dict[str, float] | tuple[float, str]], limit: float = TOLERANCE[torch.float64]
) -> None:
    """Assert that no rank's differences, or its worst and where that is, are above ``limit``."""
    for rank, found in enumerate(ranks):
        for name, error in [found[::-1]] if isinstance(found, tuple) else found.items():
            assert error <= limit, f"rank {rank}: {name} differs by {error:.1e}"


def data_bytes(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor, to compare what must be bitwise equal."""
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def errors_of_embedding(
    group: Group,
    ids: torch.Tensor,
    table: torch.Tensor,
    grad: torch.Tensor,
    *,
    sizes: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    padding_idx: int | None = None,
    mutation: str = "none",
) -> dict[str, float]:
    """Output and gradient of this rank's rows against those of the whole ``table`` in one process.

    ``grad`` is that of all tokens; ``sizes``, ``tokens`` and ``padding_idx`` are the op's.
    """
    vocab_size = table.size(0)
    ends = [0, *accumulate(sizes or sizes_of(vocab_size, group))]
    op_group, rank = MUTATIONS[mutation](group)
    (start, stop), shard = (ends[r : r + 2] for r in (group.rank, rank))
    own: Any = ...
    if tokens is not None:
        first = sum(tokens[: group.rank])
        own = ..., slice(first, first + tokens[group.rank]), slice(None)
    expected = with_gradients(
        lambda table: embedding(ids, table, padding_idx), [table.double()], grad.double()
    )
    options = {"padding_idx": padding_idx, "sizes": sizes, "tokens": tokens, "group": op_group}
    output, gradient = with_gradients(
        lambda rows: vocab_embedding(ids, rows, vocab_size, start, **options),
        [table[slice(*shard)]],
        grad[own],
    )
    return {
        "output": relative_error(output, expected[0][own]),
        "weight": relative_error(gradient, expected[1], slice(start, stop)),
    }
