"""Tensors and the path of ops on the device of ``tests/gpu``, and the fp64 answers of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from reference_ops import TOLERANCE, aten_path, relative_error
from torch.utils._pytree import tree_flatten, tree_map

CPU = torch.device("cpu")


def device_path(device: torch.device) -> AbstractContextManager[None]:
    """Let the CPU, where it is the device, run what a GPU without a CUDA kernel would."""
    return aten_path(device.type == "cpu")


def placed(values: Any, device: torch.device, exact: bool = False) -> Any:
    """Copy the tensors in ``values`` with their strides; ``exact``: in fp64, dtypes as well."""
    return tree_map(lambda each: _placed(each, device, exact), values)


def _placed(value: Any, device: torch.device, exact: bool) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if exact else value
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    dtype = torch.float64 if exact and tensor.is_floating_point() else tensor.dtype
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    copied = storage.to(device, dtype, copy=True)
    copied = copied.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return copied.requires_grad_(value.requires_grad)


def rounded(args: Iterable[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return leaves in ``dtype``; integers stay as they are."""
    return [
        each.detach().to(dtype).requires_grad_() if each.is_floating_point() else each
        for each in args
    ]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch allocates with NaN, and with the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def answers(function: Callable[..., Any], args: Any) -> list[torch.Tensor]:
    """Return outputs, changed tensors and gradients of ``function(*args)``, on the CPU.

    The gradients are those of a random sum of the outputs, the same on any device.
    """
    output = function(*args)
    inputs = [each for each in tree_flatten(args)[0] if isinstance(each, torch.Tensor)]
    outputs = [each for each in tree_flatten(output)[0] if isinstance(each, torch.Tensor)]
    tracked = [each for each in outputs if each.requires_grad]
    leaves = [each for each in inputs if each.requires_grad] if tracked else []
    generator = torch.Generator().manual_seed(len(tracked))
    weights = [
        torch.randint(-4, 5, each.shape, generator=generator).to(each.device, each.dtype)
        for each in tracked
    ]
    gradients = torch.autograd.grad(tracked, leaves, weights, allow_unused=True) if leaves else []
    changed = inputs if output is None else []
    found = [*outputs, *changed, *gradients]
    return [torch.empty(0) if each is None else each.detach().cpu() for each in found]


def assert_as_in_fp64(
    function: Callable[..., Any], args: Any, device: torch.device, exact_args: Any = None
) -> None:
    """``function(*args)`` on the device is that of the CPU's loops in fp64, each time it runs.

    ``args`` lie on the CPU; the tolerance is that of the lowest precision among them. The loops get
    ``exact_args`` where they are given.
    """
    exact = args if exact_args is None else exact_args
    with aten_path(False):
        expected = answers(function, placed(exact, CPU, exact=True))
    floats = [
        each.dtype
        for each in tree_flatten(args)[0]
        if isinstance(each, torch.Tensor) and each.is_floating_point()
    ]
    bound = max((TOLERANCE[each] for each in floats), default=0.0)
    runs = []
    for again in range(3):
        on_device = placed(args, device)
        if again < 2:
            runs.append(answers(function, on_device))
            continue
        with poisoned():
            runs.append(answers(function, on_device))
    for number, (first, second, third, truth) in enumerate(zip(*runs, expected, strict=True)):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
        for actual in (first, third):
            if not truth.is_floating_point():
                assert torch.equal(actual, truth), f"answer {number}"
            else:
                error = relative_error(actual, truth)
                assert error <= bound, f"answer {number}: {error:.1e}"
