"""Ops on other streams, in threads and in CUDA graphs have the bits of ops on the usual stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_device import answers, placed, rounded
from test_ops_on_device import LARGER, drawn
from torch.utils._pytree import tree_map

from parallel_ext import ops


def _mixture(
    hidden: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Router and experts of one rank: nobody reads how many rows each expert has."""
    weights, ids = ops.moe_router(logits, 2, True)
    route = ops.moe_route_plan(ids, [len(down)], 0, 0)
    plan = ops.ExchangePlan.alone(len(down))
    rows, row_weights, origins = ops.moe_dispatch(hidden, weights, route, plan)
    inner = ops.moe_gated_silu(ops.moe_linear(rows, gate_up, route.counts), row_weights)
    return ops.moe_combine(ops.moe_linear(inner, down, route.counts), origins, route, plan)


CASES = {
    **LARGER,
    "a mixture": (
        _mixture,
        lambda: (drawn(201, 24), drawn(201, 7), drawn(7, 32, 24), drawn(7, 24, 16)),
    ),
}
WAITS = {"experts"}  # the host reads how many rows each expert has, which no graph can hold


def _args(case: str, device: torch.device, seed: int) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function and its bf16 arguments on the device."""
    torch.manual_seed(seed)
    function, make = CASES[case]
    return function, [placed(each, device) for each in rounded(make(), torch.bfloat16)]


def _behind_work(function: Callable[..., Any], args: list[Any], stream: torch.cuda.Stream) -> Any:
    """Compute answers on the stream, from inputs that arrive there after a while."""
    with torch.cuda.stream(stream):
        inputs = [torch.full_like(each, 0 if each.dtype == torch.int64 else 7) for each in args]
        torch.cuda._sleep(2**26)
        with torch.no_grad():
            torch._foreach_copy_(inputs, args)
        inputs = [
            new.requires_grad_(old.requires_grad) for new, old in zip(inputs, args, strict=True)
        ]
        return answers(function, inputs)


@pytest.mark.parametrize("case", CASES)
def test_an_op_stays_on_the_stream_of_its_caller(case: str, cuda: torch.device) -> None:
    function, args = _args(case, cuda, 0)
    expected = answers(function, args)
    torch.cuda.synchronize()
    found = _behind_work(function, args, torch.cuda.Stream())
    for actual, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, truth, rtol=0, atol=0, equal_nan=True)


def test_threads_on_streams_of_their_own_do_not_disturb_each_other(cuda: torch.device) -> None:
    seeds = range(4)
    jobs = [_args("loss", cuda, seed) for seed in seeds]
    expected = [answers(*job) for job in jobs]
    torch.cuda.synchronize()
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        for _ in range(5):
            found[seed] = _behind_work(*jobs[seed], torch.cuda.Stream())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert all(map(torch.equal, found[seed], expected[seed]))


@pytest.mark.parametrize("case", [each for each in CASES if each not in WAITS])
def test_a_cuda_graph_replays_an_op_on_new_inputs(case: str, cuda: torch.device) -> None:
    function, inputs = _args(case, cuda, 0)
    leaves = [each for each in inputs if each.requires_grad]

    def run() -> list[torch.Tensor]:
        output = function(*inputs)
        outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        outputs = [each for each in outputs if each.requires_grad]
        ones = [torch.ones_like(each) for each in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, ones)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    _, others = _args(case, cuda, 1)
    with torch.no_grad():
        torch._foreach_copy_(inputs, others)
    expected = [each.detach().clone() for each in run()]
    graph.replay()
    torch.cuda.synchronize()
    for actual, truth in zip(tree_map(torch.Tensor.detach, captured), expected, strict=True):
        torch.testing.assert_close(actual, truth, rtol=0, atol=0, equal_nan=True)
