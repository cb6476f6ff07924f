"""The borders of a tensor-parallel region: the sums and gathers that make ranks one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from ranks import fork
from reference_ops import (
    ALL_SIZES,
    NOTICED,
    assert_all_raise,
    assert_refused,
    assert_within,
    data_bytes,
    grad_outputs,
    on_ranks,
    own_range,
    relative_error,
    sizes_of,
    with_gradients,
    worst,
)

from parallel_ext import _C
from parallel_ext.ops import ALONE, Group, copy_to_region, gather_from_region, reduce_from_region
from parallel_ext.sharding.layout import split

FP64 = torch.float64


def _inputs(*shape: int) -> dict[str, torch.Tensor]:
    """The same numbers on every rank in the memory layouts that users bring."""
    return {
        "contiguous": torch.randn(*shape, dtype=FP64),
        "transposed": torch.randn(*reversed(shape), dtype=FP64).mT,
        "stride 0": torch.randn(shape[-1], dtype=FP64).expand(shape),
        "no tokens": torch.randn(0, *shape[1:], dtype=FP64),
        "no features": torch.randn(*shape[:-1], 0, dtype=FP64),
    }


def _sum_errors(group: Group) -> dict[str, float]:
    """reduce_from_region of addends 1x, 2x, ...; every rank holds the gradient of the sum."""
    errors = {}
    for name, tensor in _inputs(3, 5).items():
        total = sum(range(1, group.size + 1)) * tensor
        for kind, grad in grad_outputs(tensor.shape, FP64).items():
            output, grad_partial = with_gradients(
                lambda partial: reduce_from_region(partial, group),
                [tensor * (group.rank + 1)],
                grad,
            )
            errors[f"{name}, output"] = relative_error(output, total)
            errors[f"{name}, {kind} gradient"] = relative_error(grad_partial, grad)
    return errors


@ALL_SIZES
def test_reduce_sums_the_ranks_and_passes_the_gradient_on(size):
    assert_within(on_ranks(size, _sum_errors))


def _copy_errors(group: Group) -> dict[str, float]:
    """copy_to_region, whose shards send gradients 1g, 2g, ..."""
    errors = {}
    for name, tensor in _inputs(3, 5).items():
        for kind, grad in grad_outputs(tensor.shape, FP64).items():
            output, grad_input = with_gradients(
                lambda input: copy_to_region(input, group), [tensor], grad * (group.rank + 1)
            )
            errors[f"{name}, output"] = relative_error(output, tensor)
            total = sum(range(1, group.size + 1)) * grad
            errors[f"{name}, {kind} gradient"] = relative_error(grad_input, total)
    return errors


@ALL_SIZES
def test_copy_sums_the_gradients_of_the_ranks(size):
    assert_within(on_ranks(size, _copy_errors))


def _gather_errors(group: Group, columns: int) -> dict[str, float]:
    errors = {}
    ranges = split(columns, group.size)
    sizes, own = [stop - start for start, stop in ranges], (..., slice(*ranges[group.rank]))
    for name, full in _inputs(3, columns).items():
        if name == "no features":
            continue
        for kind, grad in grad_outputs(full.shape, FP64).items():
            output, grad_shard = with_gradients(
                lambda shard: gather_from_region(shard, sizes, group), [full[own]], grad
            )
            errors[f"{name}, output"] = relative_error(output, full)
            errors[f"{name}, {kind} gradient"] = relative_error(grad_shard, grad, own)
    return errors


@ALL_SIZES
@pytest.mark.parametrize("columns", [1, 3, 10])
def test_gather_joins_uneven_and_empty_shards(size, columns):
    assert_within(on_ranks(size, _gather_errors, columns))


def _gathered_dtypes(group: Group) -> dict[str, float]:
    full = torch.tensor([[0, 1, 2, 3, 4]])
    own = (..., slice(*own_range(5, group)))
    sizes = sizes_of(5, group)
    nothing = gather_from_region(full[..., :0], [0] * group.size, group)
    errors = {"no columns at all": relative_error(nothing, full[..., :0])}
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.bfloat16):
        output = gather_from_region(full.to(dtype)[own], sizes, group)
        errors[str(dtype)] = relative_error(output, full.to(dtype))
    return errors


@pytest.mark.parametrize("size", [1, 2])
def test_gather_takes_any_dtype(size):
    error, case = worst(on_ranks(size, _gathered_dtypes))
    assert error == 0, case


def _sum_bytes(group: Group) -> bytes:
    generator = torch.Generator().manual_seed(group.rank)
    return data_bytes(reduce_from_region(torch.randn(257, 3, generator=generator), group))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_sum_has_the_same_bits_on_every_rank(size):
    assert len(set(on_ranks(size, _sum_bytes))) == 1


Border = Callable[[torch.Tensor, Group], torch.Tensor]
BORDERS: dict[str, tuple[Border, Border]] = {
    "whole": (copy_to_region, reduce_from_region),
    "no sum in forward": (
        copy_to_region,
        lambda partial, group: reduce_from_region(partial, ALONE),
    ),
    "no sum in backward": (lambda input, group: copy_to_region(input, ALONE), reduce_from_region),
}


def _mlp_errors(group: Group, borders: str) -> dict[str, float]:
    """A 7-wide MLP over the ranks against the whole one."""
    enter, leave = BORDERS[borders]
    x, up, down = (torch.randn(*shape, dtype=FP64) for shape in ((5, 3), (7, 3), (3, 7)))
    grad, own = torch.randn(5, 3, dtype=FP64), slice(*own_range(7, group))
    expected = with_gradients(lambda x, up, down: (x @ up.T).tanh() @ down.T, [x, up, down], grad)
    actual = with_gradients(
        lambda x, up, down: leave((enter(x, group) @ up.T).tanh() @ down.T, group),
        [x, up[own], down[:, own]],
        grad,
    )
    shares = {"output": ..., "input": ..., "up": own, "down": (..., own)}
    return {
        name: relative_error(got, wanted, share)
        for (name, share), got, wanted in zip(shares.items(), actual, expected, strict=True)
    }


@ALL_SIZES
def test_mlp_of_uneven_shards_equals_the_unsharded_mlp(size):
    assert_within(on_ranks(size, _mlp_errors, "whole"))


@pytest.mark.parametrize("borders", ["no sum in forward", "no sum in backward"])
def test_the_mlp_comparison_notices(borders):
    assert worst(on_ranks(2, _mlp_errors, borders))[0] > NOTICED


REFUSALS = {
    "gather of another width": (
        lambda group: gather_from_region(torch.ones(2, 4), [3, 3], group),
        "ValueError: must hold 3 columns, got shape [2, 4]",
    ),
    "gather of too few sizes": (
        lambda group: gather_from_region(torch.ones(2, 3), [3], group),
        "ValueError: gather_from_region: 1 sizes were given for a group of 2 ranks",
    ),
    "gather of a scalar": (
        lambda group: gather_from_region(torch.ones(()), [1, 1], group),
        "ValueError: must hold 1 columns, got shape []",
    ),
    "rank outside the group": (
        lambda group: gather_from_region(torch.ones(1), [1, 1], group._replace(rank=2)),
        "ValueError: gather_from_region: rank 2 is not in [0, 2)",
    ),
    "wrong group size": (
        lambda group: reduce_from_region(torch.ones(2), group._replace(size=3)),
        "ValueError: has 2 ranks, but group_size is 3; pass the size of the same group",
    ),
    "unknown group": (
        lambda group: reduce_from_region(torch.ones(2), group._replace(name="nowhere")),
        "ValueError: reduce_from_region: no live process group is named 'nowhere'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_every_rank_refuses(case):
    assert_refused(__name__, case)


STEPS: dict[str, Callable[[Group], torch.Tensor]] = {
    "reduce 6": lambda group: reduce_from_region(torch.ones(6), group),
    "reduce 4": lambda group: reduce_from_region(torch.ones(4), group),
    "gather": lambda group: gather_from_region(torch.ones(1, 3), [3, 3], group),
}


def _checked_order(group: Group, steps_of_ranks: list[list[str]]) -> int:
    _C.set_order_check(True)
    try:
        return len([STEPS[step](group) for step in steps_of_ranks[group.rank]])
    finally:
        _C.set_order_check(False)


def _after_a_job_of_its_own(rank: int, folder: str, pipe: Connection) -> None:
    _C.set_order_check(True)
    jobs = [("alone", 0, 1)] if rank == 0 else []
    for name, number, size in [*jobs, ("both", rank, 2)]:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{name}", rank=number, world_size=size
        )
        name = dist.group.WORLD.group_name
        total = torch.ops.parallel_ext.reduce_from_region(torch.ones(1), size, name)
        dist.destroy_process_group()
    pipe.send(total.item())


def test_order_check_counts_from_the_start_of_a_group(tmp_path):
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    for rank, (_, theirs) in enumerate(pipes):
        fork(rank, _after_a_job_of_its_own, rank, str(tmp_path), theirs)
        theirs.close()
    for ours, _ in pipes:
        assert ours.poll(60)
        assert ours.recv() == 2


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "texts"),
    [
        (
            ["gather", "reduce 6"],
            ["reduce 6", "gather"],
            ["gather_from_region/all_gather as number", "reduce_from_region/all_reduce as number"],
        ),
        (["gather", "reduce 6"], ["gather", "reduce 4"], ["with 24 bytes", "with 16 bytes"]),
    ],
    ids=["other op", "other size"],
)
def test_order_check_names_what_each_rank_was_about_to_run(of_rank_0, of_rank_1, texts):
    for text in ["all ranks must create the same collectives in the same order", *texts]:
        steps = [of_rank_0, of_rank_1]
        assert_all_raise(_checked_order, steps, error="RuntimeError", text=text)
